"""A model whose memory is checked exactly: every row and state is a number that names its prefix.

A row of a page holds the fold of all tokens up to it, a state block the fold of its group and the
position. Computing a token demands that every earlier row of the sequence and all its states are
those of exactly its own tokens; anything stale, foreign or off by one is found where it happens
(hybrid-cache.md section 16). A token counts as another one under another salt and where an image
stands (`seen`), so a hash that forgot either is found by the content that it leads to.

What goes to the external pool is those numbers as bytes, through the real `Writeback`.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from moonlet.engine.cache.blocks import BlockPool
from moonlet.engine.cache.chain import MediaSpan
from moonlet.engine.cache.external import CacheIdentity, ExternalPool, StateGeometry
from moonlet.engine.cache.external import Checkpoint as ExternalCheckpoint
from moonlet.engine.cache.manager import CacheManager, Restore, Save
from moonlet.engine.cache.prefix import PrefixCache
from moonlet.engine.cache.writeback import Writeback
from moonlet.engine.limits import DEFAULT_CLASS, PriorityClass, SchedulerLimits
from moonlet.engine.request import EngineRequest, SamplingParams, Sequence
from moonlet.engine.scheduler import Scheduler
from moonlet.engine.step import ScheduledChunk, Step

Draft = Callable[[Sequence, int], SequenceOf[int]]
VOCAB = 3
STOP = 99
_MULTIPLIER = 6364136223846793005


def fold(tokens: SequenceOf[int], group: int = 0) -> int:
    value = group + 1
    for token in tokens:
        value = (value * _MULTIPLIER + token + group) % (1 << 64)
    return value


def next_token(tokens: SequenceOf[int]) -> int:
    """What the toy model says after these tokens."""
    return (fold(tokens) >> 33) % VOCAB


def seen(sequence: Sequence, start: int, stop: int) -> list[int]:
    """Tokens of a sequence as its tenant's model sees them: with their salt and images."""
    request, tokens = sequence.request, list(sequence.token_range(start, stop))
    for image in request.media:
        for position in range(max(start, image.start), min(stop, image.stop)):
            place = position - image.start
            tokens[position - start] += 1000 * (zlib.crc32(image.digest) + place)
    return [token + salt_of(sequence) for token in tokens]


def salt_of(sequence: Sequence) -> int:
    """What the salt adds to every token; more than any image does."""
    return zlib.crc32(sequence.request.cache_salt.encode()) << 44


def geometry_identity(unit_size: int, fingerprint: str = "toy") -> CacheIdentity:
    """Of a pool whose rows have 8 bytes and whose states have 16."""
    geometry = StateGeometry(
        dtype="float32",
        num_mla_layers=1,
        row_width=2,
        num_kda_layers=1,
        num_heads=1,
        head_dim=1,
        conv_rows=1,
    )
    return CacheIdentity(fingerprint=fingerprint, hash_unit=unit_size, geometry=geometry)


class PromptPool(ExternalPool):
    """An external pool whose files are written when `store` returns, so that runs repeat."""

    def store(self, *args: Any, **kwargs: Any) -> bool:
        taken = super().store(*args, **kwargs)
        assert self.flush(60.0)
        return taken


