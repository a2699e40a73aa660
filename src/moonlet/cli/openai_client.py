"""A small streaming client for any OpenAI-compatible chat endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

from moonlet.core.errors import MoonletError

__all__ = ["ChatClient", "ChatOptions", "Delta", "EndpointError"]


class EndpointError(MoonletError):
    """The endpoint cannot be reached or refused the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What every request of a conversation carries; None leaves the field out."""

    effort: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of a streamed answer."""

    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None


class ChatClient:
    """One conversation with an endpoint; use it as a context manager.

    Args:
        base_url: Up to and including ``/v1``.
        api_key: Sent as bearer token.
        model: Name to ask for; the endpoint's first when None.
        options: Fields of every request.

    Attributes:
        model: Name that is asked for.
        messages: The conversation so far.

    Raises:
        EndpointError: The endpoint does not answer, or lists no model.
    """

    def __init__(
        self, base_url: str, api_key: str | None, model: str | None, options: ChatOptions
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx2.Timeout(10.0, read=None)
        # a proxy of the surroundings has no business with a model on this machine
        self._http = httpx2.Client(headers=headers, timeout=timeout, trust_env=False)
        self._base_url = base_url.rstrip("/")
        self._options = options
        self.messages: list[dict[str, Any]] = []
        if options.system:
            self.messages.append({"role": "system", "content": options.system})
        try:
            self.model = self._first_model() if model is None else model
        except BaseException:
            self._http.close()
            raise

    def __enter__(self) -> ChatClient:
        """Return the client; leaving the block closes its connections."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the connections."""
        self._http.close()

    def ask(self, question: str) -> Iterator[Delta]:
        """Send a user message and yield the answer; a whole answer joins the conversation.

        Raises:
            EndpointError: The request was refused or the stream broke.
        """
        user = {"role": "user", "content": question}
        content: list[str] = []
        reasoning: list[str] = []
        for delta in self._stream([*self.messages, user]):
            content.append(delta.content)
            reasoning.append(delta.reasoning)
            yield delta
        answer: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        # K3 wants its earlier reasoning back
        if any(reasoning):
            answer["reasoning_content"] = "".join(reasoning)
        self.messages += [user, answer]

    def _first_model(self) -> str:
        try:
            response = self._http.get(f"{self._base_url}/models")
            if response.status_code != 200:
                raise self._refusal(response)
            return response.json()["data"][0]["id"]
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(
                f"{self._base_url}/models lists no model; give --model-name"
            ) from error

    def _stream(self, messages: list[dict[str, Any]]) -> Iterator[Delta]:
        options = self._options
        optional = {
            "reasoning_effort": options.effort,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        body = {"model": self.model, "messages": messages, "stream": True, **given}
        url = f"{self._base_url}/chat/completions"
        try:
            with self._http.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refusal(response)
                yield from _deltas(response.iter_lines())
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _refusal(self, response: httpx2.Response) -> EndpointError:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = response.text[:200]
        return EndpointError(f"{self._base_url} answered {response.status_code}: {message}")

    def _unreachable(self, error: Exception) -> EndpointError:
        return EndpointError(f"{self._base_url} cannot be used: {error}")


def _deltas(lines: Iterator[str]) -> Iterator[Delta]:
    """Read server-sent events up to ``[DONE]``."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise EndpointError(f"the stream has a frame that is not JSON: {data[:80]}") from error
        if "error" in chunk:
            raise EndpointError(f"the stream broke: {chunk['error'].get('message')}")
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            yield Delta(
                delta.get("content") or "",
                delta.get("reasoning_content") or delta.get("reasoning") or "",
                choice.get("finish_reason"),
            )
