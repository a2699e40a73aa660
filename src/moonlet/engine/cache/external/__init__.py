"""Checkpoints beyond the arenas: host memory, disk, and hand-over between processes. No torch."""

from moonlet.engine.cache.external.checkpoint import Checkpoint
from moonlet.engine.cache.external.geometry import (
    CacheIdentity,
    Payload,
    StateGeometry,
    break_even_tokens,
)
from moonlet.engine.cache.external.load_queue import Load, LoadQueue
from moonlet.engine.cache.external.pool import ExternalPool, PoolStats
from moonlet.engine.cache.external.session import (
    SessionHeader,
    SessionTarget,
    export_session,
    import_session,
)

__all__ = [
    "CacheIdentity",
    "Checkpoint",
    "ExternalPool",
    "Load",
    "LoadQueue",
    "Payload",
    "PoolStats",
    "SessionHeader",
    "SessionTarget",
    "StateGeometry",
    "break_even_tokens",
    "export_session",
    "import_session",
]
