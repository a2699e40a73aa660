"""Whole-model golden tests: logits, greedy decoding, cuts, captures, states, bf16."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moonlet.kernels.registry import resolve
from moonlet.model.latent_moe import LatentMoE
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from tests.golden_data import count_vectors
from tests.model import golden
from tests.model.golden import FAMILIES, LOGIT_TOLERANCE, expected, max_error, prefill


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_logits(family: str) -> None:
    vectors, transformer = expected(family).tensors, golden.shared_model(family)
    for n in golden.full_or_subset_lengths(family, "logits"):
        logits = prefill(transformer, vectors[f"len{n}.input_ids"])
        assert max_error(logits, vectors[f"len{n}.logits"]) <= LOGIT_TOLERANCE[family]
        count_vectors(1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["reference kernels", "two-phase"])
def test_other_forms_give_the_same_logits(family: str, form: str) -> None:
    vectors, base = expected(family).tensors, golden.shared_model(family)
    if form == "two-phase":
        other = Transformer(base.config, base.kernels, attn_res_form="two_phase")
    else:
        other = Transformer(base.config, resolve(wanted="reference"))
    other.load_state_dict(base.state_dict())
    other.eval()
    for n in (7, 65):
        logits = prefill(other, vectors[f"len{n}.input_ids"])
        assert max_error(logits, vectors[f"len{n}.logits"]) <= LOGIT_TOLERANCE[family]
        count_vectors(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_with_the_cache(family: str) -> None:
    vectors, transformer = expected(family).tensors, golden.shared_model(family)
    for n in expected(family).lengths("greedy_ids"):
        greedy = vectors[f"len{n}.greedy_ids"]
        logits = golden.teacher_forced(transformer, vectors[f"len{n}.input_ids"], greedy)
        assert max_error(logits, vectors[f"len{n}.greedy_logits"]) <= LOGIT_TOLERANCE[family]
        assert torch.equal(logits[: len(greedy)].argmax(-1), greedy.long())
        count_vectors(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_split_prefill_equals_the_whole(family: str) -> None:
    vectors, transformer = expected(family).tensors, golden.shared_model(family)
    for n in golden.full_or_subset_lengths(family, "logits"):
        ids = vectors[f"len{n}.input_ids"]
        for cut in sorted({1, 2, 3, 4, n // 2, 129 % n, n - 1} & set(range(1, n))):
            state = golden.fresh_state(transformer)
            first = prefill(transformer, ids[:cut], state)
            rest = prefill(transformer, ids[cut:], state, cut)
            error = max_error(torch.cat([first, rest]), vectors[f"len{n}.logits"])
            assert error <= LOGIT_TOLERANCE[family], (n, cut)
        count_vectors(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_latent_cache(family: str) -> None:
    vectors, transformer = expected(family).tensors, golden.shared_model(family)
    facts = expected(family).facts
    kda, mla = facts["kda_state_layer"], facts["mla_cache_layer"]
    for n in expected(family).lengths(f"prefill.recurrent_state_L{kda}"):
        state = golden.fresh_state(transformer)
        ids = vectors[f"len{n}.input_ids"]
        prefill(transformer, ids, state)
        check_state(state, vectors, f"len{n}.prefill", kda, mla, n)
        for j, token in enumerate(vectors[f"len{n}.greedy_ids"]):
            prefill(transformer, token.view(1), state, n + j)
        check_state(state, vectors, f"len{n}.final", kda, mla, n + 32)
        count_vectors(2)


def check_state(
    state: golden.DenseState, vectors: dict[str, Tensor], prefix: str, kda: int, mla: int, n: int
) -> None:
    latent_size = golden.shared_model("tiny_k3").config.mla.kv_lora_rank
    rows_NC = state.mla_layers[mla].rows_GLC[0, :n]
    ours = {
        f"recurrent_state_L{kda}": state.kda_layers[kda].recurrent[0],
        f"mla_kv_latent_L{mla}": rows_NC[:, :latent_size],
        f"mla_k_rope_L{mla}": rows_NC[:, latent_size:],
    }
    for part, name in zip(state.kda_layers[kda].conv[0].chunk(3), "qkv", strict=True):
        ours[f"conv_state_{name}_L{kda}"] = part
    present = [name for name in ours if f"{prefix}.{name}" in vectors]
    assert len(present) == (6 if prefix.endswith(".final") else 1)
    for name in present:
        assert max_error(ours[name], vectors[f"{prefix}.{name}"]) <= 1e-4, name


class Capture:
    """Records the input and the output of modules during one forward."""

    def __init__(self, transformer: Transformer) -> None:
        self.seen: dict[str, tuple[Tensor, Tensor]] = {}
        for i, layer in enumerate(transformer.layers):
            for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "ffn"):
                self._watch(f"L{i}.{name}", getattr(layer, name))
            self._watch_sum(f"L{i}.layer", layer)
        self._watch("final_norm", transformer.norm)

    def _watch(self, name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            self.seen[name] = (args[0], out)

        module.register_forward_hook(hook)

    def _watch_sum(self, name: str, layer: nn.Module) -> None:
        """The running sum of the depth stream before and after a layer."""
        before: list[Tensor] = []

        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            before.append(running_sum(args[0]))

        def leave(_: nn.Module, args: tuple[Any, ...], out: None) -> None:
            self.seen[name] = (before[-1], running_sum(args[0]))

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)


def running_sum(stream: Any) -> Tensor:
    """Prefix sum of AttnRes, or the residual stream without it."""
    return stream._prefix if hasattr(stream, "_prefix") else stream._x


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_captures(family: str) -> None:
    vectors = expected(family).tensors
    transformer = golden.model(family)
    capture = Capture(transformer)
    prefill(transformer, vectors["len7.input_ids"])
    ours = {
        f"len7.{name}.{side}": tensor
        for name, pair in capture.seen.items()
        for side, tensor in zip(("in", "out"), pair, strict=True)
    }
    # every capture that was published, so that none goes unread
    wanted = [key for key in vectors if key.startswith("len7.") and key.endswith((".in", ".out"))]
    assert len(wanted) >= 6 * len(transformer.layers)
    for key in wanted:
        assert max_error(ours[key], vectors[key]) <= 1e-4, key
    count_vectors(len(wanted))


def routers(transformer: Transformer) -> list[nn.Module]:
    return [layer.ffn.gate for layer in transformer.layers if isinstance(layer.ffn, LatentMoE)]


@pytest.mark.parametrize("family", FAMILIES)
def test_router_choices_inside_the_model(family: str) -> None:
    vectors = expected(family).tensors
    transformer = golden.model(family)
    for n in (7, 65):
        seen: list[tuple[Tensor, Tensor]] = []
        handles = [
            gate.register_forward_hook(lambda _m, _a, out, log=seen: log.append(out))
            for gate in routers(transformer)
        ]
        prefill(transformer, vectors[f"len{n}.input_ids"])
        for handle in handles:
            handle.remove()
        ids, order = torch.stack([ids for ids, _ in seen]).sort(dim=-1)
        weights = torch.stack([w for _, w in seen]).gather(-1, order)
        assert torch.equal(ids.int(), vectors[f"len{n}.router_ids"].int())
        assert max_error(weights, vectors[f"len{n}.router_weights"]) <= 1e-5
        count_vectors(2)


def test_latent_norm_epsilon() -> None:
    vectors, transformer = expected("tiny_k3").tensors, golden.shared_model("tiny_k3")
    x = vectors["small_mla_L3.in"]
    x = x.view(-1, x.shape[-1])
    meta, state = BatchMeta.build([len(x)]), NoState(transformer.config)
    with torch.no_grad():
        out = transformer.layers[3].self_attn(x, meta, state.mla(3))
    wanted = vectors["small_mla_L3.out"].view_as(out)
    assert ((out - wanted).norm() / wanted.norm()).item() <= 1e-3
    count_vectors(1)


def relative_l2(actual: Tensor, wanted: Tensor) -> float:
    return ((actual.float() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_modules_on_golden_inputs(family: str) -> None:
    vectors = expected(family).tensors
    transformer = golden.model(family, torch.bfloat16)
    meta, state = BatchMeta.build([7]), NoState(transformer.config, torch.bfloat16)
    with torch.no_grad():
        for i, layer in enumerate(transformer.layers):
            x = vectors[f"len7.L{i}.input_layernorm.out"].bfloat16()
            memory = state.kda(i) if layer.is_kda else state.mla(i)
            attention = layer.self_attn(x, meta, memory)
            assert relative_l2(attention, vectors[f"len7.L{i}.self_attn.out"]) <= 0.02
            x = vectors[f"len7.L{i}.post_attention_layernorm.out"].bfloat16()
            assert relative_l2(layer.ffn(x), vectors[f"len7.L{i}.ffn.out"]) <= 0.012
            count_vectors(2)


def force_routing(transformer: Transformer, ids_LTA: Tensor) -> None:
    """Make every router choose the golden experts, with its own weights for them."""
    moe = transformer.config.moe
    assert moe is not None
    for gate, ids_TA in zip(routers(transformer), ids_LTA.long(), strict=True):

        def forward(
            x_TD: Tensor, gate: nn.Module = gate, ids_TA: Tensor = ids_TA
        ) -> tuple[Tensor, Tensor]:
            scores = torch.sigmoid(x_TD.float() @ gate.weight.float().T)
            weights = scores.gather(1, ids_TA)
            weights = weights / weights.sum(-1, keepdim=True) * moe.routed_scaling_factor
            return ids_TA, weights

        gate.forward = forward


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_with_forced_routing(family: str) -> None:
    vectors = expected(family).tensors
    single = prefill(golden.model(family, torch.bfloat16), vectors["len1.input_ids"])
    assert max_error(single, vectors["len1.logits"]) <= 0.25
    assert relative_l2(single, vectors["len1.logits"]) <= 0.03
    for n, limit in ((7, 0.05), (65, 0.10)):
        transformer = golden.model(family, torch.bfloat16)
        force_routing(transformer, vectors[f"len{n}.router_ids"])
        logits = prefill(transformer, vectors[f"len{n}.input_ids"])
        assert relative_l2(logits, vectors[f"len{n}.logits"]) <= limit
        if n == 7:
            assert max_error(logits, vectors["len7.logits"]) <= 0.8
    count_vectors(3)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_free_running(family: str) -> None:
    vectors = expected(family).tensors
    transformer = golden.model(family, torch.bfloat16)
    if "len300.logits" in vectors:
        logits = prefill(transformer, vectors["len300.input_ids"])
        wanted = vectors["len300.logits"]
        assert F.cosine_similarity(logits, wanted, dim=-1).mean() >= 0.95
        assert (logits.argmax(-1) == wanted.argmax(-1)).float().mean() >= 0.65
        count_vectors(1)
    seen: list[Tensor] = []
    for gate in routers(transformer):
        gate.register_forward_hook(lambda _m, _a, out: seen.append(out[0]))
    prefill(transformer, vectors["len65.input_ids"])
    ids = torch.stack(seen).sort(dim=-1).values.int()
    same = (ids == vectors["len65.router_ids"].int()).all(-1).float().mean()
    assert same >= 0.7
    count_vectors(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_composition_does_not_matter(family: str) -> None:
    vectors, transformer = expected(family).tensors, golden.shared_model(family)
    lengths = [n for n in (7, 1, 65) if f"len{n}.logits" in vectors]
    ids = torch.cat([vectors[f"len{n}.input_ids"] for n in lengths]).long()
    meta = BatchMeta.build(lengths, slots=[2, 0, 1][: len(lengths)], logits="all")
    with torch.no_grad():
        hidden = transformer(ids, meta, golden.fresh_state(transformer, 3))
        logits = transformer.logits(hidden)
    for part, n in zip(logits.split(lengths), lengths, strict=True):
        assert max_error(part, vectors[f"len{n}.logits"]) <= LOGIT_TOLERANCE[family]
        count_vectors(1)
