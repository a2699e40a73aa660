"""The HTTP application over one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI

from moonlet.chat.tokenizer import Tokenizer
from moonlet.serve import health
from moonlet.serve.auth import require_key
from moonlet.serve.errors import install_error_handlers
from moonlet.serve.openai import chat, completions, models, tokenize
from moonlet.serve.request_id import RequestIdMiddleware
from moonlet.serve.service import Service
from moonlet.serve.settings import ServeConfig

if TYPE_CHECKING:
    from moonlet.engine.engine import Engine

__all__ = ["create_app"]


def create_app(engine: Engine, tokenizer: Tokenizer, config: ServeConfig) -> FastAPI:
    """Build the application.

    Args:
        engine: Running engine; the caller closes it after the server has stopped.
        tokenizer: The checkpoint's vocabulary. Without the XTML names only raw completions are
            served.
        config: Settings.

    Returns:
        An ASGI application; its `Service` is ``app.state.service``.
    """
    app = FastAPI(
        title="moonlet", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.service = Service(engine, tokenizer, config)
    install_error_handlers(app)
    app.include_router(health.router)
    for module in (chat, completions, models, tokenize):
        app.include_router(module.router, dependencies=[Depends(require_key)])
    app.add_middleware(RequestIdMiddleware)
    return app
