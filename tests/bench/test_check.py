"""`--check` finds a wrong backend, whatever is wrong with it."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from moonlet.bench.check import check_kernels, error_ratio
from moonlet.cli.main import run
from moonlet.core.errors import ConfigError, ShapeError
from moonlet.kernels.attn_res import reference as attn_res
from moonlet.kernels.kda import reference as kda
from moonlet.kernels.linear.reference import linear
from moonlet.kernels.mla import reference as mla
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.moe_mxfp4.reference import moe_mxfp4
from moonlet.kernels.registry import OPERATORS
from moonlet.kernels.sample.reference import Filters, sample
from tests.bench.backends import add_backend

COMMAND = ["bench", "kernels", "--check", "--op", "linear", "--repeats", "2"]


def check(op: str, **options: Any) -> dict[str, Any]:
    """The record of the added backend."""
    report = check_kernels(ops=(op,), backends=("added",), **{"num_shapes": 3, **options})
    (record,) = report["results"]
    assert report["ok"] is record["ok"]
    return record


def test_all_backends_agree_with_the_reference() -> None:
    report = check_kernels(num_shapes=3)
    assert [r for r in report["results"] if not r["ok"]] == []
    assert json.loads(json.dumps(report)) == report
    listed = {(r["op"], r["backend"]) for r in report["results"]}
    others = {(op, b.name) for op, bs in OPERATORS.items() for b in bs if b.name != "reference"}
    assert listed == others
    for record in report["results"]:
        assert record["cases"] + record["refused"] > 0
        assert record["cases"] == 0 or record["worst_ratio"] <= record["tolerance"]


def test_a_correct_backend_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    add_backend(monkeypatch, "linear", linear)
    record = check("linear")
    assert record["ok"]
    assert record["worst_ratio"] == 0
    # five stored forms of each shape
    assert record["cases"] == 15


def off_by_little(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    return linear(x, weight, scale) * 1.0001


def forgets_the_scale(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    return linear(x, weight, None if scale is None else torch.ones_like(scale))


def leaves_a_hole(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    y = linear(x, weight, scale)
    y[-1, -1] = float("nan")
    return y


def changes_its_input(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    y = linear(x, weight, scale)
    x[0, 0] += 1
    return y


def rounds_the_result(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    return linear(x, weight, scale).bfloat16()


def returns_a_pair(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return linear(x, weight, scale), x


def crashes(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    raise RuntimeError("out of tiles")


WRONG = [
    *(off_by_little, forgets_the_scale, leaves_a_hole, changes_its_input),
    *(rounds_the_result, returns_a_pair, crashes),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_backend_is_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_backend(monkeypatch, "linear", wrong)
    record = check("linear")
    assert not record["ok"]
    assert record["failure"]


def test_a_wrong_state_is_found_where_the_output_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_write(*arguments: Any) -> Tensor:
        *inputs, arena, slots = arguments
        return kda.kda_step(*inputs, arena.clone(), slots)

    add_backend(monkeypatch, "kda_step", forgets_the_write)
    # the seed draws shapes of few enough sequences
    record = check("kda_step", num_shapes=6)
    assert record["cases"] > 0
    assert not record["ok"]


def ignores_the_mode(*arguments: Any) -> Tensor:
    return moe_mxfp4(*arguments[:-1])


def takes_pages_in_order(q: Tensor, pages: LatentPages, kv_b: Tensor) -> Tensor:
    order = torch.arange(pages.table_SB.numel()).view_as(pages.table_SB)
    return mla.mla_decode(q, dataclasses.replace(pages, table_SB=order), kv_b)


def joins_the_first(fold: attn_res.BlockFold, index: int, prefix: Tensor, eps: float) -> Tensor:
    return attn_res.attn_res_join(fold, 0, prefix, eps)


def forgets_top_p(logits: Tensor, filters: Filters, uniforms: list[float]) -> Tensor:
    return sample(logits, dataclasses.replace(filters, top_p_M1=None), uniforms)


@pytest.mark.parametrize(
    ("op", "right", "wrong"),
    [
        ("moe_mxfp4", moe_mxfp4, ignores_the_mode),
        ("mla_decode", mla.mla_decode, takes_pages_in_order),
        ("attn_res_join", attn_res.attn_res_join, joins_the_first),
        ("sample", sample, forgets_top_p),
    ],
)
def test_an_argument_that_is_not_heeded_is_found(
    op: str, right: Any, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the seed draws shapes of few enough sequences, and of more than one page
    add_backend(monkeypatch, op, right)
    assert check(op, num_shapes=6)["ok"]
    add_backend(monkeypatch, op, wrong)
    assert not check(op, num_shapes=6)["ok"]


def test_refusing_everything_after_a_promise_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any) -> Tensor:
        raise ShapeError("only on Mondays")

    add_backend(monkeypatch, "linear", refuses)
    record = check("linear")
    assert not record["ok"]
    assert "only on Mondays" in record["failure"]
    assert record["refused"] == 15


def test_refusing_some_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_int8(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        if weight.dtype == torch.int8:
            raise ShapeError("no int8")
        return linear(x, weight, scale)

    add_backend(monkeypatch, "linear", no_int8)
    record = check("linear")
    assert record["ok"]
    assert (record["cases"], record["refused"], record["refused_because"]) == (12, 3, "no int8")


def test_seeds_draw_different_shapes_and_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def spy(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        shapes.append((*x.shape, *weight.shape))
        return linear(x, weight, scale)

    add_backend(monkeypatch, "linear", spy)
    seen = []
    for seed in (0, 1, 0):
        check("linear", seed=seed)
        seen.append(shapes.copy())
        shapes.clear()
    assert seen[0] == seen[2] != seen[1]


def test_error_ratio() -> None:
    one = torch.tensor([3.0, 4.0])
    assert error_ratio(one, one) == 0
    assert error_ratio(one * 1.5, one) == pytest.approx(0.5)
    assert error_ratio(torch.tensor([3.0, float("nan")]), one) == float("inf")
    assert error_ratio(one, torch.tensor([3.0, float("nan")])) == float("inf")
    assert error_ratio(one[:1], one) == float("inf")
    assert error_ratio(one.double(), one) == float("inf")
    endless = torch.tensor([3.0, -float("inf")])
    assert error_ratio(endless, endless) == 0
    assert error_ratio(one, endless) == float("inf")
    assert error_ratio(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert error_ratio(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    assert error_ratio(torch.tensor([1.0]), torch.tensor([0.0])) == float("inf")


def test_the_exit_code_says_whether_all_is_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_backend(monkeypatch, "linear", linear)
    assert run([*COMMAND, "--backend", "added"]) == 0
    assert "WRONG" not in capsys.readouterr().out
    add_backend(monkeypatch, "linear", off_by_little)
    assert run(COMMAND) == 1
    assert "linear: added: float32" in capsys.readouterr().out
    assert run([*COMMAND, "--json", "--seed", "3"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["seed"], report["shapes"]) == (False, 3, 2)


def test_no_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="repeats is 0"):
        check_kernels(num_shapes=0)