class SymbolicMemory:
    """The bytes behind the blocks."""

    def __init__(self, manager: CacheManager, running: Callable[[], Iterable[Sequence]]) -> None:
        cache = manager.cache
        self.manager, self.running = manager, running
        self.rows = [[None] * cache.page_size for _ in range(cache.pages.num_blocks + 1)]
        self.states: list[tuple[int, int] | None] = [None] * (cache.states.num_blocks + 1)
        self._windows: dict[Sequence, tuple[int, list[int]]] = {}

    def execute(self, step: Step, counts: Counter, writeback: Writeback | None = None) -> None:
        for restore in step.restores:
            sequence, tail = restore.sequence, restore.tail
            if restore.external is not None:
                assert writeback is not None
                assert sequence.slot is not None
                writeback.read(restore.external, sequence.slot, sequence.pages)
            elif restore.checkpoint is None:
                for group, block in enumerate(sequence.states):
                    self.states[block] = (fold((), group), 0)
            else:
                pairs = zip(restore.checkpoint.states, sequence.states, strict=True)
                for source, target in pairs:
                    self.states[target] = self.states[source]
            if tail is not None:
                counts["tail copies"] += 1
                rows = self.rows[tail.source][: tail.num_rows]
                self.rows[tail.target][: tail.num_rows] = rows
        self._windows = {}
        for chunk in step.chunks:
            self._compute(chunk)
            counts["I5"] += chunk.num_tokens
            counts["I7"] += 1

    def commit(self) -> None:
        """Keep of every window the state after the rows that the sequence counts as computed."""
        for sequence, (start, tokens) in self._windows.items():
            kept = tokens[: sequence.num_computed]
            assert start < len(kept) == sequence.num_computed
            for group, block in enumerate(sequence.states):
                self.states[block] = (fold(kept, group), len(kept))

    def _compute(self, chunk: ScheduledChunk) -> None:
        cache, size = self.manager.cache, self.manager.page_size
        sequence, start, stop = chunk.sequence, chunk.start, chunk.stop
        tokens = [*seen(sequence, 0, stop - len(chunk.drafts)), *drafts_seen(chunk)]
        for position in range(start):
            page = sequence.pages[position // size]
            wanted = fold(tokens[: position + 1])
            assert self.rows[page][position % size] == wanted, f"row {position} is foreign"
        for group, block in enumerate(sequence.states):
            assert self.states[block] == (fold(tokens[:start], group), start), "state is foreign"
            assert block not in cache.states.cached(), "a checkpoint is written"
            if not chunk.drafts:
                self.states[block] = (fold(tokens, group), stop)
        if chunk.drafts:
            self._windows[sequence] = (start, tokens)
        for position in range(start, stop):
            page = sequence.pages[position // size]
            registered = len(cache._page_keys.get(page, ())) * cache.unit_size
            assert position % size >= registered, "a registered row is written"
            # a reader may copy its first rows in this very step, but nobody else holds it
            owners = [s for s in self.running() if page in s.pages]
            assert owners == [sequence], "a shared page is written"
            self.rows[page][position % size] = fold(tokens[: position + 1])

    def keep(self, save: Save) -> None:
        for source, target in zip(save.sequence.states, save.states, strict=False):
            self.states[target] = self.states[source]

    # ---- what `cache.transfer` asks of the arenas ------------------------------------------------

    def read_rows(self, pages: SequenceOf[int], start: int, stop: int) -> torch.Tensor:
        size = self.manager.page_size
        rows = [self.rows[pages[i // size]][i % size] for i in range(start, stop)]
        assert None not in rows, "a void row leaves the arenas"
        return _bytes_of(rows)

    def write_rows(self, pages: SequenceOf[int], start: int, rows: torch.Tensor) -> None:
        size = self.manager.page_size
        for i, value in enumerate(_numbers_of(rows), start):
            self.rows[pages[i // size]][i % size] = value

    def read_slot(self, slot: int) -> torch.Tensor:
        state = self.states[slot]
        assert state is not None, "a void state leaves the arenas"
        return _bytes_of(state)

    def write_slot(self, slot: int, state: torch.Tensor) -> None:
        value, position = _numbers_of(state)
        self.states[slot] = (value, position)

    def poison_free(self) -> None:
        """Make what no one may read unreadable."""
        cache = self.manager.cache
        known = cache.pages.held() | cache.pages.cached()
        for page in set(range(1, cache.pages.num_blocks + 1)) - known:
            self.rows[page] = [None] * cache.page_size
        known = cache.states.held() | cache.states.cached()
        for block in set(range(1, cache.states.num_blocks + 1)) - known:
            self.states[block] = None

    def check(self, prefixes: dict[bytes, tuple[int, ...]], counts: Counter) -> None:
        """I1, I3: whatever can be found is what a cold run would have computed."""
        cache = self.manager.cache
        for key, checkpoint in cache._checkpoints.items():
            tokens = prefixes[key]
            assert len(tokens) == checkpoint.position
            assert len(checkpoint.states) == cache.num_groups
            for group, block in enumerate(checkpoint.states):
                assert self.states[block] == (fold(tokens, group), len(tokens))
            counts["I1"] += 1
            counts["I3"] += 1
        for page, keys in cache._page_keys.items():
            for key in keys:
                tokens = prefixes[key]
                row = (len(tokens) - 1) % cache.page_size
                assert self.rows[page][row] == fold(tokens)
                counts["I1"] += 1


def _bytes_of(numbers: SequenceOf[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, np.uint64).view(np.uint8))


def _numbers_of(data: torch.Tensor) -> list[int]:
    return data.numpy().copy().view(np.uint64).tolist()


def drafts_seen(chunk: ScheduledChunk) -> list[int]:
    """Drafts of a chunk as `seen`."""
    return [draft + salt_of(chunk.sequence) for draft in chunk.drafts]


def assert_external(
    checkpoint: ExternalCheckpoint, prefixes: dict[bytes, tuple[int, ...]], unit_size: int
) -> None:
    """I12: whatever the pool gives out is whole, and what a cold run would have computed."""
    tokens = prefixes[checkpoint.key]
    assert len(tokens) == len(checkpoint.keys) * unit_size
    rows = np.concatenate(checkpoint.rows()).view(np.uint64).tolist()
    assert rows == [fold(tokens[: i + 1]) for i in range(len(tokens))], "a stored row is foreign"
    state = checkpoint.state.view(np.uint64).tolist()
    assert state == [fold(tokens), len(tokens)], "a stored state is foreign"


class SymbolicEngine:
    """Scheduler, manager and symbolic memory, stepped by hand."""

    def __init__(
        self,
        *,
        num_pages: int = 60,
        num_states: int = 40,
        page_size: int = 12,
        unit_size: int = 4,
        groups: int = 1,
        seqs: int = 4,
        budget: int = 16,
        max_len: int = 120,
        is_unified: bool = False,
        is_sharing: bool = True,
        classes: tuple[PriorityClass, ...] = (DEFAULT_CLASS,),
    ) -> None:
        if is_unified:
            pages = states = BlockPool(num_pages + num_states * groups, "blocks")
        else:
            pages = BlockPool(num_pages, "pages")
            states = BlockPool(num_states * groups, "state slots")
        self.cache = PrefixCache(
            pages, states, page_size=page_size, unit_size=unit_size, num_groups=groups
        )
        self.manager = CacheManager(self.cache, stop_ids=(STOP,), is_sharing=is_sharing)
        limits = SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_len,
            classes=classes,
        )
        self.scheduler = Scheduler(limits, self.manager)
        self.memory = SymbolicMemory(self.manager, self.scheduler._running.values)
        self.counts: Counter = Counter()
        self.prefixes: dict[bytes, tuple[int, ...]] = {}
        # the same without salt and images
        self.plain_prefixes: dict[bytes, tuple[int, ...]] = {}
        self.writeback: Writeback | None = None
        self.finished: list[Sequence] = []
        self._num_submitted = 0

    def attach(self, pool: ExternalPool) -> None:
        """Connect an external pool as the engine does; `SymbolicMemory` stands for the arenas."""
        memory: Any = self.memory
        self.writeback = Writeback(pool, self.cache, memory)
        self.manager.external = self.writeback
        self.cache.before_eviction = self.writeback.evicted

    def submit(
        self,
        prompt: SequenceOf[int],
        max_tokens: int = 1,
        salt: str = "",
        priority: str | None = None,
        media: tuple[MediaSpan, ...] = (),
    ) -> Sequence:
        limits = self.scheduler.limits
        request = EngineRequest(
            request_id=f"r{self._num_submitted}",
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            cache_salt=salt,
            priority=priority,
            media=media,
        )
        rank = limits.rank(priority, len(request.prompt_ids))
        sequence = Sequence(request, max_model_len=limits.max_model_len, rank=rank)
        self._num_submitted += 1
        self.scheduler.add(sequence)
        return sequence

    def step(
        self, *, is_finite: bool = True, fails: bool = False, draft: Draft | None = None
    ) -> Step | None:
        """Run one step as the engine does."""
        before = set(self.cache._checkpoints)
        step = self.scheduler.schedule()
        if step is None:
            assert not self.scheduler.has_work, "nothing runs, but something waits"
            return None
        assert step.num_tokens >= 1
        assert step.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        self.counts["I8"] += 1
        for restore in step.restores:
            self._check_hit(restore, before)
        if draft is not None:
            step = self._with_drafts(step, draft)
        if not fails:
            self.memory.execute(step, self.counts, self.writeback)
        for restore in step.restores:
            self.manager.landed(restore, is_whole=not fails)
        if fails:
            involved = [c.sequence for c in step.chunks] + [r.sequence for r in step.restores]
            for sequence in dict.fromkeys(involved):
                self.end(sequence, "error")
            return step
        owed = [chunk for chunk in step.chunks if chunk.needs_logits]
        self.scheduler.advance(step)
        for chunk in owed:
            self._emit(chunk)
        self.memory.commit()
        for save in self.scheduler.saves(step):
            self.memory.keep(save)
            self._learn(save.sequence)
            self.manager.confirm(save, is_finite=is_finite)
        for chunk in owed:
            if chunk.sequence.num_tokens == chunk.sequence.max_total_tokens:
                self.end(chunk.sequence, "length")
        return step

    def _with_drafts(self, step: Step, draft: Draft) -> Step:
        chunks = []
        room = self.scheduler.limits.max_num_batched_tokens - step.num_tokens
        for chunk in step.chunks:
            sequence = chunk.sequence
            left = sequence.max_total_tokens - sequence.num_tokens - 1
            wanted = min(room, left) if chunk.is_decode else 0
            if wanted > 0:
                wanted = self.manager.window_room(sequence, wanted)
                drafts = tuple(draft(sequence, wanted))
                assert len(drafts) <= wanted
                room -= len(drafts)
                chunk = replace(chunk, num_tokens=1 + len(drafts), drafts=drafts)
            chunks.append(chunk)
        return replace(step, chunks=tuple(chunks))

    def _emit(self, chunk: ScheduledChunk) -> None:
        """Append what the model says; drafts that say the same are computed already."""
        sequence = chunk.sequence
        for position in range(len(chunk.drafts) + 1):
            if position:
                self.scheduler.confirm(sequence)
                self.counts["accepted drafts"] += 1
            tokens = seen(sequence, 0, sequence.num_tokens)
            self.scheduler.append(sequence, next_token(tokens))
            self.counts["I9"] += 1
            is_last = position == len(chunk.drafts)
            if is_last or chunk.drafts[position] != sequence.output_ids[-1]:
                self.counts["rejected drafts"] += not is_last
                return

    def end(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.finish(sequence, reason)
        self.finished.append(sequence)

    def run(self) -> list[list[int]]:
        """Step until nothing is left; return the chunk ends of every step."""
        ends = []
        while (step := self.step()) is not None:
            ends.append([chunk.stop for chunk in step.chunks])
            self.audit()
        return ends

    def ends_of(self, prompt: SequenceOf[int], **options: object) -> list[int]:
        """Run one request and return where its prompt chunks ended."""
        sequence = self.submit(prompt, **options)
        ends = []
        while (step := self.step()) is not None:
            ends += [c.stop for c in step.chunks if c.sequence is sequence]
            self.audit()
        return [end for end in ends if end <= len(sequence.prompt_ids)]

    def audit(self) -> None:
        self.memory.poison_free()
        self.scheduler.check()
        self.memory.check(self.prefixes, self.counts)
        self.counts["I4"] += 1

    def positions(self) -> list[int]:
        """Positions of all checkpoints."""
        return sorted(c.position for c in self.cache._checkpoints.values())

    def _learn(self, sequence: Sequence) -> None:
        unit = self.cache.unit_size
        for index, key in enumerate(sequence.chain.keys):
            if key not in self.prefixes:
                stop = (index + 1) * unit
                self.prefixes[key] = tuple(seen(sequence, 0, stop))
                self.plain_prefixes[key] = tuple(sequence.token_range(0, stop))

    def _check_hit(self, restore: Restore, before: set[bytes]) -> None:
        """I2, I6, I11, I12: a hit is an endpoint on the own prefix, and not born now."""
        checkpoint, sequence, stored = restore.checkpoint, restore.sequence, restore.external
        self.counts["I2"] += 1
        self._count_strangers(sequence)
        if isinstance(stored, ExternalCheckpoint):
            position = len(stored.keys) * self.cache.unit_size
            assert checkpoint is None
            assert position == sequence.num_cached_tokens <= sequence.num_tokens - 1
            assert self.prefixes[stored.key] == tuple(seen(sequence, 0, position))
            assert_external(stored, self.prefixes, self.cache.unit_size)
            self.counts["I12"] += 1
            self.counts["external hits"] += 1
            return
        if checkpoint is None:
            assert sequence.num_computed == 0
            return
        position = checkpoint.position
        assert position == sequence.num_cached_tokens <= sequence.num_tokens - 1
        assert position % self.cache.unit_size == 0
        assert self.prefixes[checkpoint.key] == tuple(seen(sequence, 0, position))
        assert checkpoint.key in before, "found in the step that made it"
        self.counts["I6"] += 1
        self.counts["hits"] += 1

    def _count_strangers(self, sequence: Sequence) -> None:
        """Count the checkpoints of the same tokens under another salt or image.

        A hash without either would name them too; that none was taken is asserted by content.
        """
        for key, checkpoint in self.cache._checkpoints.items():
            position = checkpoint.position
            own = tuple(sequence.token_range(0, position))
            if self.plain_prefixes[key] == own and self.prefixes[key] != tuple(
                seen(sequence, 0, position)
            ):
                self.counts["I11"] += 1
