"""The prefix index: which prefixes can be resumed, and what is given up for room.

MLA rows are valid at every prefix, recurrent states only where a checkpoint was kept, so a hit
needs both: pages whose rows carry the chain of hashes, and a checkpoint on that chain. The lookup
goes in two stages: pages from left to right, then checkpoints from right to left
(hybrid-cache.md section 6). Several pages may carry the same chain; one of them is enough.

Nothing is registered before its bytes have landed, so what a step writes cannot be found in that
step. Blocks are given up in this order: pages that no checkpoint needs, then the checkpoint of the
lowest score, whole, which frees its states and leaves pages that nobody needs (section 9).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from moonlet.core.errors import CapacityError, ConfigError
from moonlet.engine.cache.blocks import BlockPool
from moonlet.engine.cache.checkpoints import Checkpoint, CheckpointKind, page_ends, score
from moonlet.engine.cache.lookup import Lookup, PrefixCounts

__all__ = ["PrefixCache"]


class PrefixCache:
    """Index over two pools, which are one and the same object in unified mode.

    Args:
        pages: Pages of MLA rows.
        states: Places of recurrent states.
        page_size: Rows per page, a multiple of ``unit_size``.
        unit_size: Tokens per hash.
        num_groups: Blocks that one checkpoint takes.

    Attributes:
        before_eviction: Called with every checkpoint that is about to be given up for room.
    """

    def __init__(
        self,
        pages: BlockPool,
        states: BlockPool,
        *,
        page_size: int,
        unit_size: int,
        num_groups: int = 1,
    ) -> None:
        if unit_size < 1 or page_size % unit_size or num_groups < 1:
            raise ConfigError(
                f"page_size {page_size} must be a multiple of unit_size {unit_size}, and there "
                "must be a KDA group"
            )
        self.pages, self.states = pages, states
        self.page_size, self.unit_size, self.num_groups = page_size, unit_size, num_groups
        self.counts = PrefixCounts()
        self.before_eviction: Callable[[Checkpoint], None] | None = None
        self._per_page = page_size // unit_size
        self._tick = 0
        self._units: dict[bytes, set[int]] = {}
        self._page_keys: dict[int, list[bytes]] = {}
        self._checkpoints: dict[bytes, Checkpoint] = {}
        # chain hash -> checkpoints that cannot be resumed without it
        self._needed_by: dict[bytes, set[bytes]] = {}
        # idle pages without a checkpoint that needs them; late pages of a path come first
        self._orphans: dict[int, None] = {}
        self._queue: list[tuple[int, int, Checkpoint]] = []
        self._num_pushed = 0

    # ---- lookup ----------------------------------------------------------------------------

    @property
    def num_checkpoints(self) -> int:
        """Positions that can be resumed."""
        return len(self._checkpoints)

    def find(self, key: bytes) -> Checkpoint | None:
        """The checkpoint of the prefix with that hash, if any."""
        return self._checkpoints.get(key)

    def lookup(self, keys: Sequence[bytes], cap: int) -> Lookup:
        """Find the longest prefix that can be resumed; nothing changes.

        Args:
            keys: Hashes of the units of the sequence.
            cap: A hit is at most this long: one token at least must be computed.
        """
        limit = min(len(keys), cap // self.unit_size)
        num_pages = 0
        while (num_pages + 1) * self._per_page <= limit and (
            keys[(num_pages + 1) * self._per_page - 1] in self._units
        ):
            num_pages += 1
        units = num_pages * self._per_page
        for unit in range(min(limit, units + self._per_page - 1), units, -1):
            if keys[unit - 1] in self._units:
                units = unit
                break
        common = units * self.unit_size
        while units:
            checkpoint = self._checkpoints.get(keys[units - 1])
            if checkpoint is not None:
                pages = tuple(min(self._units[key]) for key in checkpoint.chain)
                return Lookup(checkpoint, pages, common)
            units -= 1
        return Lookup(None, (), common)

    def rows_of(self, checkpoint: Checkpoint) -> tuple[list[int], list[bytes]]:
        """Return pages with the rows below a checkpoint, and the hashes of their units."""
        pages = [min(self._units[key]) for key in checkpoint.chain]
        keys = [key for page in pages for key in self._page_keys[page]]
        return pages, keys[: checkpoint.position // self.unit_size]

    def pin(self, found: Lookup) -> None:
        """Protect what a lookup found until `unpin_source`, before anything is allocated."""
        assert found.checkpoint is not None
        found.checkpoint.pins += 1
        self.states.retain(found.checkpoint.states)
        self.pages.retain(found.pages)

    def unpin(self, found: Lookup) -> None:
        """Undo `pin` where the request could not be admitted."""
        assert found.checkpoint is not None
        self.unpin_checkpoint(found.checkpoint)
        self.release_pages(found.pages)

    def unpin_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Say that a reader has copied the states."""
        checkpoint.pins -= 1
        self.states.release(checkpoint.states)

    def count(self, found: Lookup, num_tokens: int) -> None:
        """Record the lookup of an admitted request of ``num_tokens`` and mark what it used."""
        self.counts.queries += 1
        self.counts.query_tokens += num_tokens
        if found.position:
            self.counts.hits += 1
            self.counts.hit_tokens += found.position
        if found.checkpoint is not None:
            found.checkpoint.hits += 1
            self._touch(found.checkpoint)

    # ---- registering -----------------------------------------------------------------------

    def register_rows(self, pages: Sequence[int], keys: Sequence[bytes], start: int) -> None:
        """Make the rows of complete units findable; they have landed and never change.

        Args:
            pages: Pages of the sequence, held by it.
            keys: Hashes of its complete units.
            start: First unit that is not registered in these pages yet.
        """
        for unit in range(start, len(keys)):
            page = pages[unit // self._per_page]
            known = self._page_keys.setdefault(page, [])
            assert len(known) == unit % self._per_page, "units of a page are registered in order"
            known.append(keys[unit])
            self._units.setdefault(keys[unit], set()).add(page)
            self.pages.keep(page)

    def publish(
        self,
        keys: Sequence[bytes],
        position: int,
        states: Sequence[int],
        kinds: Iterable[CheckpointKind],
    ) -> Checkpoint:
        """Make states findable that have landed in blocks of their own.

        The rows below the position must be registered; the blocks are held by the caller, whose
        reference passes to the index. Where the prefix has a checkpoint already, the blocks are
        freed and that one is returned with the new kinds.
        """
        chain = tuple(page_ends(keys, position, self.page_size, self.unit_size))
        known = self._checkpoints.get(chain[-1])
        if known is not None:
            self.states.release(states)
            known.kinds.update(kinds)
            self._touch(known)
            return known
        assert len(states) == self.num_groups, "a checkpoint exists in all groups or in none"
        assert all(key in self._units for key in chain), "a checkpoint without its rows"
        checkpoint = Checkpoint(position, chain, tuple(states), set(kinds))
        self._checkpoints[chain[-1]] = checkpoint
        for key in chain:
            self._needed_by.setdefault(key, set()).add(chain[-1])
            for page in self._units[key]:
                self._orphans.pop(page, None)
        for block in states:
            self.states.keep(block)
        self.states.release(states)
        self._touch(checkpoint)
        return checkpoint

    def retire(self, checkpoint: Checkpoint, kind: CheckpointKind) -> None:
        """Take away one reason for a checkpoint; without any it goes."""
        if self._checkpoints.get(checkpoint.key) is not checkpoint:
            return
        checkpoint.kinds.discard(kind)
        if not checkpoint.kinds:
            self._drop(checkpoint)

    def release_pages(self, pages: Sequence[int]) -> None:
        """Drop a sequence's references; what the index knows stays findable."""
        self.pages.release(pages)
        for page in reversed(pages):
            self._sort_idle(page)

    # ---- room ------------------------------------------------------------------------------

    def allocate_pages(self, count: int) -> list[int]:
        """Take pages, giving up cached ones where needed.

        Raises:
            CapacityError: Too many are held; nothing was taken.
        """
        return self._allocate(self.pages, count)

    def allocate_states(self, count: int) -> list[int]:
        """Take places of states, giving up checkpoints where needed.

        Raises:
            CapacityError: Too many are held; nothing was taken.
        """
        return self._allocate(self.states, count)

    def num_available(self, pool: BlockPool) -> int:
        """Blocks that could be allocated after giving up everything cached."""
        return pool.num_free + pool.num_idle

    def clear(self) -> None:
        """Forget everything that is not held."""
        while self._evict_checkpoint(self.states):
            pass
        while self._orphans:
            self._evict_page(next(iter(self._orphans)))

    def _allocate(self, pool: BlockPool, count: int) -> list[int]:
        if count > self.num_available(pool):
            raise CapacityError(
                f"{count} {pool.name} wanted, {self.num_available(pool)} of {pool.num_blocks} "
                "are not in use; wait"
            )
        while pool.num_free < count:
            if pool is self.pages and self._orphans:
                self._evict_page(next(iter(self._orphans)))
            elif not self._evict_checkpoint(pool):
                raise CapacityError(f"{count} {pool.name} wanted, but what is left is in use; wait")
        return pool.allocate(count)

    def _evict_page(self, page: int) -> None:
        del self._orphans[page]
        for key in self._page_keys.pop(page):
            carriers = self._units[key]
            carriers.discard(page)
            if not carriers:
                del self._units[key]
        self.counts.evicted_pages += 1
        self.pages.forget(page)

    def _evict_checkpoint(self, pool: BlockPool) -> bool:
        """Give up the checkpoint of the lowest score that brings room in ``pool`` nearer.

        False where there is none: all are being read, or their pages are held.
        """
        useless = []
        found = None
        while self._queue and found is None:
            entry = heapq.heappop(self._queue)
            checkpoint = entry[2]
            if self._checkpoints.get(checkpoint.key) is not checkpoint:
                continue
            if entry[0] != score(checkpoint):
                self._push(checkpoint)
            elif checkpoint.pins or not self._holds_idle(checkpoint, pool):
                useless.append(entry)
            else:
                found = checkpoint
        for entry in useless:
            heapq.heappush(self._queue, entry)
        if found is None:
            return False
        if self.before_eviction is not None:
            self.before_eviction(found)
        self.counts.evicted_checkpoints += 1
        self._drop(found)
        return True

    def _holds_idle(self, checkpoint: Checkpoint, pool: BlockPool) -> bool:
        if pool is self.states:
            return True
        carriers = (page for key in checkpoint.chain for page in self._units[key])
        return any(self.pages.is_idle(page) for page in carriers)

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint in all groups at once; a reader keeps its blocks until it is done."""
        del self._checkpoints[checkpoint.key]
        for block in checkpoint.states:
            self.states.forget(block)
        freed: list[int] = []
        for key in checkpoint.chain:
            needing = self._needed_by[key]
            needing.discard(checkpoint.key)
            if not needing:
                del self._needed_by[key]
                freed.extend(self._units[key])
        for page in reversed(freed):
            self._sort_idle(page)

    def _sort_idle(self, page: int) -> None:
        """Put an idle page that no checkpoint needs to those that go first."""
        if page in self._orphans or not self.pages.is_idle(page):
            return
        if not any(key in self._needed_by for key in self._page_keys.get(page, ())):
            self._orphans[page] = None

    def _touch(self, checkpoint: Checkpoint) -> None:
        self._tick += 1
        checkpoint.last_used = self._tick
        self._push(checkpoint)

    def _push(self, checkpoint: Checkpoint) -> None:
        if len(self._queue) > 64 + 4 * len(self._checkpoints):
            # entries of old scores and of dropped checkpoints stay until they are met
            checkpoints = list(self._checkpoints.values())
            numbers = range(self._num_pushed + 1, self._num_pushed + 1 + len(checkpoints))
            pairs = zip(numbers, checkpoints, strict=True)
            self._queue = [(score(known), number, known) for number, known in pairs]
            self._num_pushed += len(checkpoints)
            heapq.heapify(self._queue)
            return
        self._num_pushed += 1
        heapq.heappush(self._queue, (score(checkpoint), self._num_pushed, checkpoint))

    # ---- consistency -----------------------------------------------------------------------

    def check(self) -> None:
        """Assert that index, pages and states tell the same story."""
        self.pages.check()
        self.states.check()
        carried = {(key, page) for page, keys in self._page_keys.items() for key in keys}
        assert carried == {(k, page) for k, pages in self._units.items() for page in pages}
        assert all(self._units.values()), "a hash without a page"
        assert all(len(keys) <= self._per_page for keys in self._page_keys.values())
        blocks = [b for c in self._checkpoints.values() for b in c.states]
        assert len(set(blocks)) == len(blocks), "two checkpoints share a state"
        cached = set(blocks) | set(self._page_keys)
        assert cached == self.pages.cached() | self.states.cached(), "index and pools differ"
        needed: dict[bytes, set[bytes]] = {}
        for key, checkpoint in self._checkpoints.items():
            assert checkpoint.key == key
            assert checkpoint.kinds, "a checkpoint without a reason"
            assert len(checkpoint.states) == self.num_groups, "a group is missing"
            assert all(link in self._units for link in checkpoint.chain), "rows are missing"
            for link in checkpoint.chain:
                needed.setdefault(link, set()).add(key)
        assert needed == self._needed_by, "dependence is out of step"
        wanted = {
            page
            for page, keys in self._page_keys.items()
            if self.pages.is_idle(page) and not any(key in needed for key in keys)
        }
        assert wanted == set(self._orphans), "orphaned pages are out of step"
