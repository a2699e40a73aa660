"""Blocks: who refers to which piece of the cache's memory.

A block is a page of MLA rows or the place of one recurrent state; this file is the bookkeeping, the
bytes are in `cache.arenas`. Every block is in exactly one of three conditions:

* free: nobody refers to it and nothing in it is worth keeping;
* held: at least one sequence or copy refers to it;
* idle: nobody refers to it, but the prefix index can still hand out what it holds. Idle blocks are
  kept in the order in which they became idle and are given up by the index only (`cache.prefix`).

Block 0 is never handed out: it stands in block tables for "nothing here", and padding may write to
it. The epoch of a block grows with each hand-out, so that a stale reference can be told from a live
one (hybrid-cache.md sections 5 and 8).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from moonlet.core.errors import CapacityError, ConfigError

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0


class BlockPool:
    """Hands out block ids 1..num_blocks; the one freed longest ago goes first.

    Args:
        num_blocks: How many there are.
        name: What they are, for messages: ``"pages"`` or ``"state slots"``.

    Raises:
        ConfigError: No block at all.
    """

    def __init__(self, num_blocks: int, name: str) -> None:
        if num_blocks < 1:
            raise ConfigError(f"the number of {name} is {num_blocks}; it must be positive")
        self.num_blocks = num_blocks
        self.name = name
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        # insertion order is the order of becoming idle
        self._idle: dict[int, None] = {}
        self._refs = [0] * (num_blocks + 1)
        self._epochs = [0] * (num_blocks + 1)
        self._is_cached = [False] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks that only the prefix index knows."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def epoch(self, block: int) -> int:
        """How often the block was handed out; differs after reuse."""
        return self._epochs[block]

    def is_idle(self, block: int) -> bool:
        """Whether only the prefix index knows the block."""
        return block in self._idle

    def refs(self, block: int) -> int:
        """How many refer to the block."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, all or none.

        Raises:
            CapacityError: Fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise CapacityError(
                f"{count} {self.name} wanted, {len(self._free)} of {self.num_blocks} free; wait"
            )
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self._epochs[block] += 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; they must be held or idle."""
        for block in blocks:
            assert self._refs[block] or block in self._idle, f"{self.name} {block} is free"
            self._idle.pop(block, None)
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; late blocks of a sequence are given up first."""
        for block in reversed(list(blocks)):
            assert 1 <= block <= self.num_blocks, f"{self.name} {block} does not exist"
            assert self._refs[block] > 0, f"{self.name} {block} is not held"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._is_cached[block]:
                self._idle[block] = None
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """Say that the index hands out what the held block holds."""
        assert self._refs[block] > 0, f"{self.name} {block} is not held"
        self._is_cached[block] = True

    def forget(self, block: int) -> None:
        """Say that the index no longer hands it out; an idle block becomes free."""
        self._is_cached[block] = False
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def held(self) -> set[int]:
        """Ids of the blocks that somebody refers to."""
        return {block for block, refs in enumerate(self._refs) if refs}

    def cached(self) -> set[int]:
        """Ids of the blocks that the index hands out, held or idle."""
        return {block for block, is_cached in enumerate(self._is_cached) if is_cached}

    def check(self) -> None:
        """Assert that every block is free, held or idle, once."""
        free, idle, held = set(self._free), set(self._idle), self.held()
        assert len(free) == len(self._free), f"{self.name}: one is free twice"
        assert not free & held, f"{self.name}: one is free and held"
        assert not idle & (free | held), f"{self.name}: an idle one is free or held"
        assert free | idle | held == set(range(1, self.num_blocks + 1)), f"{self.name}: one is lost"
        assert idle <= self.cached(), f"{self.name}: an idle one is unknown to the index"
        assert not free & self.cached(), f"{self.name}: a free one is known to the index"
        assert NULL_BLOCK not in held | self.cached(), f"{self.name}: the null block is in use"
