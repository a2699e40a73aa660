"""Token counts of a reply and the headers that repeat them (chat-protocol.md 6.6 and 6.7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one reply.

    Attributes:
        prompt_tokens: Prompt without the generation prefix's last tag.
        completion_tokens: Every generated id, markup and stop id included.
        reasoning_tokens: Those of reasoning text.
        cached_tokens: Prompt tokens that were not computed again; None while that is unknown.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens or 0},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def headers(self) -> dict[str, str]:
        """Return the usage headers; that of cached tokens only once the request runs."""
        headers = {"X-Msh-Usage-Prompt-Tokens": str(self.prompt_tokens)}
        if self.cached_tokens is not None:
            headers["X-Msh-Usage-Cached-Tokens"] = str(self.cached_tokens)
        return headers
