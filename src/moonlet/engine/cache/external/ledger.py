"""Who holds what in one tier of the external pool: bytes, references, order of eviction.

Pure bookkeeping, used by the tier in memory and by the one on disk. Units are shared between the
checkpoints of a chain and counted once; the checkpoint used longest ago goes first and takes with
it the units that no other checkpoint refers to (hybrid-cache.md section 12).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moonlet.core.errors import ConfigError

__all__ = ["Freed", "Ledger"]


@dataclass(frozen=True, slots=True)
class Freed:
    """What nobody refers to any more. Delete manifests and states first, then units."""

    checkpoints: list[bytes] = field(default_factory=list)
    units: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Entry:
    keys: tuple[bytes, ...]
    own_bytes: int
    is_published: bool = False


class Ledger:
    """Checkpoints of one tier by key, least recently used first.

    Not safe for threads: its owner holds a lock.

    Args:
        budget_bytes: Never exceeded, reservations included.
        unit_bytes: Size of every unit.
    """

    def __init__(self, budget_bytes: int, unit_bytes: int) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"a cache budget is {budget_bytes} bytes; it must not be negative")
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self._unit_bytes = unit_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._refs: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether a complete checkpoint has this key."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_published

    def __iter__(self) -> Iterator[bytes]:
        """Keys of the complete checkpoints, the next to be evicted first."""
        return (key for key, entry in self._entries.items() if entry.is_published)

    def __len__(self) -> int:
        return sum(entry.is_published for entry in self._entries.values())

    @property
    def units(self) -> set[bytes]:
        """Units that a checkpoint or a reservation refers to."""
        return set(self._refs)

    def has_unit(self, unit: bytes) -> bool:
        """Whether a checkpoint or a reservation refers to the unit."""
        return unit in self._refs

    def fits(self, num_units: int, own_bytes: int) -> bool:
        """Whether a checkpoint fits into the budget when everything else is gone."""
        return num_units * self._unit_bytes + own_bytes <= self.budget_bytes

    def has_room(self, keys: Sequence[bytes], own_bytes: int) -> bool:
        """Whether a checkpoint fits beside everything that is here."""
        new_units = sum(unit not in self._refs for unit in keys)
        added = new_units * self._unit_bytes + own_bytes
        return self.num_bytes + added <= self.budget_bytes

    def touch(self, key: bytes) -> None:
        """Note a use: the checkpoint is evicted last."""
        if key in self._entries:
            self._entries.move_to_end(key)

    def reserve(self, keys: Sequence[bytes], own_bytes: int) -> Freed:
        """Make room for a checkpoint that is about to be written; it is not readable yet.

        One reservation exists at a time, so evicting the others always makes enough room.

        Args:
            keys: Its units in order.
            own_bytes: State and manifest.

        Returns:
            What was evicted; it must be deleted before anything is written.
        """
        assert keys[-1] not in self._entries, "a checkpoint is reserved twice"
        assert self.fits(len(keys), own_bytes), "a checkpoint beyond the budget is reserved"
        assert len(self) == len(self._entries), "two reservations at once"
        self._entries[keys[-1]] = _Entry(tuple(keys), own_bytes)
        self.num_bytes += own_bytes
        for unit in keys:
            if unit not in self._refs:
                self.num_bytes += self._unit_bytes
            self._refs[unit] = self._refs.get(unit, 0) + 1
        freed = Freed()
        while self.num_bytes > self.budget_bytes:
            self._drop(next(iter(self)), freed)
        return freed

    def publish(self, key: bytes) -> bool:
        """Make a reservation readable; False where it was removed meanwhile."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.is_published = True
        return True

    def remove(self, key: bytes) -> Freed:
        """Forget a checkpoint or a reservation, if it is still there."""
        freed = Freed()
        if key in self._entries:
            self._drop(key, freed)
        return freed

    def remove_unit(self, unit: bytes) -> Freed:
        """Forget every checkpoint and reservation that needs the unit."""
        freed = Freed()
        for key in [key for key, entry in self._entries.items() if unit in entry.keys]:
            self._drop(key, freed)
        return freed

    def _drop(self, key: bytes, freed: Freed) -> None:
        entry = self._entries.pop(key)
        self.num_bytes -= entry.own_bytes
        freed.checkpoints.append(key)
        for unit in entry.keys:
            self._refs[unit] -= 1
            if not self._refs[unit]:
                del self._refs[unit]
                self.num_bytes -= self._unit_bytes
                freed.units.append(unit)

    def check(self) -> None:
        """Assert that references and bytes add up and the budget is kept."""
        refs: dict[bytes, int] = {}
        for key, entry in self._entries.items():
            assert entry.keys[-1] == key, "a checkpoint has the key of another"
            for unit in entry.keys:
                refs[unit] = refs.get(unit, 0) + 1
        assert refs == self._refs, "references of units do not add up"
        own = sum(entry.own_bytes for entry in self._entries.values())
        assert self.num_bytes == own + len(refs) * self._unit_bytes, "bytes do not add up"
        assert self.num_bytes <= self.budget_bytes, "the budget is exceeded"
