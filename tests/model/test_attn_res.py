"""The depth stream: kept products never go stale, and a pass makes few operator calls."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moonlet.kernels.registry import resolve
from moonlet.model.attn_res import Mixes
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from moonlet.testing import assert_close, tiny_model

TOKENS = torch.arange(5)


def run(model: Transformer) -> Tensor:
    return model.forward(TOKENS, BatchMeta.build([len(TOKENS)]), NoState(model.config))


def first_norm(model: Transformer) -> torch.nn.Parameter:
    norm = model.layers[0].mlp_res_norm
    assert norm is not None
    return norm.weight


def in_place(model: Transformer) -> None:
    first_norm(model).mul_(2.0)


def new_storage(model: Transformer) -> None:
    parameter = first_norm(model)
    parameter.data = parameter.data * 2.0


def new_parameter(model: Transformer) -> None:
    norm = model.layers[0].mlp_res_norm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 2.0)


def state_dict(model: Transformer) -> None:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    values["layers.0.mlp_res_norm.weight"] *= 2.0
    model.load_state_dict(values)


CHANGES = [in_place, new_storage, new_parameter, state_dict]


@pytest.mark.parametrize("form", ["sequential", "two_phase"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_seen_at_once(change: Callable[[Transformer], None], form: str) -> None:
    model = tiny_model().eval()
    model.attn_res_form = form
    with torch.no_grad():
        before = run(model)
        assert torch.equal(run(model), before)
        change(model)
        after = run(model)
        assert not torch.equal(after, before)
        model._mixes.forget()
        assert torch.equal(run(model), after)


@torch.no_grad()
def test_weights_in_shared_storage_are_read_anew_after_training() -> None:
    # the trainer keeps all parameters in one buffer and writes to that
    model = tiny_model().eval()
    parameter = first_norm(model)
    flat = parameter.detach().clone()
    parameter.data = flat.view_as(parameter)
    before = run(model)
    model.train()
    flat.mul_(2.0)
    during = run(model)
    assert not torch.equal(during, before)
    model.eval()
    assert torch.equal(run(model), during)


def test_gradients_reach_both_weights_of_every_mix() -> None:
    for form in ("sequential", "two_phase"):
        model = tiny_model().eval()
        model.attn_res_form = form
        with torch.no_grad():
            run(model)
        run(model).square().sum().backward()
        gradients = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if "_res_" in name and not name.startswith("layers.0.self_attention")
        }
        assert len(gradients) > 4
        assert all(g is not None and bool(g.any()) for g in gradients.values())


def test_parameters_made_in_inference_mode_are_never_kept() -> None:
    with torch.inference_mode():
        model = tiny_model().eval()
        before = run(model)
        in_place(model)
        assert not torch.equal(run(model), before)


@torch.no_grad()
def test_a_copy_has_its_own_products() -> None:
    model = tiny_model().eval()
    before = run(model)
    other = copy.deepcopy(model)
    in_place(other)
    assert not torch.equal(run(other), before)
    assert torch.equal(run(model), before)


@torch.no_grad()
def test_two_phases_fold_once_a_block_and_join_once_a_read() -> None:
    model = tiny_model().eval()
    model.attn_res_form = "two_phase"
    counts: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        operator = getattr(model.kernels, name)

        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return operator(*arguments)

        return call

    names = ("attn_res_mix", "attn_res_fold", "attn_res_join")
    expected = run(model)
    model.kernels = dataclasses.replace(model.kernels, **{n: counted(n) for n in names})
    assert torch.equal(run(model), expected)
    # the first read has no block to mix with
    assert counts == {
        "attn_res_fold": sum(layer.starts_block for layer in model.layers),
        "attn_res_join": 2 * len(model.layers),
    }


@torch.no_grad()
def test_products_are_made_once_for_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = tiny_model().eval(), []
    products = Mixes._products
    monkeypatch.setattr(Mixes, "_products", lambda self: made.append(1) or products(self))
    for _ in range(3):
        run(model)
    assert len(made) == 1


@torch.no_grad()
def test_the_operators_of_inference_give_the_same_hidden_rows() -> None:
    reference = tiny_model(seed=3).eval()
    kernels = resolve(config=reference.config, is_inference=True)
    expected = run(reference)
    for form in ("sequential", "two_phase"):
        model = Transformer(reference.config, kernels, attn_res_form=form)
        model.load_state_dict(reference.state_dict())
        # rounding of float32 through four layers
        assert_close(run(model.eval()), expected, atol=2e-5)
