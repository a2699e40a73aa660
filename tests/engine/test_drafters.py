"""Prompt lookup and suffix trees against a plain search of the text."""

import sys
from collections import Counter
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.engine.request import EngineRequest, Sequence
from moonlet.engine.speculative import SpeculativeConfig
from moonlet.engine.speculative.drafter import Drafter
from moonlet.engine.speculative.ngram import NGramDrafter, NGramIndex
from moonlet.engine.speculative.suffix import SuffixDrafter
from moonlet.engine.speculative.suffix_tree import SuffixTree

few_ids = st.lists(st.integers(0, 3), max_size=60)


def sequence(name: str, prompt: SequenceOf[int], output: SequenceOf[int] = ()) -> Sequence:
    made = Sequence(EngineRequest(request_id=name, prompt_ids=prompt), max_model_len=10_000)
    made.output_ids.extend(output)
    return made


def ngram(**knobs: object) -> NGramDrafter:
    return NGramDrafter(
        SpeculativeConfig.from_dict({"method": "ngram", "num_speculative_tokens": 8, **knobs})
    )


def suffix(**knobs: object) -> SuffixDrafter:
    return SuffixDrafter(SpeculativeConfig.from_dict({"method": "suffix", **knobs}))


def drafted(drafter: Drafter, owner: Sequence, limit: int = 8) -> list[int]:
    assert drafter.observe(owner)
    return list(drafter.propose(owner, limit))


# ---- n-gram ------------------------------------------------------------------------------------


# speculative.md section 4
@pytest.mark.parametrize(
    ("text", "low", "high", "limit", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 7, 5, 1, 2, 3], 2, 3, 3, [9, 1, 2]),
        ([5, 5, 5, 5], 1, 3, 2, [5]),
        ([1, 2, 3, 4], 1, 3, 2, []),
        ([8, 1, 2, 4, 1, 2], 2, 4, 4, [4, 1, 2]),
    ],
)
def test_vectors(text: list[int], low: int, high: int, limit: int, expected: list[int]) -> None:
    drafter = ngram(prompt_lookup_min=low, prompt_lookup_max=high)
    assert drafted(drafter, sequence("a", text), limit) == expected


def test_which_occurrence_is_continued() -> None:
    text = [1, 2, 8, 1, 2, 9, 1, 2]
    knobs = {"prompt_lookup_min": 2}
    assert drafted(ngram(**knobs), sequence("a", text), 1) == [8]
    latest = ngram(**knobs, prompt_lookup_occurrence="latest")
    assert drafted(latest, sequence("a", text), 1) == [9]


def looked_up(text: list[int], low: int, high: int, limit: int, latest: bool) -> list[int]:
    for n in range(high, low - 1, -1):
        starts = [s for s in range(len(text) - n) if text[s : s + n] == text[len(text) - n :]]
        if n <= len(text) and starts:
            start = starts[-1] if latest else starts[0]
            return text[start + n : start + n + limit]
    return []


@given(few_ids, st.integers(1, 3), st.integers(0, 2), st.integers(1, 5), st.booleans())
def test_lookup_equals_a_search_after_every_id(
    text: list[int], low: int, more: int, limit: int, latest: bool
) -> None:
    index = NGramIndex(low, low + more, takes_latest=latest)
    for stop in range(len(text)):
        index.extend(text[stop : stop + 1])
        known = text[: stop + 1]
        assert index.follow(limit) == looked_up(known, low, low + more, limit, latest)


# ---- suffix tree -------------------------------------------------------------------------------


