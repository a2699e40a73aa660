"""The verification report: every tensor consumed exactly once, everything else named.

`verify` compares what a checkpoint holds with what its configuration demands. It reads no tensor
data; rules on values (the padding of ``A_log``, scale codes) are applied when tensors are loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moonlet.core.errors import CheckpointError, MissingTensor, TensorShapeMismatch
from moonlet.weights.extents import TensorExtent
from moonlet.weights.names import PACKED, PLAIN, SCALE, Slot, is_vision, to_name, to_slot
from moonlet.weights.shapes import TensorSpec

__all__ = ["Mismatch", "VerificationReport", "verify"]

# names of one kind that an error message spells out
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor with another shape or dtype than demanded."""

    name: str
    seen: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport:
    """Outcome of the comparison.

    Attributes:
        weights: ``present``, ``partial`` (some shards are missing) or ``absent`` (only an index).
        num_tensors: Tensor names found.
        num_loaded: Names that fill a parameter of the model (or will, once their shard is there).
        verified_not_loaded: Vision and projector names that passed but have no module here.
        missing: Names that are demanded and absent.
        unexpected: Names that no parameter takes, or a second name for a filled slot.
        misplaced: Names for which the index and the shards disagree about the place.
        missing_shards: Files that the index names and the directory lacks.
        notes: Observations that do not stop a load.
    """

    weights: str = "present"
    num_tensors: int = 0
    num_loaded: int = 0
    verified_not_loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mis_shaped: tuple[Mismatch, ...] = ()
    mis_typed: tuple[Mismatch, ...] = ()
    misplaced: tuple[str, ...] = ()
    missing_shards: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether nothing contradicts the configuration."""
        return not self.problems()

    @property
    def is_loadable(self) -> bool:
        """Whether nothing contradicts the configuration and all bytes are there."""
        return self.is_ok and self.weights == "present"

    def problems(self) -> list[str]:
        """One line per kind of problem, each naming its tensors."""
        lines = [
            _listed("missing shards", self.missing_shards),
            _listed("missing", self.missing),
            _listed("unexpected", self.unexpected),
            _listed("not where the index says", self.misplaced),
            _listed("mis-shaped", map(_mismatch_text, self.mis_shaped)),
            _listed("mis-typed", map(_mismatch_text, self.mis_typed)),
        ]
        return [line for line in lines if line]

    def raise_unless_loadable(self, where: str) -> None:
        """Raise one error that names every problem.

        Args:
            where: The checkpoint, for the message.

        Raises:
            MissingTensor: Names are missing or unexpected (other problems are listed as well).
            TensorShapeMismatch: Only shapes or dtypes differ.
            CheckpointError: Shards are missing, or tensors lie in other shards than indexed.
        """
        if self.is_loadable:
            return
        lines = self.problems() or ["no weight file is there; fetch the shards of its index"]
        kind: type[CheckpointError] = CheckpointError
        if self.missing or self.unexpected:
            kind = MissingTensor
        elif self.mis_shaped or self.mis_typed:
            kind = TensorShapeMismatch
        raise kind(f"{where} does not hold the model its config.json describes: {'; '.join(lines)}")

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {**asdict(self), "ok": self.is_ok}


def _mismatch_text(mismatch: Mismatch) -> str:
    return f"{mismatch.name} ({mismatch.seen}, expected {mismatch.expected})"


def _listed(kind: str, names: Iterable[str]) -> str:
    listed = list(names)
    if not listed:
        return ""
    shown = ", ".join(listed[:_MAX_LISTED])
    rest = len(listed) - _MAX_LISTED
    return f"{len(listed)} {kind}: {shown}" + (f", and {rest} more" if rest > 0 else "")


@dataclass(slots=True)
class _Tally:
    """What has been found so far while names are matched."""

    num_loaded: int = 0
    verified_not_loaded: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mis_shaped: list[Mismatch] = field(default_factory=list)
    mis_typed: list[Mismatch] = field(default_factory=list)
    # parameter -> (expert, part) pairs that a name fills
    filled: dict[str, set[tuple[int | None, str]]] = field(default_factory=lambda: defaultdict(set))


def verify(
    expected: Mapping[str, TensorSpec],
    extents: Mapping[str, TensorExtent],
    *,
    prefix: str,
    unread: Iterable[str] = (),
    **found: Any,
) -> VerificationReport:
    """Compare the tensors of a checkpoint with what its configuration demands.

    Args:
        expected: Demanded tensors by parameter (`expected_tensors`).
        extents: Tensors found, by name.
        prefix: Prefix of text names in messages about missing tensors.
        unread: Names that an index promises in shards that are not there; shapes and dtypes
            stay unknown.
        **found: Fields of the report that the caller knows (``weights``, ``missing_shards`` ...).
    """
    tally = _Tally()
    for name, extent in extents.items():
        matched = _match(expected, name, tally)
        if matched is None:
            continue
        slot, spec = matched
        if not spec.accepts_shape(slot.part, extent.shape):
            wanted = str(list(spec.part_shape(slot.part)))
            tally.mis_shaped.append(Mismatch(name, str(list(extent.shape)), wanted))
        if not spec.accepts_dtype(slot.part, extent.dtype):
            tally.mis_typed.append(Mismatch(name, extent.dtype, spec.part_dtype(slot.part)))
    num_tensors = len(extents)
    for name in unread:
        num_tensors += 1
        _match(expected, name, tally)
    return VerificationReport(
        num_tensors=num_tensors,
        num_loaded=tally.num_loaded,
        verified_not_loaded=tuple(tally.verified_not_loaded),
        missing=tuple(_missing(expected, tally, prefix)),
        unexpected=tuple(tally.unexpected),
        mis_shaped=tuple(tally.mis_shaped),
        mis_typed=tuple(tally.mis_typed),
        **found,
    )


def _match(
    expected: Mapping[str, TensorSpec], name: str, tally: _Tally
) -> tuple[Slot, TensorSpec] | None:
    """Find the spec that a name fills, and mark the slot as filled."""
    slot = to_slot(name)
    spec = expected.get(slot.parameter) if slot is not None else None
    if slot is None or spec is None or not _has_place(spec, slot):
        tally.unexpected.append(name)
        return None
    filled = tally.filled[slot.parameter]
    other_form = {(slot.expert, SCALE), (slot.expert, PACKED)}
    if slot.part != PLAIN:
        other_form = {(slot.expert, PLAIN)}
    if (slot.expert, slot.part) in filled or filled & other_form:
        tally.unexpected.append(name)
        return None
    filled.add((slot.expert, slot.part))
    if is_vision(slot):
        tally.verified_not_loaded.append(name)
    else:
        tally.num_loaded += 1
    return slot, spec


def _has_place(spec: TensorSpec, slot: Slot) -> bool:
    if spec.num_experts is None:
        has_expert = slot.expert is None
    else:
        has_expert = slot.expert is not None and slot.expert < spec.num_experts
    return has_expert and spec.takes(slot.part)


def _missing(expected: Mapping[str, TensorSpec], tally: _Tally, prefix: str) -> Iterable[str]:
    for parameter, spec in expected.items():
        filled = tally.filled.get(parameter, set())
        experts: Iterable[int | None] = (
            (None,) if spec.num_experts is None else range(spec.num_experts)
        )
        for expert in experts:
            if (expert, PLAIN) in filled:
                continue
            # one half of a pair misses the other
            is_pair = not filled.isdisjoint({(expert, PACKED), (expert, SCALE)})
            for part in (PACKED, SCALE) if is_pair else spec.parts:
                if (expert, part) not in filled:
                    yield to_name(Slot(parameter, expert, part), prefix)
