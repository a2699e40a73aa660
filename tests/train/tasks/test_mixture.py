import json
from collections import Counter

import pytest

from moonlet.chat.render import render
from moonlet.train.tasks.mixture import EFFORTS, make_sample, samples
from moonlet.train.tasks.tokenizer_corpus import render_sample


def test_a_sample_is_a_pure_function_of_seed_index_and_progress():
    stream = samples(5, start=40, progress=0.5)
    for index in (40, 41, 42):
        assert next(stream) == make_sample(5, index, 0.5)
    assert make_sample(5, 40, 0.5) != make_sample(6, 40, 0.5)


def test_effort_shares_follow_the_recipe():
    count = 4000
    drawn = Counter(
        (s.thinking, s.thinking_effort) for s in (make_sample(2, i) for i in range(count))
    )
    for thinking, effort, _, weight in EFFORTS:
        assert drawn[thinking, effort] / count == pytest.approx(weight / 100, abs=0.03)


def test_every_family_occurs_and_early_samples_are_simpler():
    early = [make_sample(3, i, 0.0) for i in range(1500)]
    late = [make_sample(3, i, 1.0) for i in range(1500)]
    assert {t.task for s in late for t in s.turns} == {"arithmetic", "tools", "frame", "copy"}

    def copies(batch):
        return sum(t.task == "copy" for s in batch for t in s.turns)

    def num_tools(batch):
        counts = [len(s.tools) for s in batch if s.tools]
        return sum(counts) / len(counts)

    assert copies(early) > 3 * copies(late) > 0
    assert num_tools(early) < num_tools(late)


def _schema_type(value):
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {"number"} if isinstance(value, float) else {"string"}


def test_calls_fit_their_declaration_and_copy_from_the_prompt():
    seen = Counter()
    for index in range(1500):
        sample = make_sample(4, index)
        declared = {t["function"]["name"]: t["function"] for t in sample.tools or ()}
        assert len(declared) == len(sample.tools or ())
        for turn in sample.turns:
            for call in turn.expect.calls:
                parameters = declared[call.name]["parameters"]
                assert set(parameters.get("required", ())) <= call.arguments.keys()
                assert list(call.arguments) == sorted(call.arguments)
                for key, value in call.arguments.items():
                    schema = parameters["properties"][key]
                    assert schema["type"] in _schema_type(value)
                    assert value in schema.get("enum", [value])
                    if not isinstance(value, bool):
                        text = value if isinstance(value, str) else json.dumps(value)
                        assert text in turn.user
                    seen[type(value)] += 1
            for value in turn.expect.values:
                assert value in turn.expect.answer
    assert min(seen[t] for t in (str, int, float, bool)) > 50


def test_reasoning_is_present_exactly_in_thinking_mode():
    for index in range(400):
        sample = make_sample(9, index)
        replies = [m for m in sample.messages if m["role"] == "assistant"]
        assert all(("reasoning_content" in m) == sample.thinking for m in replies)


def test_prompts_of_one_conversation_render_as_prefixes_of_it():
    for index in range(60):
        sample = make_sample(11, index)
        whole = "".join(s.text for s in render_sample(sample))
        for at, message in enumerate(sample.messages):
            if message["role"] != "assistant":
                continue
            prompt = render(
                sample.messages[:at],
                sample.tools,
                thinking=sample.thinking,
                thinking_effort=sample.thinking_effort,
            )
            assert whole.startswith("".join(s.text for s in prompt))
