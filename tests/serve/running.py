"""A real server for tests: uvicorn in a thread on a loopback port, a scripted model behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from moonlet.chat import Tokenizer
from moonlet.engine import Engine
from moonlet.engine.memory import MemoryOptions
from moonlet.engine.runner import EngineModel
from moonlet.serve import ServeConfig, create_app
from moonlet.serve.server import Server, bind
from moonlet.testing import ByteTokenizer, ScriptedModel, reply_with
from tests.patience import PATIENCE_S

TOKENIZER = ByteTokenizer()
MODEL = "scripted"
END = TOKENIZER.special_ids.end_of_msg
USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def ids_of(text: str) -> list[int]:
    """Ids of generated text, control names as control ids."""
    return TOKENIZER.encode(text, allow_special=True)


def answer(reasoning: str, content: str, calls: str = "") -> list[int]:
    """Ids of a well-formed answer after the thinking prefix, without the stop id."""
    tools = f"<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>" if calls else ""
    return ids_of(
        f"{reasoning}<|close|>think<|sep|><|open|>response<|sep|>{content}"
        f"<|close|>response<|sep|>{tools}<|close|>message<|sep|>"
    )


def call(name: str, index: int = 1, **arguments: str) -> str:
    """XTML of one call with string arguments."""
    inner = "".join(
        f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{inner}<|close|>call<|sep|>'


def prompt_text(prompt: Any) -> str:
    """What a script was prompted with, control names spelled out."""
    return TOKENIZER.decode(prompt)


@dataclass(slots=True)
class Running:
    """A server that answers requests."""

    url: str
    engine: Engine
    server: Server
    model: Any
    http: httpx2.Client

    def client(self, key: str = "none") -> openai.OpenAI:
        """Official SDK client, without retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        """Send JSON, or raw bytes given as ``content``."""
        if body is not None:
            options["json"] = body
        return self.http.post(path, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """Fetch a path."""
        return self.http.get(path, **options)

    def chat(self, **fields: Any) -> httpx2.Response:
        """Send a chat request with defaults for what is not given."""
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": USER, **fields})

    def frames(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
        """Stream a request and return its parsed frames; ``[DONE]`` stays a string."""
        body = {"model": MODEL, "stream": True, **fields}
        if "prompt" not in body:
            body.setdefault("messages", USER)
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return parse_frames(response.content)


def error_of(response: httpx2.Response, status: int = 400) -> dict[str, Any]:
    """Check that a response is an error of that status in the one shape; return its fields."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code", "param"}
    assert body["error"]["message"]
    return body["error"]


def parse_frames(raw: bytes) -> list[Any]:
    """Parse an event stream strictly: only data frames, each ended by one empty line."""
    assert raw.endswith(b"\n\n")
    frames: list[Any] = []
    for part in raw[:-2].split(b"\n\n"):
        assert part.startswith(b"data: ")
        assert b"\n" not in part
        data = part.removeprefix(b"data: ")
        frames.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return frames


@contextmanager
def serving(
    model: EngineModel | list[int] | Callable[[Any], list[int]],
    *,
    tokenizer: Tokenizer = TOKENIZER,
    max_num_seqs: int = 64,
    max_model_len: int = 2048,
    **settings: Any,
) -> Iterator[Running]:
    """Serve a model, or a script that always answers with the given ids."""
    if isinstance(model, list) or (callable(model) and not hasattr(model, "forward")):
        model = ScriptedModel(reply_with(model, END))
    engine = Engine(
        model,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        stop_ids=tokenizer.stop_ids,
        # a scripted model keeps its history beside the state, so it cannot resume a prefix
        memory=MemoryOptions(prefix_caching=not isinstance(model, ScriptedModel)),
    )
    config = ServeConfig(
        **{"model_names": (MODEL, "alias"), "max_model_len": max_model_len, **settings}
    )
    is_up = threading.Event()
    server = Server(create_app(engine, tokenizer, config), drain_timeout_s=60, on_started=is_up.set)
    with engine, bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run_until_exit, args=(bound,))
        thread.start()
        assert is_up.wait(PATIENCE_S)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            with httpx2.Client(
                base_url=url, trust_env=False, verify=False, timeout=PATIENCE_S
            ) as http:
                yield Running(url, engine, server, model, http)
        finally:
            server.should_exit = True
            thread.join()
