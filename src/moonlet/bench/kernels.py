"""Speed of every operator and backend on the shapes of a model, against the bound.

Arguments are copied until the copies together exceed the caches, and calls take them in turn, so
weights and states come from memory as they do in a model. Where that would take more than
`MAX_COPIES` copies the case is marked as not cold: what is that small stays in a cache in a model
too, and its fraction of the memory bound may exceed 1. Backends and the probes of the bounds take
turns; a case is related to the probes of its own turns, and medians count.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moonlet.bench.bounds import Bounds
from moonlet.bench.cases.case import Arguments, Case, Shape
from moonlet.bench.cases.table import ALONG_CONTEXT, CASES, OVER_CONTEXT
from moonlet.bench.memory import cold_bytes, memory_bytes
from moonlet.core.config import ModelConfig
from moonlet.core.errors import CapacityError, ConfigError, ShapeError
from moonlet.kernels.registry import OPERATORS, Backend
from moonlet.kernels.spec import Spec

__all__ = ["Refusal", "bench_kernels", "chosen_ops", "serving_backends"]

MAX_COPIES = 256
# calls are repeated until a sample takes about this long
SAMPLE_S = 0.01
MAX_CALLS = 1000
# rows that sequences have before where nothing else is said
CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Refusal:
    """A backend that does not serve, and why."""

    op: str
    backend: str
    reason: str


def chosen_ops(ops: Sequence[str]) -> list[str]:
    """Return the operators to run, all that have a case where none is named.

    Raises:
        ConfigError: A name is no operator, or no case exists for it.
    """
    for op in ops:
        if op not in OPERATORS:
            raise ConfigError(f"--op is {op!r}; the operators are {', '.join(OPERATORS)}")
        if op not in CASES:
            raise ConfigError(f"operator {op} has no case; add one to bench/cases/table.py")
    return [op for op in OPERATORS if op in CASES and (not ops or op in ops)]


def serving_backends(
    op: str, config: ModelConfig, wanted: Sequence[str]
) -> tuple[list[Backend], list[Refusal]]:
    """Return the wanted backends (all where none is named) that serve, and the others' reasons.

    Raises:
        ConfigError: No operator has a backend of a wanted name.
    """
    known = dict.fromkeys(b.name for backends in OPERATORS.values() for b in backends)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--backend is {name!r}; the backends are {', '.join(known)}")
    spec = Spec(device=torch.device("cpu"), config=config, is_inference=True)
    serving: list[Backend] = []
    refusals: list[Refusal] = []
    for backend in OPERATORS[op]:
        if wanted and backend.name not in wanted:
            continue
        reason = backend.supports(spec)
        if reason is None:
            serving.append(backend)
        else:
            refusals.append(Refusal(op, backend.name, reason))
    return serving, refusals


@torch.inference_mode()
def bench_kernels(
    name: str,
    config: ModelConfig,
    *,
    ops: Sequence[str] = (),
    backends: Sequence[str] = (),
    rows: Sequence[int] = (1, 4, 8, 16, 512),
    contexts: Sequence[int] = (),
    repeats: int = 5,
    working_set_bytes: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure operators.

    Args:
        name: What the shapes are called in the report.
        config: Architecture whose shapes are used.
        ops: Operators; all when empty.
        backends: Backends; all when empty.
        rows: Rows of the batch.
        contexts: Rows that sequences have before, for the operators of `table.OVER_CONTEXT`
            (`CONTEXT` when empty); lengths of the sequence, in place of ``rows``, for those of
            `table.ALONG_CONTEXT`. Other operators do not change with it.
        repeats: Timed samples per case and backend.
        working_set_bytes: What copies of the arguments must exceed together; twice the largest
            cache when absent.
        on_progress: Told what is measured next.

    Returns:
        JSON values: bounds, one entry per case and backend, and who refused.

    Raises:
        ConfigError: An unknown name or a count that is not positive.
        CapacityError: The tensors of a case exceed the memory of the machine.
    """
    counts = {"rows": rows, "context": contexts or (CONTEXT,), "repeats": (repeats,)}
    for what, given in counts.items():
        least = min(given, default=0)
        if least < 1:
            raise ConfigError(f"bench.{what} is {least}; it must be at least 1")
    target = cold_bytes() if working_set_bytes is None else working_set_bytes
    bounds = Bounds()
    results: list[dict[str, Any]] = []
    refusals: list[Refusal] = []
    for op in chosen_ops(ops):
        serving, refused = serving_backends(op, config, backends)
        refusals += refused
        for shape in _shapes(op, config, rows, contexts):
            for case in CASES[op](shape):
                on_progress(f"{op} {case.label} {shape.rows} rows")
                _require_memory(op, case, shape)
                measured = _Measurement(op, case, serving, target)
                refusals += measured.refusals
                context = shape.context if op in OVER_CONTEXT else None
                named = {"op": op, "case": case.label, "rows": shape.rows, "context": context}
                results += [named | entry for entry in measured.run(repeats, bounds)]
    return {
        "shape": name,
        "repeats": repeats,
        "working_set_bytes": target,
        **bounds.to_json(),
        "results": results,
        "refused": [
            {"op": r.op, "backend": r.backend, "reason": r.reason} for r in dict.fromkeys(refusals)
        ],
    }


