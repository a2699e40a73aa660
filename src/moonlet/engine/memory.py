"""Sizes of the engine's memory, and the objects that own it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.engine.cache.blocks import BlockPool
from moonlet.engine.cache.external import CacheIdentity, ExternalPool, StateGeometry
from moonlet.engine.cache.manager import CacheManager
from moonlet.engine.cache.prefix import PrefixCache
from moonlet.engine.cache.state import PagedState, page_bytes, slot_bytes
from moonlet.engine.cache.writeback import Writeback
from moonlet.engine.limits import SchedulerLimits

__all__ = [
    "DEFAULT_MEMORY",
    "ExternalOptions",
    "MemoryOptions",
    "build_memory",
    "build_writeback",
    "state_geometry",
]

_CACHE_BYTES = 4 << 30
_STATE_BYTES = 2 << 30
_MAX_CHECKPOINTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalOptions:
    """Where prefixes are kept beyond the arenas.

    Attributes:
        host_bytes: Budget in host memory; 0 for none.
        directory: Directory that survives a restart; None for none.
        disk_bytes: Budget of the directory.
        max_load_bytes: Bound of the memory that waiting requests' prefixes are read into; one
            that is larger by itself is read alone.
    """

    host_bytes: int = 0
    directory: Path | None = None
    disk_bytes: int = 16 << 30
    max_load_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """How the engine keeps what it has computed.

    Attributes:
        page_size: MLA rows per page, a multiple of ``unit_size``.
        unit_size: Tokens per hash; prefixes are shared at its multiples.
        num_pages: Pages; when absent, enough for every sequence at full length, twice that with
            prefix caching, but at most 4 GiB, and at least one full sequence.
        num_checkpoints: Recurrent states kept beside those of running sequences; when absent,
            what fits in 2 GiB, at least two and at most 1,024.
        prefix_caching: Whether requests share what their prompts have in common.
        unified_pool: One pool of blocks for pages and states, for parity of the logical rules
            (hybrid-cache.md section 3.2). Ids are shared, bytes are not: the native operators take
            contiguous arenas, so the two stay apart, each with room for every id.
        fingerprint: Identity of the model's weights.
        external: Where prefixes are kept beyond the arenas; None for nowhere.
    """

    page_size: int = 256
    unit_size: int = 64
    num_pages: int | None = None
    num_checkpoints: int | None = None
    prefix_caching: bool = True
    unified_pool: bool = False
    fingerprint: bytes = b""
    external: ExternalOptions | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.unit_size < 1 or self.page_size < 1 or self.page_size % self.unit_size:
            raise ConfigError(
                f"engine.page_size is {self.page_size}; it must be a multiple of "
                f"engine.unit_size {self.unit_size}"
            )
        for name in ("num_pages", "num_checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"engine.{name} is {value}; it must not be negative")
        if self.external is not None and not self.prefix_caching:
            raise ConfigError("an external cache needs engine.prefix_caching")


DEFAULT_MEMORY = MemoryOptions()


def build_memory(
    config: ModelConfig,
    limits: SchedulerLimits,
    options: MemoryOptions,
    *,
    stop_ids: Collection[int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[CacheManager, PagedState]:
    """Make the pools, their manager and the arenas behind them.

    Args:
        config: Architecture.
        limits: How many sequences of what length.
        options: Sizes.
        stop_ids: Ids that end a message.
        dtype: Of MLA rows and convolution tails.
        device: Where the arenas live.
    """
    num_pages = options.num_pages or _default_pages(config, limits, options, dtype)
    num_states = limits.max_num_seqs
    if options.prefix_caching:
        num_states += _num_checkpoints(config, options, dtype)
    if options.unified_pool:
        blocks = BlockPool(num_pages + num_states, "blocks")
        pages = states = blocks
    else:
        pages, states = BlockPool(num_pages, "pages"), BlockPool(num_states, "state slots")
    cache = PrefixCache(pages, states, page_size=options.page_size, unit_size=options.unit_size)
    manager = CacheManager(
        cache,
        stop_ids=stop_ids,
        fingerprint=options.fingerprint,
        is_sharing=options.prefix_caching,
    )
    state = PagedState(
        config,
        num_slots=states.num_blocks,
        num_pages=pages.num_blocks,
        page_size=options.page_size,
        max_model_len=limits.max_model_len,
        dtype=dtype,
        device=device,
    )
    return manager, state


def build_writeback(
    config: ModelConfig,
    options: MemoryOptions,
    manager: CacheManager,
    state: PagedState,
    dtype: torch.dtype,
) -> Writeback | None:
    """Open the external pool of the options and connect it to manager and index.

    Raises:
        ConfigError: The directory cannot be used, or a budget is wrong.
    """
    if options.external is None:
        return None
    geometry = state_geometry(config, dtype)
    pool = ExternalPool(
        CacheIdentity(
            fingerprint=options.fingerprint.hex(), hash_unit=options.unit_size, geometry=geometry
        ),
        host_bytes=options.external.host_bytes,
        directory=options.external.directory,
        disk_bytes=options.external.disk_bytes,
    )
    writeback = Writeback(
        pool, manager.cache, state, max_load_bytes=options.external.max_load_bytes
    )
    manager.external = writeback
    manager.cache.before_eviction = writeback.evicted
    return writeback


def state_geometry(config: ModelConfig, dtype: torch.dtype) -> StateGeometry:
    """Sizes of what the layers keep of one sequence."""
    return StateGeometry.of(config, str(dtype).removeprefix("torch."))


def _default_pages(
    config: ModelConfig, limits: SchedulerLimits, options: MemoryOptions, dtype: torch.dtype
) -> int:
    per_sequence = -(-limits.max_model_len // options.page_size)
    wanted = limits.max_num_seqs * per_sequence * (2 if options.prefix_caching else 1)
    bytes_per_page = page_bytes(config, options.page_size, dtype)
    if bytes_per_page:
        wanted = min(wanted, max(per_sequence, _CACHE_BYTES // bytes_per_page))
    return wanted


def _num_checkpoints(config: ModelConfig, options: MemoryOptions, dtype: torch.dtype) -> int:
    if options.num_checkpoints is not None:
        return options.num_checkpoints
    bytes_per_slot = max(1, slot_bytes(config, dtype))
    return min(_MAX_CHECKPOINTS, max(2, _STATE_BYTES // bytes_per_slot))
