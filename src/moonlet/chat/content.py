"""Message content: strings, text parts and image parts (chat-protocol.md sections 3.3 and 3.9).

Images are structure: only an image part takes an image prompt, text is never searched for
placeholders, so nothing a user writes can claim or exhaust prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from moonlet.chat.tool_results import Message, order_tool_results
from moonlet.chat.xtml import SegmentWriter
from moonlet.core.errors import RequestError

__all__ = ["ImagePrompts", "image_parts", "image_prompt", "write_content"]

_PLACEHOLDER = "<|kimi_image_placeholder|>"
_IMAGE_PROMPT = re.compile(
    r"<\|media_begin\|>image [0-9]+x[0-9]+<\|media_content\|>(<\|media_pad\|>)+<\|media_end\|>"
)
_IMAGE_TYPES = ("image", "image_url")


def image_prompt(width: int, height: int, num_positions: int = 1) -> str:
    """Return the control text that stands for an image.

    Args:
        width: Width of the decoded image before resizing, pixels.
        height: Height likewise.
        num_positions: Number of pad tokens; one where the engine expands images itself.
    """
    pads = "<|media_pad|>" * num_positions
    return f"<|media_begin|>image {width}x{height}<|media_content|>{pads}<|media_end|>"


class ImagePrompts:
    """The image prompts of one rendering, taken in order.

    Args:
        prompts: One per image part, or None to write the plain placeholder instead.

    Raises:
        RequestError: A prompt has another form than ``image_prompt`` gives; such text would be
            encoded with control names allowed.
    """

    def __init__(self, prompts: Iterable[str] | None) -> None:
        self._prompts = None if prompts is None else list(prompts)
        self._taken = 0
        for index, prompt in enumerate(self._prompts or ()):
            if not isinstance(prompt, str) or not _IMAGE_PROMPT.fullmatch(prompt):
                raise RequestError(
                    f"image_prompts[{index}] is {prompt!r}; use image_prompt(width, height)",
                    param="image_prompts",
                )

    def take(self, path: str) -> str:
        """Return the next prompt.

        Raises:
            RequestError: There are more image parts than prompts.
        """
        if self._prompts is None:
            return _PLACEHOLDER
        if self._taken == len(self._prompts):
            raise RequestError(
                f"{path} is image {self._taken + 1}, but {self._taken} image prompts were given",
                param=path,
            )
        self._taken += 1
        return self._prompts[self._taken - 1]

    def finish(self) -> None:
        """Check that every prompt was taken.

        Raises:
            RequestError: Some were not.
        """
        if self._prompts is not None and self._taken != len(self._prompts):
            raise RequestError(
                f"{len(self._prompts)} image prompts were given for {self._taken} image parts",
                param="image_prompts",
            )


def write_content(out: SegmentWriter, content: object, images: ImagePrompts, path: str) -> None:
    """Write the content of a message: one segment per part, nothing between parts.

    Args:
        out: Receives the segments; images are never marked as generated.
        content: A string, None, or a list of text and image parts.
        images: Source of image prompts.
        path: Field path for errors, ``messages[0].content``.

    Raises:
        RequestError: The content or a part has another type, or image prompts run out.
    """
    if content is None:
        return
    if isinstance(content, str):
        out.text(content)
        return
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{path} is {type(content).__name__}; want a string or an array of parts", param=path
        )
    for index, part in enumerate(content):
        _write_part(out, part, images, f"{path}[{index}]")


def _write_part(out: SegmentWriter, part: object, images: ImagePrompts, path: str) -> None:
    if not isinstance(part, Mapping):
        raise RequestError(f"{path} is {type(part).__name__}; want an object", param=path)
    kind = part.get("type")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"{path}.text is missing or no string", param=f"{path}.text")
        out.text(text)
    elif kind in _IMAGE_TYPES:
        out.control(images.take(path), generated=False)
    else:
        raise RequestError(
            f"{path}.type is {kind!r}; supported parts are text, image_url and image",
            param=f"{path}.type",
        )


def image_parts(messages: Sequence[Message]) -> list[Mapping[str, object]]:
    """Return the image parts of a conversation in the order in which prompts are taken."""
    return [
        part
        for placed in order_tool_results(messages)
        if isinstance(placed.message.get("content"), list)
        for part in placed.message["content"]
        if isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES
    ]
