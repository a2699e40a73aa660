"""Counters of one engine, read from any thread."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counts only grow, gauges describe now.

    Attributes:
        num_steps: Steps taken, failed ones included.
        num_forward_calls: Forward passes of the model.
        num_running: Gauge: requests that hold a slot.
        num_waiting: Gauge: requests queued for one.
        num_slots: Size of the slot pool.
        num_free_slots: Gauge.
        num_pages: Size of the page pool.
        num_free_pages: Gauge.
        num_prompt_tokens: Prompt tokens computed.
        num_generated_tokens: Tokens sampled.
        num_finished: Requests that ended by a stop id or a limit.
        num_aborted: Requests that were aborted.
        num_failed: Requests that ended in an error.
    """

    num_steps: int
    num_forward_calls: int
    num_running: int
    num_waiting: int
    num_slots: int
    num_free_slots: int
    num_pages: int
    num_free_pages: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_finished: int
    num_aborted: int
    num_failed: int
