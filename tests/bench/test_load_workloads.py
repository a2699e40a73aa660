import itertools
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonlet.bench.load.lengths import Lengths
from moonlet.bench.load.replay import Recorded, read_log
from moonlet.bench.load.sessions import Session, make_sessions, poisson, replayed
from moonlet.bench.load.settings import LoadSettings
from moonlet.bench.load.text import TextSource
from moonlet.chat import Tokenizer
from moonlet.cli.models import model_directory
from moonlet.core.errors import CheckpointError, ConfigError
from tests.cli.checkpoints import write_checkpoint


def sessions(num: int, fields: dict[str, Any] | None = None, **settings: Any) -> list[Session]:
    resolved = LoadSettings(**settings).resolved()
    made = make_sessions(resolved, TextSource(resolved.tokenizer), fields or {})
    return list(itertools.islice(made, num))


def body_of(session: Session, turn: int = 0) -> dict[str, Any]:
    return json.loads(session.prepare(turn).body)


def first_bodies(num: int, **settings: Any) -> list[dict[str, Any]]:
    return [body_of(session) for session in sessions(num, **settings)]


def words(text: str) -> int:
    return len(text.split())


# ---- lengths and text ---------------------------------------------------------------------------


def test_lengths_follow_their_distribution() -> None:
    rng = random.Random(1)
    fixed = Lengths.parse("7", "--x")
    assert {fixed.draw(rng) for _ in range(20)} == {7}
    uniform = Lengths.parse("uniform:3,6", "--x")
    assert {uniform.draw(rng) for _ in range(200)} == {3, 4, 5, 6}
    lognormal = Lengths.parse("lognormal:100,0.5", "--x")
    drawn = sorted(lognormal.draw(rng) for _ in range(4000))
    assert statistics.median(drawn) == pytest.approx(100, rel=0.05)
    # one sigma above the median is its exp(sigma)-fold
    assert drawn[int(0.841 * len(drawn))] == pytest.approx(165, rel=0.07)
    capped = Lengths.parse("lognormal:100,0.5,120", "--x")
    assert max(capped.draw(rng) for _ in range(500)) == 120
    assert min(Lengths.parse("lognormal:1,3", "--x").draw(rng) for _ in range(500)) == 1


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "0",
            "-3",
            "1.5",
            "many",
            "1,2",
            "uniform:5",
            "uniform:6,3",
            "uniform:0,3",
            "gamma:2",
        ),
        *("lognormal:5", "lognormal:0,1", "lognormal:5,-1", "lognormal:5,nan", "lognormal:5,1,0"),
        *("lognormal:inf,1", "lognormal:5,inf", "fixed:1,2", "uniform:1,2,3", "lognormal:5,1,9,9"),
    ],
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-len is .*; give N, uniform:LOW,HIGH or"):
        Lengths.parse(text, "--prompt-len")


def test_text_has_the_wanted_number_of_words() -> None:
    source = TextSource()
    assert source.unit == "words"
    for length in (1, 2, 50):
        assert words(source.text(random.Random(0), length)) == length
    assert source.text(random.Random(0), 9) == source.text(random.Random(0), 9)
    assert source.text(random.Random(0), 9) != source.text(random.Random(1), 9)


def test_text_has_the_wanted_number_of_tokens_of_a_vocabulary() -> None:
    directory = model_directory(None)
    source, tokenizer = TextSource(directory), Tokenizer.from_dir(directory)
    assert source.unit == "tokens"
    rng = random.Random(0)
    for length in (1, 2, 3, 100, 1000):
        assert len(tokenizer.encode(source.text(rng, length))) == length


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 0 whole words"):
        TextSource(write_checkpoint(tmp_path / "bytes"))
    with pytest.raises(CheckpointError, match="no vocabulary"):
        TextSource(tmp_path)


# ---- workloads ----------------------------------------------------------------------------------


def test_random_prompts_have_nothing_in_common() -> None:
    bodies = first_bodies(20, prompt_len="uniform:5,9", output_len="uniform:2,4")
    contents = [body["messages"][0]["content"] for body in bodies]
    assert all([m["role"] for m in body["messages"]] == ["user"] for body in bodies)
    assert {words(content) for content in contents} == {5, 6, 7, 8, 9}
    assert {body["max_tokens"] for body in bodies} == {2, 3, 4}
    assert len({content.split()[0] + content.split()[1] for content in contents}) > 15
    assert all(body["stream"] and body["stream_options"]["include_usage"] for body in bodies)
    assert all("ignore_eos" not in body for body in bodies)
    assert first_bodies(1, ignore_eos=True)[0]["ignore_eos"] is True


def test_groups_share_their_prefix() -> None:
    bodies = first_bodies(9, workload="shared-prefix", groups=3, prefix_len=40, prompt_len="6")
    systems = [body["messages"][0] for body in bodies]
    assert all(system["role"] == "system" for system in systems)
    texts = [system["content"] for system in systems]
    assert texts == texts[:3] * 3
    assert len(set(texts)) == 3
    assert {words(text) for text in texts} == {40}
    suffixes = [body["messages"][1]["content"] for body in bodies]
    assert len(set(suffixes)) == 9
    assert {words(suffix) for suffix in suffixes} == {6}


