"""When the forward passes of an engine begin, how many rows each has, and what AttnRes takes of it.

The engine tells the clock of every step before its forward pass; a mark costs a microsecond. The
time from one mark to the next is one engine step: forward, logits, sampling and scheduling. Timing
single operators costs more and needs steps that run call by call, so `attn_res_clock` is for runs
of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from moonlet.kernels.registry import Kernels
from moonlet.model.transformer import Transformer

__all__ = ["Step", "StepClock", "attn_res_clock"]

ATTN_RES = "attn_res"


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: rows of its forward pass, duration, time inside AttnRes operators."""

    rows: int
    seconds: float
    attn_res_s: float


class StepClock:
    """Marks the beginning of every step of the engines whose ``before_step`` is `note`.

    It can also hold passes back, so that requests which belong together start together.

    Attributes:
        attn_res_s: Time inside AttnRes operators so far; counted by `attn_res_clock` only.
    """

    def __init__(self) -> None:
        self.attn_res_s = 0.0
        self._marks: list[tuple[float, int, float]] = []
        self._is_open = threading.Event()
        self._is_open.set()

    def note(self, rows: int) -> None:
        """Mark the beginning of a step, as soon as steps may begin."""
        self._is_open.wait()
        self._marks.append((time.perf_counter(), rows, self.attn_res_s))

    @contextmanager
    def held(self) -> Generator[None]:
        """Let no step begin while the block runs."""
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

    def take(self) -> list[Step]:
        """Return the steps since the last call; the newest ends now."""
        marks = [*self._marks, (time.perf_counter(), 0, self.attn_res_s)]
        self._marks = []
        return [
            Step(rows, then - began, attn_res_then - attn_res)
            for (began, rows, attn_res), (then, _, attn_res_then) in pairwise(marks)
        ]


@contextmanager
def attn_res_clock(model: Transformer, clock: StepClock) -> Generator[None]:
    """Add the time inside the model's AttnRes operators to ``clock`` while the block runs."""

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            clock.attn_res_s += time.perf_counter() - began
            return result

        return run

    plain = model.kernels
    names = [f.name for f in fields(Kernels) if f.name.startswith(ATTN_RES)]
    changes: dict[str, Any] = {name: timed(getattr(plain, name)) for name in names}
    model.kernels = replace(plain, **changes)
    try:
        yield
    finally:
        model.kernels = plain
