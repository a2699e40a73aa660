"""The shipped model: it is what its card says, through the same server that a user starts."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from moonlet.chat.tokenizer import Tokenizer
from moonlet.cli.models import model_directory
from moonlet.core.hf_config import read_config
from moonlet.engine.engine import Engine
from moonlet.train.nano import EngineGenerator
from moonlet.train.recipe import parse_recipe
from moonlet.train.tasks.evaluate import (
    EFFORTS,
    MAIN_FAMILIES,
    WANTED,
    WANTED_MARKUP,
    passes,
    run_items,
    summarize,
)
from moonlet.train.tasks.heldout import heldout_items
from moonlet.weights.checkpoint import Checkpoint, load_model
from moonlet.weights.writer import save_model
from tests.cli.checkpoints import Served, serve

DIRECTORY = model_directory(None)
REPORT = json.loads((DIRECTORY / "evaluation.json").read_text())
# what another processor's rounding of near ties may change
SLACK = 0.03
MAX_BYTES = 8_000_000
GET_TIDE = {
    "type": "function",
    "function": {
        "name": "get_tide",
        "description": "Get the tide level of a harbour.",
        "parameters": {
            "type": "object",
            "properties": {"harbour": {"type": "string", "description": "Name of the harbour"}},
            "required": ["harbour"],
        },
    },
}


@pytest.fixture(scope="module")
def generator() -> Iterator[EngineGenerator]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_dir(DIRECTORY)
    model = load_model(DIRECTORY).model
    with Engine(model, max_num_seqs=32, max_model_len=4096, stop_ids=tokenizer.stop_ids) as engine:
        yield EngineGenerator(engine)
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("family", MAIN_FAMILIES)
def test_held_out_accuracy_is_what_the_card_says(generator: EngineGenerator, family: str) -> None:
    tokenizer = Tokenizer.from_dir(DIRECTORY)
    said = REPORT["families"][family]
    items = heldout_items(family, REPORT["count"], seed=REPORT["seed"])
    summary = summarize(run_items(generator, tokenizer, items))
    assert summary["count"] == REPORT["count"] >= 100
    assert abs(summary["accuracy"] - said["accuracy"]) <= SLACK, summary["failures"]
    assert summary["accuracy"] >= WANTED[family] - SLACK
    assert summary["valid_and_stopped"] >= said["valid_and_stopped"] - SLACK
    card = (DIRECTORY / "README.md").read_text()
    assert f"| {said['accuracy']:.1%} | {WANTED[family]:.0%} |" in card


def test_the_card_passes_what_is_wanted() -> None:
    accuracy = {family: REPORT["families"][family]["accuracy"] for family in MAIN_FAMILIES}
    assert all(accuracy[family] >= WANTED[family] for family in MAIN_FAMILIES)
    assert REPORT["markup"] >= WANTED_MARKUP
    assert REPORT["passes"] == passes(REPORT)
    assert all(REPORT["passes"].values())


def test_reasoning_grows_with_the_effort_of_the_prompt(generator: EngineGenerator) -> None:
    tokenizer = Tokenizer.from_dir(DIRECTORY)
    lengths = []
    for effort in EFFORTS:
        items = heldout_items("arithmetic", 24, thinking_effort=effort)
        lengths.append(summarize(run_items(generator, tokenizer, items))["reasoning_tokens"])
    low, high, maximum = lengths
    assert 0 < low < high < maximum


def test_the_checkpoint_is_the_published_layout_of_the_recipe() -> None:
    checkpoint = Checkpoint.open(DIRECTORY)
    assert checkpoint.report.is_ok
    config = read_config(DIRECTORY)
    recipe = json.loads((DIRECTORY / "recipe.json").read_text())
    assert config.text == parse_recipe(recipe).model
    assert config.is_wrapped
    assert config.quantization is not None
    packed = [name for name in checkpoint.extents if name.endswith(".weight_packed")]
    moe = config.text.moe
    assert moe is not None
    assert len(packed) == 3 * moe.num_experts * len(config.text.moe_layers)
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= MAX_BYTES
    generation = json.loads((DIRECTORY / "generation_config.json").read_text())
    assert generation["temperature"] == 0


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--threads", "1") as running:
        yield running


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


def ask(served: Served, text: str, **options: Any) -> Any:
    messages = options.pop("messages", [{"role": "user", "content": text}])
    return client(served).chat.completions.create(
        model="moonlet-nano", messages=messages, **options
    )


def test_the_banner_says_what_it_is_and_is_not(served: Served) -> None:
    text = "\n".join(served.lines)
    assert "It is not Kimi K3" in text
    assert re.search(r"try: curl http://127\.0\.0\.1:\d+/v1/chat/completions", text)


def test_an_addition_with_reasoning(served: Served) -> None:
    reply = ask(served, "What is 123+456?")
    message = reply.choices[0].message
    assert message.content == "579"
    assert "6+3=9" in message.reasoning_content or "3+6=9" in message.reasoning_content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens_details.reasoning_tokens > 10


def test_a_tool_call_whose_result_is_used(served: Served) -> None:
    first = ask(served, "What is the tide level of the harbour Zelmora?", tools=[GET_TIDE])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.function.name == "get_tide"
    assert json.loads(call.function.arguments) == {"harbour": "Zelmora"}
    history = [
        {"role": "user", "content": "What is the tide level of the harbour Zelmora?"},
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"level": 47}'},
    ]
    second = ask(served, "", messages=history, tools=[GET_TIDE])
    assert "47" in second.choices[0].message.content
    assert second.choices[0].finish_reason == "stop"


def test_a_streamed_answer_with_usage(served: Served) -> None:
    stream = ask(served, "500 - 77", stream=True, stream_options={"include_usage": True})
    reasoning, content, usages = "", "", []
    for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
    assert content == "423"
    assert reasoning
    assert len(usages) == 1
    assert usages[0].completion_tokens > 0


def test_other_weights_give_other_answers(tmp_path: Path) -> None:
    """The server passes on what the model says, nothing else."""
    loaded = load_model(DIRECTORY)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in loaded.model.layers:
            for parameter in layer.parameters():
                parameter.copy_(parameter[..., torch.randperm(parameter.shape[-1])])
    names = ("tiktoken.model", "tokenizer_config.json")
    folder = tmp_path / "shuffled"
    save_model(
        loaded.model,
        folder,
        loaded.config.text,
        {name: DIRECTORY / name for name in names},
        {"temperature": 0.0},
    )
    with serve(str(folder), "--threads", "1", "--served-model-name", "moonlet-nano") as other:
        reply = ask(other, "What is 123+456?", max_tokens=60)
        assert reply.choices[0].message.content != "579"
        assert reply.usage.completion_tokens > 0
    shutil.rmtree(folder)
