"""Counters of one engine, read from any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonlet.engine.cache.external.load_queue import LoadCounts
from moonlet.engine.request import FinishReason
from moonlet.engine.scheduler import Scheduler

__all__ = ["EngineStats", "read_stats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counts only grow, gauges describe now.

    Attributes:
        num_steps: Steps taken, failed ones included.
        num_forward_calls: Forward passes of the model.
        num_running: Gauge: requests that hold states.
        num_waiting: Gauge: requests queued.
        num_slots: Places of recurrent states.
        num_free_slots: Gauge: places that no request holds; checkpoints may fill them.
        num_pages: Pages of MLA rows.
        num_free_pages: Gauge: pages that no request holds; findable rows may fill them.
        num_idle_slots: Gauge: of the free places, those with a checkpoint.
        num_idle_pages: Gauge: of the free pages, those with findable rows.
        num_checkpoints: Gauge: positions that a request can resume from.
        num_prefix_queries: Admissions that looked for a prefix.
        num_prefix_query_tokens: Tokens of those requests.
        num_prefix_hits: Admissions that resumed somewhere.
        num_prefix_hit_tokens: Tokens they did not compute.
        num_evicted_pages: Pages given up with findable rows in them.
        num_evicted_checkpoints: Checkpoints given up for room.
        num_preemptions: How often a running request gave its memory back.
        num_prompt_tokens: Prompt tokens computed.
        num_generated_tokens: Tokens sampled.
        num_finished: Requests that ended by a stop id or a limit.
        num_aborted: Requests that were aborted.
        num_failed: Requests that ended in an error.
        num_drafts: Verified windows of drafts; 0 without speculation.
        num_draft_tokens: Drafts in them.
        num_accepted_tokens: Drafts that became tokens.
        num_accepted_tokens_per_pos: Of those, the first, second, ... draft of their window.
        num_loading: Gauge: requests that wait for their prefix from outside the arenas.
        num_loads: Prefixes asked for outside the arenas; 0 without an external cache.
        num_failed_loads: Of those, torn or vanished ones; the prefix was computed instead.
        num_cancelled_loads: Of those, given up before they had arrived.
        num_loaded_bytes: Bytes that have arrived.
        load_wait_s: Seconds that requests waited for them, summed over requests.
    """

    num_steps: int
    num_forward_calls: int
    num_running: int
    num_waiting: int
    num_slots: int
    num_free_slots: int
    num_pages: int
    num_free_pages: int
    num_idle_slots: int
    num_idle_pages: int
    num_checkpoints: int
    num_prefix_queries: int
    num_prefix_query_tokens: int
    num_prefix_hits: int
    num_prefix_hit_tokens: int
    num_evicted_pages: int
    num_evicted_checkpoints: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_finished: int
    num_aborted: int
    num_failed: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_loading: int = 0
    num_loads: int = 0
    num_failed_loads: int = 0
    num_cancelled_loads: int = 0
    num_loaded_bytes: int = 0
    load_wait_s: float = 0.0


def read_stats(
    scheduler: Scheduler,
    counts: Mapping[str, int],
    ends: Mapping[FinishReason, int],
    *,
    num_submitted: int,
    num_forward_calls: int,
    drafts: Mapping[str, Any],
    loads: LoadCounts | None = None,
) -> EngineStats:
    """Take a snapshot.

    Args:
        scheduler: Of the engine.
        counts: ``steps``, ``prompt`` and ``generated`` tokens.
        ends: Finished requests by reason.
        num_submitted: Requests that the scheduler has not seen yet.
        num_forward_calls: Of the runner.
        drafts: Counters of the speculation, none without it.
        loads: Counters of what came from outside the arenas.
    """
    loads = loads or LoadCounts()
    cache = scheduler.manager.cache
    pages, states, prefix = cache.pages, cache.states, cache.counts
    return EngineStats(
        num_steps=counts["steps"],
        num_forward_calls=num_forward_calls,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting + num_submitted,
        num_slots=states.num_blocks,
        num_free_slots=states.num_free + states.num_idle,
        num_pages=pages.num_blocks,
        num_free_pages=pages.num_free + pages.num_idle,
        num_idle_slots=states.num_idle,
        num_idle_pages=pages.num_idle,
        num_checkpoints=cache.num_checkpoints,
        num_prefix_queries=prefix.queries,
        num_prefix_query_tokens=prefix.query_tokens,
        num_prefix_hits=prefix.hits,
        num_prefix_hit_tokens=prefix.hit_tokens,
        num_evicted_pages=prefix.evicted_pages,
        num_evicted_checkpoints=prefix.evicted_checkpoints,
        num_preemptions=scheduler.num_preemptions,
        num_prompt_tokens=counts["prompt"],
        num_generated_tokens=counts["generated"],
        num_finished=ends["stop"] + ends["length"],
        num_aborted=ends["abort"],
        num_failed=ends["error"],
        num_loading=scheduler.num_loading,
        num_loads=loads.started,
        num_failed_loads=loads.failed,
        num_cancelled_loads=loads.cancelled,
        num_loaded_bytes=loads.loaded_bytes,
        load_wait_s=loads.wait_s,
        **drafts,
    )
