"""Each flag of ``moonlet serve``: two values, two behaviours; refusals before anything loads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moonlet.cli.main import run
from moonlet.engine import Engine, EngineRequest, SamplingParams
from moonlet.serve.server import Server
from moonlet.serve.service import Service
from tests.cli.checkpoints import write_checkpoint

Started = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-k3")


@dataclass(slots=True)
class Seen:
    """What a started command would have served."""

    service: Service
    address: tuple[str, int]
    server: Server

    @property
    def engine(self) -> Engine:
        return self.service.engine


@pytest.fixture
def started(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Run the command up to the point where it would answer, and look at what it built."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    num_threads = torch.get_num_threads()

    def start(*flags: str, look: Callable[[Seen], Any]) -> Any:
        results: list[Any] = []

        def run_until_exit(server: Server, bound: Any) -> bool:
            results.append(look(Seen(server._service, bound.getsockname(), server)))
            return False

        monkeypatch.setattr(Server, "run_until_exit", run_until_exit)
        port = () if "--port" in flags else ("--port", "0")
        assert run(["serve", str(checkpoint), *port, *flags]) == 0
        return results[0]

    yield start
    torch.set_num_threads(num_threads)


def _prefill_calls(seen: Seen) -> int:
    sampling = SamplingParams(max_tokens=1)
    seen.engine.submit(
        EngineRequest(request_id="r", prompt_ids=[65] * 200, sampling=sampling)
    ).result()
    return seen.engine.stats().num_forward_calls


def test_max_model_len_bounds_a_request(started: Started) -> None:
    def limits(seen: Seen) -> tuple[int, int]:
        return seen.engine.limits.max_model_len, seen.service.config.max_model_len

    assert started(look=limits) == (4096, 4096)
    assert started("--max-model-len", "100", look=limits) == (100, 100)


def test_max_num_seqs_sizes_the_slots_and_the_places(started: Started) -> None:
    def sizes(seen: Seen) -> tuple[int, int]:
        return seen.engine.limits.max_num_seqs, seen.service.config.max_requests

    assert started("--max-num-seqs", "2", look=sizes) == (2, 2 + 256)
    assert started("--max-num-seqs", "3", "--max-queue", "5", look=sizes) == (3, 3 + 5)


def test_max_num_batched_tokens_cuts_prompts(started: Started) -> None:
    # with prefix caching chunks also end where a state is kept
    whole = ("--no-enable-prefix-caching",)
    assert started(*whole, look=_prefill_calls) == 1
    assert started(*whole, "--max-num-batched-tokens", "64", look=_prefill_calls) == 4
    assert started(look=_prefill_calls) == 2


def test_a_draft_model_is_said_not_to_be_built(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    config = '{"method":"dspark","num_speculative_tokens":7}'
    assert started("--speculative-config", config, look=lambda s: s.engine._speculation) is None
    assert "--speculative-config: not needed, dspark is not built" in capsys.readouterr().err


def test_memory_flags_size_the_cache(started: Started) -> None:
    def sizes(seen: Seen) -> tuple[int, int, int, int]:
        cache = seen.engine._manager.cache
        stats = seen.engine.stats()
        return cache.page_size, cache.unit_size, stats.num_pages, stats.num_slots

    flags = ("--max-num-seqs", "2", "--block-size", "32", "--prefix-match-unit", "16")
    assert started(*flags, "--num-pages", "300", "--num-checkpoints", "5", look=sizes) == (
        32,
        16,
        300,
        7,
    )
    assert started("--max-num-seqs", "2", "--num-pages", "17", look=sizes)[:3] == (256, 64, 17)


def test_prefix_caching_can_be_switched_off(started: Started) -> None:
    def shares(seen: Seen) -> bool:
        return seen.engine._manager.is_sharing

    assert started(look=shares)
    assert not started("--no-enable-prefix-caching", look=shares)


def test_a_cache_directory_is_opened(started: Started, tmp_path: Path) -> None:
    def budgets(seen: Seen) -> tuple[int, int] | None:
        writeback = seen.engine._writeback
        if writeback is None:
            return None
        stats = writeback.pool.stats()
        return stats.host_budget_bytes, stats.disk_budget_bytes

    assert started(look=budgets) is None
    place = str(tmp_path / "cache")
    assert started("--cache-directory", place, look=budgets) == (0, 16 << 30)
    flags = ("--cache-disk-gib", "0.5", "--cache-host-gib", "0.25")
    assert started("--cache-directory", place, *flags, look=budgets) == (1 << 28, 1 << 29)


def test_a_fingerprint_tells_trainings_apart(tmp_path: Path) -> None:
    from moonlet.serve.loading import EngineOptions, _fingerprint

    options = EngineOptions()
    file = tmp_path / "model.safetensors"
    content = bytearray(3 << 20)
    file.write_bytes(content)
    first = _fingerprint(tmp_path, options)
    assert _fingerprint(tmp_path, options) == first
    int8 = _fingerprint(tmp_path, EngineOptions(trunk="int8"))
    assert int8 != first
    # inputs in int8 make another model, whose states no other may continue
    coded = EngineOptions(trunk="int8", trunk_activation="int8")
    assert _fingerprint(tmp_path, coded) not in (first, int8)
    for place in (0, len(content) // 2, len(content) - (1 << 14)):
        # values differ everywhere between two trainings; here within 16 KiB
        file.write_bytes(content[:place] + b"x" * (1 << 14)
                         + content[place + (1 << 14) :])  # fmt: skip
        assert _fingerprint(tmp_path, options) != first


def test_priority_classes_are_those_given(started: Started) -> None:
    def names(seen: Seen) -> list[str]:
        return [known.name for known in seen.engine.limits.classes]

    assert started(look=names) == ["default"]
    text = '[{"name":"chat","max_prompt_tokens":99},{"name":"long"}]'
    assert started("--priority-classes", text, look=names) == ["chat", "long"]


def test_served_model_name_replaces_the_folder_name(started: Started, checkpoint: Path) -> None:
    def names(seen: Seen) -> tuple[str, ...]:
        return seen.service.config.model_names

    assert started(look=names) == ("tiny-k3", str(checkpoint))
    assert started("--served-model-name", "a", "b", look=names) == ("a", "b")


def test_host_and_port_choose_the_address(started: Started) -> None:
    host, port = started(look=lambda seen: seen.address)
    assert host == "127.0.0.1"
    other, _ = started("--host", "127.0.0.2", look=lambda seen: seen.address)
    assert other == "127.0.0.2"
    assert started("--port", str(port), look=lambda seen: seen.address) == (host, port)


def test_other_machines_need_a_key_or_consent(
    started: Started, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_to(seen: Seen) -> tuple[str, int]:
        return seen.address[0], len(seen.service.config.api_key_hashes)

    for host in ("0.0.0.0", "::"):
        assert run(["serve", str(checkpoint), "--port", "0", "--host", host]) == 2
        assert "--api-key" in capsys.readouterr().err
    assert started("--host", "0.0.0.0", "--insecure", look=open_to) == ("0.0.0.0", 0)
    keys = ("--api-key", "one", "--api-key", "two")
    assert started("--host", "0.0.0.0", *keys, look=open_to) == ("0.0.0.0", 2)


def test_no_key_is_kept_in_plain(started: Started) -> None:
    assert "secret-key" not in repr(
        started("--api-key", "secret-key", look=lambda seen: seen.service.config)
    )


def test_dtype_is_that_of_the_weights(started: Started) -> None:
    def dtype(seen: Seen) -> Any:
        return seen.engine._runner.model.dtype

    assert started(look=dtype) == torch.float32
    assert started("--dtype", "bfloat16", look=dtype) == torch.bfloat16


def test_threads_bound_torch(started: Started) -> None:
    assert started("--threads", "1", look=lambda seen: torch.get_num_threads()) == 1
    assert started("--threads", "2", look=lambda seen: torch.get_num_threads()) == 2


def test_effort_fallback_and_tool_stream_reach_the_handlers(started: Started) -> None:
    def settings(seen: Seen) -> tuple[str, str]:
        return seen.service.config.effort_fallback, seen.service.config.tool_stream

    assert started(look=settings) == ("error", "incremental")
    flags = ("--effort-fallback", "nearest", "--tool-stream", "atomic")
    assert started(*flags, look=settings) == ("nearest", "atomic")


def test_drain_timeout_is_the_servers(started: Started) -> None:
    def timeout(seen: Seen) -> Any:
        return seen.server.config.timeout_graceful_shutdown

    assert started(look=timeout) == 30
    assert started("--drain-timeout", "3", look=timeout) == 3


def test_generation_config_decides_the_defaults(started: Started) -> None:
    assert started(look=lambda seen: seen.service.config.defaults.temperature) == 0.0


def test_a_length_beyond_the_checkpoint_is_said_and_lowered(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    length = started("--max-model-len", "1048576", look=lambda s: s.engine.limits.max_model_len)
    assert length == 4096
    assert "--max-model-len 1048576" in capsys.readouterr().err


def test_speculative_config_makes_the_engine_draft(started: Started) -> None:
    def drafts(seen: Seen) -> int:
        sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        prompt = [65, 66, 67, 68] * 20
        seen.engine.submit(
            EngineRequest(request_id="r", prompt_ids=prompt, sampling=sampling)
        ).result()
        return seen.engine.stats().num_draft_tokens

    assert started(look=drafts) == 0
    config = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":1,"adaptive":false}'
    assert started("--speculative-config", config, look=drafts) > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--speculative-config", "{"), "not JSON"),
        (("--speculative-config", '{"method":"draft"}'), "method is 'draft'; choose"),
        (("--max-model-lne", "5"), "--max-model-len"),
        (("--port", "many"), "--port"),
        (("--port", "65536"), "--port is 65536"),
        (("--port", "-1"), "--port is -1"),
        (("--api-key", ""), "--api-key is empty"),
        (("--dtype", "int4"), "float32"),
        (("--max-num-seqs", "0"), "max_num_seqs"),
        (("--max-model-len", "1"), "max_model_len"),
        (("--max-num-batched-tokens", "2"), "max_num_batched_tokens"),
        (("--threads", "0"), "--threads"),
        (("--max-queue", "-1"), "--max-queue"),
        (("--drain-timeout", "-1"), "--drain-timeout"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--served-model-name", ""), "model names"),
        (("--tool-call-parser", "hermes"), "kimi_k3"),
        (("--reasoning-parser", "deepseek_r1"), "kimi_k3"),
        (("--headless",), "--headless"),
        (("--node-rank", "1"), "--node-rank"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_flags_are_one_line_and_exit_code_2(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    port = () if "--port" in flags else ("--port", "0")
    assert run(["serve", str(checkpoint), *port, *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("moonlet: ")
    assert words in error


def test_a_missing_checkpoint_and_a_taken_port_fail_early(
    started: Started, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "no/such/model"]) == 2
    assert "no/such/model" in capsys.readouterr().err

    def again(seen: Seen) -> int:
        return run(["serve", str(checkpoint), "--port", str(seen.address[1])])

    assert started(look=again) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_each_unneeded_flag_prints_one_line(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    started(look=lambda seen: None)
    assert "not needed" not in capsys.readouterr().err
    flags = (
        "--no-enable-cumem-allocator",
        "--kv-cache-dtype",
        "fp8",
        "--tool-call-parser",
        "kimi_k3",
    )
    started(*flags, look=lambda seen: None)
    lines = [line for line in capsys.readouterr().err.splitlines() if "not needed" in line]
    assert [line.split(":")[0] for line in lines] == [
        "--kv-cache-dtype",
        "--no-enable-cumem-allocator",
        "--tool-call-parser",
    ]


def test_stop_ids_of_all_files_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moonlet.serve.loading import EngineOptions, load_engine

    directory = write_checkpoint(
        tmp_path / "m", generation_config={"eos_token_id": [300], "do_sample": False}
    )
    loaded = load_engine(directory, EngineOptions())
    with loaded.engine as engine:
        assert {300, 258} | loaded.tokenizer.stop_ids == engine.stop_ids
        assert loaded.defaults.temperature == 0.0