def best_draft(
    text: list[int],
    corpus: list[list[int]],
    depth: int,
    limit: int,
    factor: float,
    least: float,
) -> tuple[list[int], float]:
    """The draft after ``text`` from all runs of the corpus, by counting them one by one."""
    counts = Counter(
        tuple(document[start : start + length])
        for document in corpus
        for start in range(len(document))
        for length in range(1, min(depth, len(document) - start) + 1)
    )
    best: tuple[list[int], float] = ([], 0.0)
    for length in range(min(depth - 1, len(text)), 0, -1):
        run = tuple(text[len(text) - length :])
        ids: list[int] = []
        probability, score = 1.0, 0.0
        for _ in range(min(limit, int(factor * length), depth - length)):
            after = {id: counts[(*run, id)] for id in range(4) if counts[(*run, id)]}
            if not after:
                break
            id = min(after, key=lambda id: (-after[id], id))
            probability *= after[id] / sum(after.values())
            if probability < least:
                break
            ids.append(id)
            score += probability
            run = (*run, id)
        if score > best[1] + 1e-12:
            best = (ids, score)
    return best


knobs = st.tuples(
    st.integers(2, 6),
    st.integers(1, 5),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.3, 0.6]),
)


@given(few_ids, knobs)
def test_growing_text_drafts_as_counting_says(
    text: list[int], knobs: tuple[int, int, float, float]
) -> None:
    depth, limit, factor, least = knobs
    tree = SuffixTree(depth)
    tree.begin()
    for stop, id in enumerate(text, start=1):
        tree.append(id)
        known = text[:stop]
        ids, score = best_draft(known, [known], depth, limit, factor, least)
        found = tree.follow_growing(limit, factor, least)
        assert found.score == pytest.approx(score, abs=1e-12)
        assert found.ids == ids


@settings(deadline=None)
@given(st.lists(few_ids, max_size=5), few_ids, knobs, st.integers(0, 4))
def test_finished_texts_draft_as_counting_says_also_after_some_are_gone(
    corpus: list[list[int]],
    text: list[int],
    knobs: tuple[int, int, float, float],
    num_removed: int,
) -> None:
    depth, limit, factor, least = knobs
    tree = SuffixTree(depth)
    for document in corpus:
        tree.begin()
        for id in document:
            tree.append(id)
    tree.begin()
    for document in corpus[:num_removed]:
        tree.remove(document)
    kept = corpus[num_removed:]
    ids, score = best_draft(text, kept, depth, limit, factor, least)
    found = tree.follow(text, limit, factor, least)
    assert found.score == pytest.approx(score, abs=1e-12)
    assert found.ids == ids
    for document in kept:
        tree.remove(document)
    assert not tree._root.children


def test_what_does_not_repeat_is_not_built_out() -> None:
    tree = SuffixTree(24)
    tree.begin()
    for id in range(1000):
        tree.append(id)
    assert all(isinstance(child, tuple) for child in tree._root.children.values())


# ---- suffix drafting ---------------------------------------------------------------------------


def test_a_draft_is_no_longer_than_its_match_allows() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert drafted(suffix(), sequence("a", text)) == [4, 5, 6]
    longer = suffix(suffix_decoding_max_spec_factor=2.0)
    assert drafted(longer, sequence("a", text)) == [4, 5, 6, 7, 8, 9]
    shallow = suffix(suffix_decoding_max_tree_depth=4)
    # two matched ids and two drafted ones are as good as three and one would be worse
    assert drafted(shallow, sequence("a", text)) == [4, 5]


def test_a_draft_ends_where_it_becomes_unlikely() -> None:
    text = [1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 5, 9, 1, 2]
    assert drafted(suffix(suffix_decoding_min_token_prob=0.3), sequence("a", text), 1) == [3]
    assert drafted(suffix(suffix_decoding_min_token_prob=0.4), sequence("a", text), 1) == []


def test_finished_answers_serve_later_requests() -> None:
    drafter = suffix(suffix_decoding_max_cached_requests=2)
    prompt, answer = [50, 51], [1, 2, 3, 4, 5, 6]
    asker = sequence("b", [9, 1, 2, 3])
    done = sequence("a", prompt, answer)
    drafter.observe(done)
    assert drafted(drafter, asker) == []
    drafter.forget(done, has_ended_well=True)
    assert drafted(drafter, asker) == [4, 5, 6]
    # of prompts nothing is remembered
    assert drafted(drafter, sequence("c", [50])) == []
    drafter.forget(sequence("d", [1], [7, 7]), has_ended_well=True)
    assert drafted(drafter, asker) == [4, 5, 6]
    # a third answer drops the oldest
    drafter.forget(sequence("e", [1], [7, 7]), has_ended_well=True)
    assert drafted(drafter, asker) == []


