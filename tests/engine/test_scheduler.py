"""Scheduling: order, budgets, classes, preemption; every request ends."""

import ast
from pathlib import Path

import pytest

import moonlet.engine.scheduler as scheduler_module
from moonlet.core.errors import ConfigError, RequestError
from moonlet.engine.limits import PriorityClass, SchedulerLimits, parse_classes
from moonlet.engine.request import RequestState
from tests.engine.symbolic import SymbolicEngine


def prompt_of(name, length):
    """Prompts of different names share no unit."""
    return [ord(name), *([1] * (length - 1))]


def sizes(step):
    return [chunk.num_tokens for chunk in step.chunks]


def test_long_prompt_is_cut_while_others_decode():
    engine = SymbolicEngine(seqs=2, budget=5)
    engine.submit(prompt_of("a", 2), max_tokens=20)
    engine.step()
    engine.submit(prompt_of("b", 11), max_tokens=2)
    assert [sizes(engine.step()) for _ in range(4)] == [[1, 4], [1, 4], [1, 3], [1, 1]]


def test_several_prompts_share_a_step():
    engine = SymbolicEngine(seqs=4, budget=8)
    for name in "abc":
        engine.submit(prompt_of(name, 3), max_tokens=2)
    # two tokens are left, but they would end between endpoints
    assert sizes(engine.step()) == [3, 3]


def test_chunks_end_at_endpoints_where_another_prompt_runs_already():
    engine = SymbolicEngine(seqs=4, budget=6)
    engine.submit(prompt_of("a", 7), max_tokens=2)
    engine.submit(prompt_of("b", 6), max_tokens=2)
    assert [sizes(engine.step()) for _ in range(3)] == [[4], [3], [1, 4]]


def test_short_prompts_do_not_wait_for_long_ones():
    engine = SymbolicEngine(seqs=12, budget=16, num_pages=200)
    for name in "xy":
        engine.submit(prompt_of(name, 110))
    shorts = [engine.submit(prompt_of(name, 4)) for name in "abcdef"]
    for _ in range(3):
        engine.step()
    assert all(s.state is RequestState.FINISHED for s in shorts)
    engine.run()


def test_long_prompts_are_not_starved_by_short_ones():
    engine = SymbolicEngine(seqs=12, budget=16, num_pages=200)
    long = engine.submit(prompt_of("x", 100))
    for index in range(40):
        engine.submit([index % 90 + 5, 1, 1, 1, 1, 1, 1, index])
        engine.step()
    assert long.num_computed >= 40 * 4 - 4 or long.state.is_final


def test_two_prompts_that_fit_only_alone_both_finish():
    engine = SymbolicEngine(seqs=2, budget=8, num_pages=5, max_len=50)
    both = [engine.submit(prompt_of(name, 40), max_tokens=10) for name in "ab"]
    engine.run()
    assert [s.num_tokens for s in both] == [50, 50]


def test_growth_beyond_the_pool_preempts_the_youngest_and_all_finish():
    engine = SymbolicEngine(seqs=4, budget=16, num_pages=10, max_len=100)
    every = [engine.submit(prompt_of(name, 12), max_tokens=80) for name in "abcd"]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert every[0].num_preemptions == 0
    assert [s.num_tokens for s in every] == [92] * 4
    # a preempted request resumes at its own checkpoint, at most a unit and a chunk back
    assert all(s.num_cached_tokens % 4 == 0 for s in every if s.num_preemptions)


def test_fewer_are_admitted_after_a_preemption():
    engine = SymbolicEngine(seqs=4, budget=16, num_pages=10, max_len=100)
    for name in "abcd":
        engine.submit(prompt_of(name, 12), max_tokens=80)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert engine.scheduler.num_running == engine.scheduler._num_allowed < 4
    while engine.scheduler.num_waiting:
        engine.step()
    engine.run()


def test_small_request_does_not_overtake_a_big_one():
    engine = SymbolicEngine(seqs=3, budget=8, num_pages=5, max_len=60)
    engine.submit(prompt_of("a", 30), max_tokens=9)
    engine.submit(prompt_of("b", 40), max_tokens=9)
    engine.submit(prompt_of("c", 1), max_tokens=9)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 2)
    engine.run()


