"""``/health`` tells that the process answers, ``/ready`` that it takes requests."""

from __future__ import annotations

from fastapi import APIRouter, Request

from moonlet.serve.errors import Draining
from moonlet.serve.service import service_of

__all__ = ["router"]

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Answer as long as the process does."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Answer 200 while the engine takes requests, 503 while draining or after its failure."""
    service = service_of(request)
    if service.is_draining or not service.engine.is_accepting:
        raise Draining(service.config.retry_after_s)
    return {"status": "ready"}