def test_long_answers_are_learned_in_pieces_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonlet.engine.speculative.suffix.LEARNED_PER_CALL", 4)
    monkeypatch.setattr("moonlet.engine.speculative.suffix.MAX_REMEMBERED_IDS", 8)
    drafter = suffix()
    drafter.forget(sequence("a", [0], range(20)), has_ended_well=True)
    early, middle = sequence("b", [10, 11]), sequence("c", [13, 14])
    # of 12 to 19 the first four ids are known, then all
    assert drafted(drafter, middle) == [15]
    assert drafted(drafter, middle) == [15, 16]
    assert drafted(drafter, early) == []


@pytest.mark.parametrize(
    ("cached", "ends_well"), [(0, True), (5, False)], ids=["none cached", "failed"]
)
def test_answers_that_are_not_remembered(cached: int, ends_well: bool) -> None:
    drafter = suffix(suffix_decoding_max_cached_requests=cached)
    drafter.forget(sequence("a", [0], [1, 2, 3, 4]), has_ended_well=ends_well)
    assert drafted(drafter, sequence("b", [1, 2])) == []


def test_answers_stay_inside_their_tenant() -> None:
    config = SpeculativeConfig.from_dict({"method": "suffix"})
    drafter = SuffixDrafter(config, tenant_of=lambda owner: owner.request_id[0])
    drafter.forget(sequence("a1", [0], [1, 2, 3, 4]), has_ended_well=True)
    assert drafted(drafter, sequence("b2", [1, 2])) == []
    assert drafted(drafter, sequence("a2", [1, 2])) == [3, 4]


def test_tenants_that_came_first_are_dropped_when_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moonlet.engine.speculative.suffix.MAX_TENANTS", 2)
    config = SpeculativeConfig.from_dict({"method": "suffix"})
    drafter = SuffixDrafter(config, tenant_of=lambda owner: owner.request_id[0])
    for name in "abc":
        drafter.forget(sequence(name, [0], [1, 2, 3, 4]), has_ended_well=True)
    assert drafted(drafter, sequence("a", [1, 2])) == []
    assert drafted(drafter, sequence("c", [1, 2])) == [3, 4]


# ---- both --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ngram, suffix])
def test_a_long_prompt_is_taken_over_in_pieces(make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make()
    monkeypatch.setattr(sys.modules[type(drafter).__module__], "IDS_PER_CALL", 10)
    text = [*range(10), *range(10), *range(9)]
    owner = sequence("a", text)
    assert [drafter.observe(owner) for _ in range(3)] == [False, False, True]
    assert drafter.propose(owner, 2) == [9, 0]
    owner.output_ids.append(9)
    assert drafted(drafter, owner, 2) == [0, 1]
    assert drafter.tracked() == {"a"}
    drafter.forget(owner, has_ended_well=False)
    assert drafter.tracked() == set()


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=120),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.booleans(),
)
def test_ids_may_enter_many_at_a_time(text: list[int], sizes: list[int], latest: bool) -> None:
    pieces = NGramIndex(2, 4, takes_latest=latest)
    single = NGramIndex(2, 4, takes_latest=latest)
    start = 0
    for size in sizes * 20:
        piece = text[start : start + size]
        pieces.extend(piece)
        for id in piece:
            single.extend([id])
        assert pieces.follow(6) == single.follow(6)
        start += size
    assert pieces._ends == single._ends


def test_outputs_that_nobody_enters_are_bounded() -> None:
    drafter = suffix(suffix_decoding_max_cached_requests=3)
    for i in range(50):
        drafter.forget(sequence(f"r{i}", [0], [i, i + 1]), has_ended_well=True)
    assert [len(kept._pending) for kept in drafter._remembered.values()] == [4]
    # the first, which may be half entered, and the newest ones
    assert [ids[0] for ids in drafter._remembered[None]._pending] == [0, 47, 48, 49]