def test_a_conversation_sends_back_what_the_server_said() -> None:
    session, other = sessions(9, workload="multi-turn", sessions=2, turns=3, prompt_len="4")
    assert session.num_turns == 3
    history: list[dict[str, Any]] = []
    for turn in range(3):
        messages = body_of(session, turn)["messages"]
        assert messages[:-1] == history
        assert messages[-1]["role"] == "user"
        assert words(messages[-1]["content"]) == 4
        reply = {"role": "assistant", "content": f"said {turn}", "reasoning_content": "hm"}
        session.add_reply(reply)
        history = [*messages, reply]
    assert body_of(other)["messages"] != history[:1]


def test_an_agents_history_grows_by_tool_results() -> None:
    (agent,) = sessions(9, workload="agent", turns=20, prompt_len="50", result_len="3")
    sizes = []
    for turn in range(20):
        prepared = json.loads(agent.prepare(turn).body)
        sizes.append(len(prepared["messages"]))
        assert words(prepared["messages"][-1]["content"]) == (3 if turn else 50)
        agent.add_reply({"role": "assistant", "content": "next"})
    assert sizes == list(range(1, 40, 2))
    assert sessions(9, workload="agent")[0].num_turns == 300


def test_called_tools_get_a_result_each() -> None:
    (agent,) = sessions(1, workload="agent", turns=3)
    agent.prepare(0)
    calls = [{"id": f"lookup_{n}", "type": "function", "function": {}} for n in range(2)]
    agent.add_reply({"role": "assistant", "content": "", "tool_calls": calls})
    *_, first, second = body_of(agent, 1)["messages"]
    assert (first["role"], second["role"]) == ("tool", "tool")
    assert [first["tool_call_id"], second["tool_call_id"]] == ["lookup_0", "lookup_1"]
    agent.add_reply({"role": "assistant", "content": "done"})
    assert body_of(agent, 2)["messages"][-1]["role"] == "user"


@pytest.mark.parametrize("workload", ["random", "shared-prefix", "multi-turn", "agent"])
def test_a_seed_is_a_workload(workload: str) -> None:
    def texts(**settings: Any) -> list[dict[str, Any]]:
        return first_bodies(8, workload=workload, prompt_len="uniform:20,60", **settings)

    assert texts(seed=3) == texts(seed=3)
    assert texts(seed=3) != texts(seed=4)
    assert texts() == texts(seed=0)


def test_a_session_does_not_depend_on_the_ones_before() -> None:
    in_order = first_bodies(5, workload="multi-turn")
    backwards = [body_of(session) for session in sessions(5, workload="multi-turn")[::-1]]
    assert in_order == backwards[::-1]


def test_fields_go_into_every_body() -> None:
    (session,) = sessions(1, {"model": "m", "stream": False, "top_p": 0.5})
    body = body_of(session)
    assert (body["model"], body["stream"], body["top_p"]) == ("m", False, 0.5)


# ---- times --------------------------------------------------------------------------------------


def test_poisson_times_have_the_rate_and_the_seed() -> None:
    def times(rate: float, seed: int) -> list[float]:
        many = make_sessions(LoadSettings().resolved(), TextSource(), {})
        return [at_s for at_s, _ in itertools.islice(poisson(many, rate, seed), 2000)]

    found = times(4.0, 1)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert found == times(4.0, 1) != times(4.0, 2)
    assert times(8.0, 1) == pytest.approx([at_s / 2 for at_s in found])
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.06)
    # what makes them Poisson: gaps spread as widely as they are long
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


