"""``GET /v1/models``: what this server answers as."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from moonlet.serve.service import Service, service_of

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List every served name."""
    service = service_of(request)
    cards = [_card(service, name) for name in service.config.model_names]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """Describe one served name."""
    service = service_of(request)
    service.check_model(name)
    return _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    config = service.config
    can_chat = not service.tokenizer.missing_xtml_names()
    return {
        "id": name,
        "object": "model",
        "created": config.created,
        "owned_by": "moonlet",
        "root": config.model_root or name,
        "max_model_len": config.max_model_len,
        "context_length": config.max_model_len,
        "supports_image_in": False,
        "supports_video_in": False,
        "supports_reasoning": can_chat,
    }