def _shapes(
    op: str, config: ModelConfig, rows: Sequence[int], contexts: Sequence[int]
) -> Iterator[Shape]:
    generator = torch.Generator().manual_seed(0)
    if op in ALONG_CONTEXT:
        sizes = [(length, CONTEXT) for length in contexts or rows]
    elif op in OVER_CONTEXT:
        sizes = list(itertools.product(rows, contexts or (CONTEXT,)))
    else:
        sizes = [(count, CONTEXT) for count in rows]
    for count, context in sizes:
        yield Shape(config=config, rows=count, context=context, generator=generator)


def _require_memory(op: str, case: Case, shape: Shape) -> None:
    """Refuse a case before it is drawn; what a backend needs beside its tensors is its own."""
    needed, memory = case.cost.num_bytes, memory_bytes()
    if needed > memory:
        raise CapacityError(
            f"{op} of {shape.rows} rows after {shape.context} has {needed / 1e9:.1f} GB of "
            f"tensors; the machine has {memory / 1e9:.1f} GB: give less in --rows or --context"
        )


class _Measurement:
    """One case: its arguments, and the backends that took them."""

    def __init__(self, op: str, case: Case, backends: Sequence[Backend], target: int) -> None:
        self.case = case
        first = case.make()
        wanted = -(-target // max(1, int(case.cost.num_bytes)))
        self.num_copies = max(1, min(MAX_COPIES, wanted))
        self.is_cold = wanted <= MAX_COPIES
        copies = [first, *(case.another(first) for _ in range(self.num_copies - 1))]
        self._turn = itertools.cycle(copies)
        self.refusals: list[Refusal] = []
        self._calls: dict[str, tuple[Callable[..., Any], int]] = {}
        for backend in backends:
            call = backend.load()
            try:
                once = _time(call, self._turn, 1)
            except ShapeError as error:
                self.refusals.append(Refusal(op, backend.name, str(error)))
                continue
            once = min(once, _time(call, self._turn, 1))
            count = max(1, min(MAX_CALLS, round(SAMPLE_S / once)))
            self._calls[backend.name] = (call, count)

    def run(self, repeats: int, bounds: Bounds) -> list[dict[str, Any]]:
        """Return one entry per backend with its median seconds per call."""
        seconds: dict[str, list[float]] = {name: [] for name in self._calls}
        since = bounds.mark
        for _ in range(repeats):
            bounds.sample()
            for name, (call, count) in self._calls.items():
                seconds[name].append(_time(call, self._turn, count))
        entries: list[dict[str, Any]] = []
        for name, all_s in seconds.items():
            median = statistics.median(all_s)
            entry = {"backend": name, "is_cold": self.is_cold, "copies": self.num_copies}
            related = bounds.relate(self.case.cost, median, since)
            entries.append({**entry, "seconds": median, **related})
        return entries


def _time(call: Callable[..., Any], turn: Iterator[Arguments], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call(*next(turn))
    return (time.perf_counter() - began) / count
