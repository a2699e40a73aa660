"""What one sequence owns of the cache, from admission to its end.

The manager turns a sequence's life into operations of the prefix index: look up and resume, grow by
pages, register what has landed, keep states where they will be looked up, give everything back. It
moves no bytes: what must be copied it returns as `Restore` and `Save`, and the runner copies
(hybrid-cache.md sections 7 and 8).
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from moonlet.core.errors import CapacityError
from moonlet.engine.cache.chain import PrefixChain, root_hash
from moonlet.engine.cache.checkpoints import Checkpoint, CheckpointKind, is_kept
from moonlet.engine.cache.external.parked import ParkedSession, ParkedSessions
from moonlet.engine.cache.lookup import NOTHING_FOUND, Lookup, StoredPrefix
from moonlet.engine.cache.planner import checkpoint_before, plan_end, turn_marks
from moonlet.engine.cache.prefix import PrefixCache
from moonlet.engine.request import PrefixLoad, Sequence

__all__ = ["CacheManager", "Restore", "Save", "TailCopy"]

_TURNS = 2


@dataclass(frozen=True, slots=True)
class TailCopy:
    """The first ``num_rows`` rows of a page that somebody else may still append to."""

    source: int
    target: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Restore:
    """What must be copied before an admitted sequence runs.

    Attributes:
        sequence: The reader.
        checkpoint: Its states go to the sequence's own; None for a start at position 0.
        tail: Copy of a page that is shared in part only.
        load: Rows and states that came from outside the arenas, in place of a checkpoint.
        kept: Makes what was loaded findable in the arenas too; its states are copied at once.
    """

    sequence: Sequence
    checkpoint: Checkpoint | None
    tail: TailCopy | None
    load: PrefixLoad | None = None
    kept: Save | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """What a step computed that may be found from now on, once it is known to be finite.

    Attributes:
        sequence: Who computed it.
        num_units: Complete units of the sequence, those from `Sequence.num_registered` on are new.
        states: Blocks that take a copy of the states, which must run before the next step; empty
            where the states are not kept.
        kinds: Why they are kept.
    """

    sequence: Sequence
    num_units: int
    states: tuple[int, ...]
    kinds: frozenset[CheckpointKind]


class ExternalTier(Protocol):
    """Where checkpoints outlive the arenas; `cache.writeback.Writeback` is one."""

    @property
    def is_loading(self) -> bool:
        """Whether a load has not ended yet; whoever waits is called when it does."""
        ...

    def note(self, checkpoint: Checkpoint) -> None:
        """Hear of a checkpoint that was published or has got another kind."""
        ...

    def find(self, keys: SequenceOf[bytes], num_units: int) -> StoredPrefix | None:
        """Name the longest stored prefix of a chain beyond ``num_units`` units."""
        ...

    def can_start(self, stored: Any) -> bool:
        """Whether there is room to fetch what `find` named."""
        ...

    def start(self, stored: Any) -> PrefixLoad:
        """Begin to fetch it; nothing in the arenas is touched."""
        ...

    def release(self, load: Any) -> None:
        """Forget a load, ended or not."""
        ...


class CacheManager:
    """Owner of the pools on behalf of the scheduler.

    Args:
        cache: Index over the pools.
        stop_ids: Ids that end a message; states are kept at the ends of the last messages.
        fingerprint: Of the model; prefixes of another one never match.
        is_sharing: False turns prefix reuse off: nothing is looked up, registered or kept.

    Attributes:
        external: Looked up after the index; None without one.
        parked: Sessions from other processes, looked up too.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        stop_ids: Collection[int] = (),
        fingerprint: bytes = b"",
        is_sharing: bool = True,
    ) -> None:
        self.cache = cache
        self.is_sharing = is_sharing
        self._stop_ids = stop_ids
        self._fingerprint = fingerprint
        self.external: ExternalTier | None = None
        self.parked: ParkedSessions | None = None

    @property
    def unit_size(self) -> int:
        """Distance of endpoints."""
        return self.cache.unit_size

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.cache.page_size

    def pages_for(self, num_rows: int) -> int:
        """How many pages hold ``num_rows`` rows."""
        return -(-num_rows // self.page_size)

    # ---- admission -------------------------------------------------------------------------

    def open(self, sequence: Sequence) -> None:
        """Hash the prompt and mark the ends of its last messages."""
        root = root_hash(self._fingerprint, sequence.request.cache_salt)
        sequence.chain = PrefixChain(root, self.unit_size, sequence.request.media)
        if not self.is_sharing:
            return
        sequence.chain.extend(sequence.prompt_ids, 0)
        marks = turn_marks(sequence.prompt_ids, self._stop_ids, self.unit_size, _TURNS)
        sequence.marks = dict.fromkeys(marks, "turn")

    def lookup(self, sequence: Sequence) -> Lookup:
        """Find what a waiting sequence need not compute; nothing changes."""
        if not self.is_sharing:
            return NOTHING_FOUND
        keys, cap = sequence.chain.keys, sequence.num_tokens - 1
        found = self.cache.lookup(keys, cap)
        if self.parked is not None:
            session = self.parked.find(sequence.chain, sequence.prompt_ids)
            # a session has no images; tokens after its last whole unit are compared by id alone
            length = 0 if session is None else session.num_tokens
            shows = any(span.start < length for span in sequence.request.media)
            if length > found.position and not shows:
                return Lookup(None, (), found.common, session)
        if self.external is not None:
            reach = keys[: cap // self.unit_size]
            stored = self.external.find(reach, found.position // self.unit_size)
            if stored is not None:
                return Lookup(None, (), found.common, stored)
        return found

    def admit(self, sequence: Sequence, found: Lookup, num_spare: int) -> Restore | None:
        """Give a waiting sequence its states and the pages of all its known tokens.

        Args:
            sequence: Holds nothing yet.
            found: From `lookup`, in the same step.
            num_spare: Pages that must be left for the growth of others.

        Returns:
            What must be copied; None, and nothing has changed, where there is no room. Where the
            prefix is outside the arenas it is on its way now, and `arrived` says what to copy.
        """
        cache, checkpoint = self.cache, found.checkpoint
        if checkpoint is not None:
            cache.pin(found)
        num_shared = 0 if found.external is not None else found.position // self.page_size
        needed = self.pages_for(sequence.num_tokens + 1) - num_shared
        try:
            if needed + num_spare > cache.num_available(cache.pages):
                raise CapacityError("too few pages for the sequence and the growth of others")
            pages = cache.allocate_pages(needed)
            try:
                sequence.states = tuple(cache.allocate_states(cache.num_groups))
            except CapacityError:
                cache.release_pages(pages)
                raise
        except CapacityError:
            if checkpoint is not None:
                cache.unpin(found)
            return None
        tail = None
        if checkpoint is not None and found.position % self.page_size:
            tail = TailCopy(found.pages[-1], pages[0], found.position % self.page_size)
        sequence.pages = [*found.pages[:num_shared], *pages]
        if isinstance(found.external, ParkedSession):
            sequence.load = found.external
            return Restore(sequence, None, None)
        if found.external is not None:
            assert self.external is not None
            sequence.load = self.external.start(found.external)
            return Restore(sequence, None, None)
        sequence.num_computed = sequence.num_cached_tokens = found.position
        sequence.num_registered = num_shared * self.page_size // self.unit_size
        if found.common - found.position >= self.unit_size:
            sequence.marks[found.common] = "junction"
        cache.count(found, sequence.num_tokens)
        return Restore(sequence, checkpoint, tail)

    @property
    def is_loading(self) -> bool:
        """Whether something comes from outside the arenas."""
        return self.external is not None and self.external.is_loading

    def can_load(self, found: Lookup) -> bool:
        """Whether what a lookup found outside the arenas can be fetched now."""
        if isinstance(found.external, ParkedSession):
            return True
        return self.external is not None and self.external.can_start(found.external)

    def arrived(self, sequence: Sequence) -> Restore:
        """Say what to copy once a sequence's load has ended well."""
        load, cache = sequence.load, self.cache
        assert load is not None
        assert load.checkpoint is not None
        sequence.num_computed = sequence.num_cached_tokens = load.num_tokens
        cache.count(Lookup(None, (), 0, load), sequence.num_tokens)
        kept = None
        if load.num_tokens % self.unit_size == 0:
            kinds: frozenset[CheckpointKind] = frozenset()
            states: tuple[int, ...] = ()
            with suppress(CapacityError):
                states = tuple(cache.allocate_states(cache.num_groups))
                # what is stored outside is the end of a turn or of a prompt, or where prompts part
                kinds = frozenset({"turn"})
            kept = Save(sequence, load.num_tokens // self.unit_size, states, kinds)
        return Restore(sequence, None, None, load, kept)

    def landed(self, restore: Restore, *, is_whole: bool) -> None:
        """Say that a restore's copies have ended; if ``is_whole``, others may find what came."""
        if restore.kept is not None:
            self.confirm(restore.kept, is_finite=is_whole)
        if restore.load is not None:
            self._release_load(restore.sequence)
        if restore.checkpoint is not None:
            self.cache.unpin_checkpoint(restore.checkpoint)
        if restore.tail is not None:
            self.cache.release_pages([restore.tail.source])

    # ---- while it runs ---------------------------------------------------------------------

    def plan_end(self, sequence: Sequence, budget: int) -> int:
        """Return where the sequence's next chunk of known tokens ends."""
        if not self.is_sharing:
            return min(sequence.num_computed + budget, sequence.num_tokens)
        return plan_end(
            sequence.num_computed,
            budget,
            sequence.num_tokens,
            page_size=self.page_size,
            unit_size=self.unit_size,
            marks=sequence.marks,
        )

    def grow(self, sequence: Sequence, num_rows: int) -> bool:
        """Make room for the first ``num_rows`` rows; False where no page can be had."""
        missing = self.pages_for(num_rows) - len(sequence.pages)
        if missing <= 0:
            return True
        try:
            sequence.pages.extend(self.cache.allocate_pages(missing))
        except CapacityError:
            return False
        return True

    def window_room(self, sequence: Sequence, wanted: int) -> int:
        """Return how many drafts may follow the newest token of a decoding sequence.

        A window ends at the next endpoint at the latest, so that the states there can be kept, and
        has the pages that can be had without taking any from somebody else.
        """
        last = sequence.num_tokens + wanted
        if self.is_sharing:
            last = min(last, (sequence.num_computed // self.unit_size + 1) * self.unit_size)
        if not self.grow(sequence, last):
            last = min(last, len(sequence.pages) * self.page_size)
        return last - sequence.num_tokens

    def advanced(self, sequence: Sequence, start: int) -> Save | None:
        """Say what may be found now that the tokens from ``start`` on are computed."""
        if not self.is_sharing:
            return None
        computed, unit = sequence.num_computed, self.unit_size
        num_units = computed // unit
        if num_units == start // unit and sequence.num_registered == num_units:
            return None
        hashed = len(sequence.chain.keys)
        if num_units > hashed:
            tokens = sequence.token_range(hashed * unit, num_units * unit)
            sequence.chain.extend(tokens, hashed * unit)
        kinds = frozenset() if computed % unit else self._kinds(sequence)
        states: tuple[int, ...] = ()
        if kinds:
            try:
                states = tuple(self.cache.allocate_states(self.cache.num_groups))
            except CapacityError:
                kinds = frozenset()
        return Save(sequence, num_units, states, kinds)

    def confirm(self, save: Save, *, is_finite: bool) -> None:
        """Make what was computed findable, or throw the copy away where it is not finite."""
        sequence, cache = save.sequence, self.cache
        if not is_finite:
            cache.states.release(save.states)
            return
        keys = sequence.chain.keys[: save.num_units]
        first = sequence.num_registered
        cache.register_rows(sequence.pages, keys, first)
        sequence.num_registered = save.num_units
        if save.states:
            position = save.num_units * self.unit_size
            checkpoint = cache.publish(keys, position, save.states, save.kinds)
            if self.external is not None:
                self.external.note(checkpoint)
            previous, sequence.rolling = sequence.rolling, checkpoint
            if previous is not None and previous is not checkpoint:
                cache.retire(previous, "rolling")
        self._thin(keys, first)

    def close(self, sequence: Sequence, *, is_finished: bool) -> None:
        """Take back everything; what others may resume stays findable.

        Args:
            sequence: Holds pages and states.
            is_finished: The last states become those of a turn; else (preemption) they stay what
                they are, for the sequence's own return.
        """
        rolling = sequence.rolling
        if is_finished and rolling is not None:
            rolling.kinds.add("turn")
            self.cache.retire(rolling, "rolling")
            if self.external is not None:
                self.external.note(rolling)
            sequence.rolling = None
        self._release_load(sequence)
        self.cache.states.release(sequence.states)
        self.cache.release_pages(sequence.pages)
        sequence.states = ()
        sequence.pages = []
        sequence.num_registered = 0

    def _release_load(self, sequence: Sequence) -> None:
        load, sequence.load = sequence.load, None
        if load is not None and not isinstance(load, ParkedSession):
            assert self.external is not None
            self.external.release(load)

    def _kinds(self, sequence: Sequence) -> frozenset[CheckpointKind]:
        """Return why the present states of a sequence at an endpoint are to be kept."""
        position = sequence.num_computed
        kinds: set[CheckpointKind] = {"rolling"}
        if position % self.page_size == 0:
            kinds.add("page")
        if position == checkpoint_before(len(sequence.prompt_ids), self.unit_size):
            kinds.add("tail")
        if position in sequence.marks:
            kinds.add(sequence.marks[position])
        return frozenset(kinds)

    def _thin(self, keys: SequenceOf[bytes], first: int) -> None:
        """Retire the page checkpoints of a path that have become too dense for their distance."""
        page, per_page = self.page_size, self.page_size // self.unit_size
        for number in range(first // per_page + 1, len(keys) // per_page + 1):
            gap = 4
            while gap < number:
                position = (number - gap) * page
                gap *= 2
                if is_kept(position, number * page, page):
                    continue
                known = self.cache.find(keys[position // self.unit_size - 1])
                if known is not None:
                    self.cache.retire(known, "page")
