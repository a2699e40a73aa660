"""``moonlet serve`` as a process: K3's launch lines, the log, signals."""

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cli.checkpoints import Served, serve, write_checkpoint
from tests.patience import PATIENCE_S

# published shapes of K3 on vLLM, with `moonlet` for `vllm`
LAUNCH_LINES = {
    "8xB300": (
        "--tensor-parallel-size 8 --load-format fastsafetensors --max-model-len 1048576 "
        "--kv-cache-dtype fp8 --attention-config "
        '{"use_prefill_query_quantization":true,"mla_prefill_backend":"flashinfer"} '
        "--enable-prefix-caching --gpu-memory-utilization 0.95 --speculative-config "
        '{"method":"dspark","model":"Inferact/Kimi-K3-DSpark","num_speculative_tokens":7} '
        "--tool-call-parser kimi_k3 --enable-auto-tool-choice --reasoning-parser kimi_k3 "
        "--trust-remote-code --decode-context-parallel-size 8 --dcp-comm-backend a2a"
    ),
    "H200": (
        "--tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2 --node-rank 0 "
        "--master-addr 10.0.0.1 --master-port 29500 --enable-expert-parallel "
        "--moe-backend marlin --attention-backend FLASHMLA --gpu-memory-utilization 0.97 "
        "--max-num-seqs 5 --max-model-len 32768 --max-num-batched-tokens 4096 "
        "--no-enable-flashinfer-autotune --trust-remote-code --tool-call-parser kimi_k3 "
        "--enable-auto-tool-choice --reasoning-parser kimi_k3"
    ),
}
TAKES_EFFECT = (
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--enable-prefix-caching",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "Kimi-K3")


@pytest.mark.parametrize("shape", LAUNCH_LINES)
def test_launch_lines_of_the_vllm_recipe_start_and_answer(checkpoint: Path, shape: str) -> None:
    flags = LAUNCH_LINES[shape].split()
    with serve(str(checkpoint), *flags) as served:
        assert served.chat().status_code == 200
        for flag in flags:
            if flag.startswith("--") and flag not in TAKES_EFFECT:
                (line,) = [line for line in served.lines if line.startswith(flag)]
                assert "not needed" in line or "serving 4096" in line
        assert served.stop() == 0


def _stream(served: Served, max_tokens: int) -> Any:
    body = {
        "model": "Kimi-K3",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    url = served.url + "/v1/chat/completions"
    return httpx2.stream("POST", url, json=body, trust_env=False, timeout=PATIENCE_S)


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_ones(checkpoint: Path) -> None:
    with serve(str(checkpoint), "--log-level", "info") as served:
        with _stream(served, 60) as response:
            pieces = response.iter_raw()
            next(pieces)
            next(pieces)
            served.process.send_signal(signal.SIGTERM)
            rest = b"".join(pieces)
        assert rest.endswith(b"data: [DONE]\n\n")
        assert served.process.wait(PATIENCE_S) == 0
        with pytest.raises(httpx2.ConnectError):
            served.get("/health")
        assert served.process.stderr is not None
        log = served.process.stderr.read()
    request_id = response.headers["x-request-id"]
    (line,) = [line for line in log.splitlines() if request_id in line]
    assert "POST /v1/chat/completions -> 200" in line


def test_a_drain_ends_at_its_timeout(checkpoint: Path) -> None:
    with serve(str(checkpoint), "--drain-timeout", "1") as served:
        # far more tokens than one second allows
        with _stream(served, 3900) as response:
            pieces = response.iter_raw()
            next(pieces)
            assert served.stop(signal.SIGINT) == 0
            rest = b""
            with suppress(httpx2.RemoteProtocolError):
                for piece in pieces:
                    rest += piece
        assert b"[DONE]" not in rest
        assert served.process.stderr is not None
        # without --log-level info there is no line per request
        assert response.headers["x-request-id"] not in served.process.stderr.read()


def test_the_banner_gives_a_curl_line_that_works(checkpoint: Path) -> None:
    with serve(str(checkpoint), "--api-key", "secret") as served:
        (line,) = [line for line in served.lines if line.startswith("try: curl ")]
        url = line.split()[2]
        body = json.loads(line.split(" -d ")[1].strip("'"))
        headers = {"Authorization": "Bearer secret"}
        body["max_tokens"] = 4
        reply = httpx2.post(url, json=body, headers=headers, trust_env=False, timeout=PATIENCE_S)
        assert reply.status_code == 200
        assert "Authorization: Bearer KEY" in line
        assert "secret" not in "".join(served.lines)
        assert httpx2.post(url, json=body, trust_env=False, timeout=PATIENCE_S).status_code == 401
