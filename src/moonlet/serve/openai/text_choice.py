"""One choice of a raw completion: generated ids to text, with stop strings on the text."""

from __future__ import annotations

from collections.abc import Sequence

from moonlet.chat.stop import StopStrings
from moonlet.chat.tokenizer import Tokenizer
from moonlet.engine.request import FinishReason

__all__ = ["TextChoice"]


class TextChoice:
    """Follows one continuation from its first token to its end.

    Args:
        tokenizer: Vocabulary.
        stop: Stop strings; matched text and what follows is left out.
        skip_special: Leave out control names, except those of the XTML markup.

    Attributes:
        is_over: The text is complete although the engine may go on: abort it.
        num_tokens: Generated ids so far, the stop id included.
        finish_reason: "stop" or "length" once over, else None.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], *, skip_special: bool = False
    ) -> None:
        self._decoder = tokenizer.stream_decoder(skip_special=skip_special)
        self._stop = StopStrings(stop)
        self.is_over = False
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def feed(self, ids: Sequence[int], finish: FinishReason | None) -> str:
        """Consume generated ids; return the text that became certain.

        Args:
            ids: New ids; after a regular stop the last is the stop id, which is not text.
            finish: The engine's reason on its last output.
        """
        self.num_tokens += len(ids)
        shown = ids[:-1] if finish == "stop" else ids
        text = "".join([self._decoder.push(id) for id in shown])
        if finish is not None:
            text += self._decoder.flush()
        certain, matched = self._stop.push(text)
        if matched is not None:
            self.is_over, self.finish_reason = True, "stop"
        elif finish is not None:
            certain += self._stop.flush()
            self.is_over, self.finish_reason = True, finish
        return certain
