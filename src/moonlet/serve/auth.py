"""API keys: kept as digests, compared in constant time (chat-protocol.md section 6.8)."""

from __future__ import annotations

import hmac

from fastapi import Request

from moonlet.core.errors import RequestError
from moonlet.serve.service import service_of
from moonlet.serve.settings import hash_key

__all__ = ["AuthError", "cache_salt", "check_key", "require_key"]


class AuthError(RequestError):
    """The key is missing or wrong (401)."""

    def __init__(self, message: str, *, type: str, code: str) -> None:
        super().__init__(message, status=401, type=type, code=code)
        self.headers = {"WWW-Authenticate": "Bearer"}


def cache_salt(request: Request, wanted: str | None) -> str:
    """Return what a request's prefixes are hashed with: its key, and the salt that it names.

    Requests of different keys never share a prefix, whatever salt they name; without keys all
    requests are one tenant.
    """
    config = service_of(request).config
    tenant = ""
    if config.api_key_hashes:
        tenant = hash_key(_key(request.headers.get("authorization"))).hex()
    return f"{tenant}:{wanted or ''}"


def _key(authorization: str | None) -> str:
    """Return the key of an ``Authorization`` header, empty where there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def check_key(authorization: str | None, key_hashes: tuple[bytes, ...]) -> None:
    """Check an ``Authorization`` header.

    Args:
        authorization: The header's value, or None.
        key_hashes: Digests of accepted keys; with none every request passes.

    Raises:
        AuthError: The header is missing or malformed, or the key is not accepted.
    """
    if not key_hashes:
        return
    key = _key(authorization)
    if not key:
        raise AuthError(
            "no API key; send the header Authorization: Bearer KEY",
            type="invalid_authentication_error",
            code="missing_api_key",
        )
    digest = hash_key(key)
    # every digest is compared, so the time taken does not tell which one came close
    matches = [hmac.compare_digest(digest, known) for known in key_hashes]
    if not any(matches):
        raise AuthError(
            "the API key is not accepted here",
            type="incorrect_api_key_error",
            code="invalid_api_key",
        )


async def require_key(request: Request) -> None:
    """Dependency of every route that needs a key."""
    check_key(request.headers.get("authorization"), service_of(request).config.api_key_hashes)
