"""What the handlers of one server share: engine, tokenizer, settings, and the open requests."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastapi import Request

from moonlet.chat.tokenizer import Tokenizer
from moonlet.core.errors import RequestError, UnknownModel
from moonlet.serve.errors import Draining, Overloaded
from moonlet.serve.settings import ServeConfig

if TYPE_CHECKING:
    from moonlet.engine.engine import Engine

__all__ = ["Service", "service_of"]


class Service:
    """The one object behind all handlers of an application.

    Args:
        engine: Generates tokens.
        tokenizer: The checkpoint's vocabulary.
        config: Settings.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ServeConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.num_requests = 0
        self.is_draining = False

    @contextmanager
    def admitted(self) -> Generator[None]:
        """Hold one of the server's places for the duration of a request.

        Raises:
            Draining: The server is shutting down.
            Overloaded: All places are taken.
        """
        if self.is_draining:
            raise Draining(self.config.retry_after_s)
        if self.num_requests >= self.config.max_requests:
            raise Overloaded(self.num_requests, self.config.retry_after_s)
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def check_model(self, name: str) -> None:
        """Check the model a request asks for.

        Raises:
            UnknownModel: This server does not have it.
        """
        if name not in self.config.model_names:
            served = ", ".join(self.config.model_names)
            raise UnknownModel(f"no model {name[:80]!r} here; this server has {served}")

    def check_can_chat(self) -> None:
        """Check that the vocabulary can express a chat.

        Raises:
            RequestError: XTML names are missing; they are listed.
        """
        missing = self.tokenizer.missing_xtml_names()
        if missing:
            raise RequestError(
                f"this model's vocabulary lacks {', '.join(missing)}, so it cannot chat; "
                "use /v1/completions",
                code="no_chat_template",
                param="model",
            )


def service_of(request: Request) -> Service:
    """Return the service of the application that handles a request."""
    return request.app.state.service
