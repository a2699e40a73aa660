"""A model whose memory is checked exactly: every row and state is a number that names its prefix.

A row of a page holds the fold of all tokens up to it, a state block the fold of its group and the
position. Computing a token demands that every earlier row of the sequence and all its states are
those of exactly its own tokens; anything stale, foreign or off by one is found where it happens
(hybrid-cache.md section 16).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from moonlet.engine.cache.blocks import BlockPool
from moonlet.engine.cache.manager import CacheManager, Save
from moonlet.engine.cache.prefix import PrefixCache
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


class SymbolicMemory:
    """The bytes behind the blocks."""

    def __init__(self, manager: CacheManager, running: Callable[[], Iterable[Sequence]]) -> None:
        cache = manager.cache
        self.manager, self.running = manager, running
        self.rows = [[None] * cache.page_size for _ in range(cache.pages.num_blocks + 1)]
        self.states: list[tuple[int, int] | None] = [None] * (cache.states.num_blocks + 1)
        self._windows: dict[Sequence, tuple[int, list[int]]] = {}

    def execute(self, step: Step, counts: Counter) -> None:
        for restore in step.restores:
            sequence, tail = restore.sequence, restore.tail
            if restore.checkpoint is None:
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
        tokens = [*sequence.token_range(0, stop - len(chunk.drafts)), *chunk.drafts]
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
        self.finished: list[Sequence] = []
        self._num_submitted = 0

    def submit(
        self,
        prompt: SequenceOf[int],
        max_tokens: int = 1,
        salt: str = "",
        priority: str | None = None,
    ) -> Sequence:
        limits = self.scheduler.limits
        request = EngineRequest(
            request_id=f"r{self._num_submitted}",
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            cache_salt=salt,
            priority=priority,
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
            self.memory.execute(step, self.counts)
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
            tokens = list(sequence.token_range(0, sequence.num_tokens))
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
                self.prefixes[key] = tuple(sequence.token_range(0, (index + 1) * unit))

    def _check_hit(self, restore: object, before: set[bytes]) -> None:
        """I2, I6: a hit is an endpoint below the end, on the own prefix, and not born now."""
        checkpoint, sequence = restore.checkpoint, restore.sequence
        self.counts["I2"] += 1
        if checkpoint is None:
            assert sequence.num_computed == 0
            return
        position = checkpoint.position
        assert position == sequence.num_cached_tokens <= sequence.num_tokens - 1
        assert position % self.cache.unit_size == 0
        assert self.prefixes[checkpoint.key] == tuple(sequence.token_range(0, position))
        assert checkpoint.key in before, "found in the step that made it"
        self.counts["I6"] += 1
        self.counts["hits"] += 1
