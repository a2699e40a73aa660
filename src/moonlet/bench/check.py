"""Every backend against the reference on random architectures, rows and values.

Both get their own copy of the arguments. What they return and what they leave in the arguments is
compared, so a wrong effect in place is found like a wrong result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moonlet.bench.cases.case import Arguments, Case, Shape, another, tensors_in
from moonlet.bench.cases.table import CASES
from moonlet.bench.kernels import chosen_ops, serving_backends
from moonlet.bench.scales import random_config
from moonlet.core.errors import ConfigError, ShapeError
from moonlet.kernels import _native
from moonlet.kernels.registry import OPERATORS

__all__ = ["check_kernels", "error_ratio"]

REFERENCE = "reference"
ROWS = (1, 2, 3, 5, 16, 17, 33, 64, 100)
MAX_CONTEXT = 130


@dataclass(slots=True)
class _Record:
    """What became of one backend of one operator.

    Attributes:
        broken_promises: Why it refused cases after it had said that it could serve.
    """

    op: str
    backend: str
    num_cases: int = 0
    worst_ratio: float = 0.0
    tolerance: float = 0.0
    failures: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    broken_promises: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        failures = list(self.failures)
        if not self.num_cases and self.broken_promises:
            failures.append(f"served nothing that it said it could: {self.broken_promises[0]}")
        refusals = [*self.refusals, *self.broken_promises]
        return {
            "op": self.op,
            "backend": self.backend,
            "cases": self.num_cases,
            # JSON has no infinity
            "worst_ratio": self.worst_ratio if math.isfinite(self.worst_ratio) else None,
            "tolerance": self.tolerance,
            "ok": not failures,
            "failure": failures[0] if failures else None,
            "refused": len(refusals),
            "refused_because": refusals[0] if refusals else None,
        }


def error_ratio(actual: Tensor, expected: Tensor) -> float:
    """Return how far two tensors are apart.

    Floating point: the root mean square of the difference over that of ``expected``, where equal
    infinities differ by nothing and a NaN makes it infinite. Anything else: 0 or infinity.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    same = actual == expected
    difference = (actual.double() - expected.double()).masked_fill(same, 0.0)
    finite = expected.double().masked_fill(expected.isinf(), 0.0)
    if not difference.any():
        return 0.0
    ratio = float(difference.square().mean().sqrt() / finite.square().mean().sqrt())
    return ratio if ratio == ratio else float("inf")


@torch.inference_mode()
def check_kernels(
    *,
    ops: Sequence[str] = (),
    backends: Sequence[str] = (),
    num_shapes: int = 5,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Compare backends with the reference.

    Args:
        ops: Operators; all when empty.
        backends: Backends; all when empty.
        num_shapes: Random shapes per operator.
        seed: Where the random numbers start.
        on_progress: Told what is checked next.

    Returns:
        JSON values: per operator and backend the cases compared, the worst error ratio, how many
        shapes were refused and why, and whether all is well.

    Raises:
        ConfigError: An unknown name or a count that is not positive.
    """
    if num_shapes < 1:
        raise ConfigError(f"bench.repeats is {num_shapes}; it must be at least 1")
    records: dict[tuple[str, str], _Record] = {}

    def record(op: str, backend: str) -> _Record:
        return records.setdefault((op, backend), _Record(op, backend))

    for op in chosen_ops(ops):
        on_progress(op)
        reference = next(b for b in OPERATORS[op] if b.name == REFERENCE).load()
        for shape in _random_shapes(f"{seed}:{op}", num_shapes):
            serving, refused = serving_backends(op, shape.config, backends)
            for refusal in refused:
                record(op, refusal.backend).refusals.append(refusal.reason)
            serving = [b for b in serving if b.name != REFERENCE]
            for case in CASES[op](shape) if serving else ():
                arguments = case.make()
                expected = _outcome(reference, arguments)
                for backend in serving:
                    mine = record(op, backend.name)
                    _compare(mine, case, backend.load(), arguments, expected, shape)
    results = [record.to_json() for record in records.values()]
    return {
        "seed": seed,
        "shapes": num_shapes,
        "isa_level": _native.isa_level(),
        "threads": torch.get_num_threads(),
        "ok": all(result["ok"] for result in results),
        "results": results,
    }


def _random_shapes(seed: str, count: int) -> Iterator[Shape]:
    rng = random.Random(seed)
    for _ in range(count):
        yield Shape(
            config=random_config(rng),
            rows=rng.choice(ROWS),
            context=rng.randint(0, MAX_CONTEXT),
            generator=torch.Generator().manual_seed(rng.getrandbits(32)),
        )


def _outcome(call: Callable[..., Any], arguments: Arguments) -> list[Tensor]:
    """Everything that a call on its own copy of the arguments returns or changes."""
    mine = another(arguments)
    result = call(*mine)
    return [*tensors_in(result), *tensors_in(mine)]


def _compare(
    record: _Record,
    case: Case,
    call: Callable[..., Any],
    arguments: Arguments,
    expected: Sequence[Tensor],
    shape: Shape,
) -> None:
    where = f"{case.label} {shape.rows} rows, context {shape.context}: "
    try:
        actual = _outcome(call, arguments)
    except ShapeError as error:
        record.broken_promises.append(str(error))
        return
    except Exception as error:
        record.failures.append(f"{where}{type(error).__name__}: {error}")
        return
    record.num_cases += 1
    record.tolerance = max(record.tolerance, case.tolerance)
    if len(actual) != len(expected):
        record.failures.append(f"{where}{len(actual)} tensors instead of {len(expected)}")
        return
    ratio = max(error_ratio(a, e) for a, e in zip(actual, expected, strict=True))
    record.worst_ratio = max(record.worst_ratio, ratio)
    if ratio > case.tolerance:
        record.failures.append(f"{where}error ratio {ratio:.2e}, at most {case.tolerance:.0e}")
