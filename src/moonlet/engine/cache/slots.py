"""Slots: which sequence owns which recurrent state.

A slot holds what the KDA layers keep of one sequence (recurrent state and convolution tail, a
fixed size, valid at exactly one position). This file is the bookkeeping; the bytes are in
`cache.arenas`. Slot 0 is never handed out: padding and tests may write to it, nobody reads it.
"""

from __future__ import annotations

from collections import deque

from moonlet.core.errors import CapacityError, ConfigError

__all__ = ["NULL_SLOT", "SlotPool"]

NULL_SLOT = 0


class SlotPool:
    """Hands out slot ids 1..num_slots; the one freed longest ago goes first."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ConfigError(f"num_slots is {num_slots}; at least 1 sequence must fit")
        self.num_slots = num_slots
        self._free: deque[int] = deque(range(1, num_slots + 1))
        self._is_used = [False] * (num_slots + 1)

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a slot.

        Raises:
            CapacityError: Every slot is owned.
        """
        if not self._free:
            raise CapacityError(f"all {self.num_slots} state slots are in use; wait for one")
        slot = self._free.popleft()
        self._is_used[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; it must be owned."""
        assert 1 <= slot <= self.num_slots, f"slot {slot} does not exist"
        assert self._is_used[slot], f"slot {slot} is free already"
        self._is_used[slot] = False
        self._free.append(slot)

    def used(self) -> set[int]:
        """Ids of the owned slots."""
        return {slot for slot, is_used in enumerate(self._is_used) if is_used}

    def check(self) -> None:
        """Assert that every slot is either free, once, or owned."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & self.used(), "a slot is both free and owned"
        assert free | self.used() == set(range(1, self.num_slots + 1)), "a slot is lost"