def test_classes_go_in_order_and_keep_their_budgets():
    classes = (
        PriorityClass(name="chat", max_prompt_tokens=20),
        PriorityClass(name="batch", max_seqs=1),
    )
    engine = SymbolicEngine(seqs=4, budget=64, classes=classes)
    slow = [engine.submit(prompt_of(name, 30), max_tokens=9) for name in "ab"]
    fast = [engine.submit(prompt_of(name, 10), max_tokens=9) for name in "cd"]
    named = engine.submit(prompt_of("e", 10), max_tokens=9, priority="batch")
    assert [s.rank for s in (*slow, *fast, named)] == [1, 1, 0, 0, 1]
    step = engine.step()
    assert [chunk.sequence for chunk in step.chunks] == [*fast, slow[0]]
    engine.run()


@pytest.mark.parametrize(
    ("budget", "running"), [({"max_tokens": 25}, 2), ({"max_pages": 2}, 2), ({}, 4)]
)
def test_class_budgets_hold_back_admission(budget, running):
    classes = (PriorityClass(name="only", **budget),)
    engine = SymbolicEngine(seqs=4, budget=64, classes=classes)
    for name in "abcd":
        engine.submit(prompt_of(name, 10), max_tokens=3)
    engine.step()
    assert engine.scheduler.num_running == running
    engine.run()


def test_unknown_classes_are_refused():
    limits = SchedulerLimits(
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=64,
        classes=(PriorityClass(name="a", max_prompt_tokens=10),),
    )
    assert limits.rank(None, 10) == limits.rank("a", 11) == 0
    with pytest.raises(RequestError, match="no priority class takes a prompt of 11"):
        limits.rank(None, 11)
    with pytest.raises(RequestError, match="priority is 'b'"):
        limits.rank("b", 1)


def test_classes_are_read_from_json():
    text = '[{"name": "chat", "max_prompt_tokens": 8}, {"name": "long", "max_seqs": null}]'
    assert parse_classes(text) == (
        PriorityClass(name="chat", max_prompt_tokens=8),
        PriorityClass(name="long"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not JSON"),
        ("{}", "must be a list"),
        ('[{"max_seqs": 1}]', "has no name"),
        ('[{"name": "a", "max_seq": 1}]', "'max_seq' is unknown"),
        ('[{"name": "a", "max_seqs": "1"}]', "max_seqs is '1'"),
        ('[{"name": 1}]', "name is 1; want text"),
        ('[{"name": "a", "max_pages": 0}]', "max_pages is 0"),
    ],
)
def test_wrong_classes_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_classes(text)


def test_nothing_to_do_gives_no_step():
    assert SymbolicEngine().scheduler.schedule() is None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"classes": ()}, "priority classes"),
        ({"classes": (PriorityClass(name="a"), PriorityClass(name="a"))}, "priority classes"),
    ],
)
def test_contradicting_limits_are_refused(limits, message):
    good = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
    with pytest.raises(ConfigError, match=message):
        SchedulerLimits(**{**good, **limits})
    with pytest.raises(ConfigError, match="max_seqs is 0"):
        PriorityClass(name="a", max_seqs=0)


def test_pools_that_cannot_hold_one_request_are_refused():
    with pytest.raises(ConfigError, match="cannot hold one request"):
        SymbolicEngine(num_pages=9)
    with pytest.raises(ConfigError, match="state slots"):
        SymbolicEngine(num_states=3)


@pytest.mark.parametrize(
    "file",
    ["scheduler", "step", "queues", "limits", "request", "stopping", "cache/blocks",
     "cache/chain", "cache/checkpoints", "cache/planner", "cache/prefix", "cache/manager"],
)  # fmt: skip
def test_bookkeeping_imports_no_torch(file):
    folder = Path(scheduler_module.__file__).parent
    tree = ast.parse((folder / f"{file}.py").read_text(encoding="utf-8"))
    names = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names
    heavy = ("torch", "numpy", "moonlet.model", "moonlet.kernels")
    assert not {name for name in names if name.startswith(heavy)}