def write_log(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def test_a_log_is_replayed_in_the_order_of_time(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "log.jsonl",
        {"timestamp": 1012.5, "body": chat("third"), "key": "ignored"},
        {"timestamp": 1000, "body": chat("first")},
        {"timestamp": 1002, "body": {"model": "m", "prompt": "second"}},
        {"timestamp": 1012.5, "body": chat("fourth")},
    )
    log.write_text(log.read_text() + "\n")
    assert [at_s for at_s, _ in read_log(log)] == [0.0, 2.0, 12.5, 12.5]
    assert [at_s for at_s, _ in read_log(log, speed=10.0)] == [0.0, 0.2, 1.25, 1.25]
    played = [session.prepare(0) for _, session in replayed(read_log(log), {})]
    assert [path for path, _ in played] == [
        "/chat/completions",
        "/completions",
        "/chat/completions",
        "/chat/completions",
    ]
    bodies = [json.loads(body) for _, body in played]
    assert bodies == [chat("first"), {"model": "m", "prompt": "second"}, *map(chat, THIRD_ON)]


THIRD_ON = ("third", "fourth")


def test_given_fields_replace_recorded_ones() -> None:
    ((at_s, session),) = replayed([Recorded(0.0, chat("a"))], {"model": "n", "seed": 1})
    assert at_s == 0.0
    assert body_of(session) == {**chat("a"), "model": "n", "seed": 1}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is no request; want"),
        ("[1]", "line 2 is no request; want"),
        ("{}", "line 2 is no request; want"),
        ('{"timestamp": 1}', "line 2 is no request; want"),
        ('{"timestamp": "1", "body": {"messages": []}}', "must be a number"),
        ('{"timestamp": true, "body": {"messages": []}}', "must be a number"),
        ('{"timestamp": NaN, "body": {"messages": []}}', "must be a number"),
        ('{"timestamp": 1, "body": {"model": "m"}}', "with messages or prompt"),
        ('{"timestamp": 1, "body": "messages"}', "with messages or prompt"),
    ],
)
def test_a_bad_line_of_a_log_is_named(tmp_path: Path, line: str, problem: str) -> None:
    log = write_log(tmp_path / "log.jsonl", {"timestamp": 1, "body": chat("a")})
    log.write_text(log.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=problem):
        read_log(log)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "cannot be read"),
        (lambda path: path.write_text("\n"), "has no requests"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read"),
    ],
)
def test_a_log_that_is_none_is_said(
    tmp_path: Path, make: Callable[[Path], object], problem: str
) -> None:
    make(tmp_path / "log")
    with pytest.raises(ConfigError, match=problem):
        read_log(tmp_path / "log")


# ---- settings -----------------------------------------------------------------------------------


def test_defaults_belong_to_the_workload() -> None:
    plain = LoadSettings().resolved()
    assert (plain.workload, plain.concurrency, plain.num_requests) == ("random", 1, 100)
    assert (plain.prompt_len, plain.output_len, plain.seed) == ("128", "64", 0)
    assert plain.resolved() == plain
    assert LoadSettings(duration=5.0).resolved().num_requests is None
    assert LoadSettings(rate=2.0).resolved().concurrency is None
    agent = LoadSettings(workload="agent", turns=7).resolved()
    assert (agent.sessions, agent.turns, agent.num_requests) == (1, 7, None)
    log = LoadSettings(replay=Path("log")).resolved()
    assert (log.speed, log.workload, log.concurrency, log.seed) == (1.0, None, None, None)
    assert log.resolved() == log
    assert json.loads(json.dumps(log.to_json()))["replay"] == "log"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"workload": "random", "replay": Path("l")}, "--workload and --replay both"),
        ({"rate": 1.0, "concurrency": 1}, "--rate and --concurrency both"),
        ({"replay": Path("l"), "rate": 1.0}, "--rate has no effect on replay"),
        ({"replay": Path("l"), "concurrency": 1}, "--concurrency has no effect on replay"),
        ({"replay": Path("l"), "prompt_len": "1"}, "--prompt-len has no effect on replay"),
        ({"replay": Path("l"), "seed": 1}, "--seed has no effect on replay"),
        ({"replay": Path("l"), "ignore_eos": True}, "--ignore-eos has no effect on replay"),
        ({"replay": Path("l"), "tokenizer": Path("t")}, "--tokenizer has no effect on replay"),
        ({"speed": 2.0}, "--speed has no effect on random"),
        ({"turns": 2}, "--turns has no effect on random"),
        ({"prefix_len": 2}, "--prefix-len has no effect on random"),
        ({"workload": "multi-turn", "groups": 2}, "--groups has no effect on multi-turn"),
        ({"workload": "multi-turn", "result_len": "2"}, "--result-len has no effect on multi"),
        ({"workload": "shared-prefix", "sessions": 2}, "--sessions has no effect on shared"),
        ({"rate": 0.0}, "--rate is 0.0; it must be above 0"),
        ({"rate": float("inf")}, "--rate is inf; it must be above 0"),
        ({"concurrency": 0}, "--concurrency is 0; it must be at least 1"),
        ({"num_requests": 0}, "--num-requests is 0"),
        ({"duration": -1.0}, "--duration is -1.0"),
        ({"timeout": 0.0}, "--timeout is 0.0"),
        ({"slo_ttft_ms": 0.0}, "--slo-ttft-ms is 0.0"),
        ({"slo_itl_ms": -1.0}, "--slo-itl-ms is -1.0"),
        ({"replay": Path("l"), "speed": 0.0}, "--speed is 0.0"),
        ({"workload": "shared-prefix", "groups": 0}, "--groups is 0"),
        ({"workload": "shared-prefix", "prefix_len": 0}, "--prefix-len is 0"),
        ({"workload": "agent", "sessions": 0}, "--sessions is 0"),
        ({"workload": "agent", "turns": 0}, "--turns is 0"),
        ({"workload": "agent", "result_len": "0"}, "--result-len is 0"),
        ({"prompt_len": "x"}, "--prompt-len is x"),
        ({"output_len": "x"}, "--output-len is x"),
        ({"retries": -1}, "--retries is -1"),
        ({"extra_body": "{"}, "give a JSON object"),
        ({"extra_body": "[1]"}, "give a JSON object"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LoadSettings(**settings).resolved()
