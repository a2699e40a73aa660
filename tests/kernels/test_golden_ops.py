"""Operator vectors of the official code: every backend against every case."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moonlet.core.config import MoEConfig
from moonlet.kernels import _native
from moonlet.kernels.attn_res.reference import attn_res_fold, attn_res_join, attn_res_mix
from moonlet.kernels.kda import chunkwise, cpu, reference
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.rms_norm.reference import gated_rms_norm, rms_norm
from moonlet.kernels.route_topk.reference import route_topk
from moonlet.kernels.short_conv.reference import short_conv
from moonlet.kernels.situ.reference import situ_glu
from tests.golden_data import count_vectors, golden_dir, require

KDA_BACKENDS = {"reference": reference.kda_chunk, "torch": chunkwise.kda_chunk}
KDA_STEPS = {"reference": reference.kda_step}
if _native.availability()[0]:
    KDA_BACKENDS["cpu"] = cpu.kda_chunk
    KDA_STEPS["cpu"] = cpu.kda_step


def serves(backend: str, vectors: dict[str, Tensor]) -> bool:
    """The native kernels serve head sizes that are multiples of 16; one case has another."""
    return backend != "cpu" or vectors["v"].shape[-1] % 16 == 0


def load(name: str) -> dict[str, Tensor]:
    return load_file(require(golden_dir("model") / "ops" / f"{name}.safetensors"))


def cases() -> dict[str, Any]:
    text = require(golden_dir("model") / "ops" / "ops.json").read_text()
    return json.loads(text)["cases"]


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= tolerance, f"max abs error {error:.3e} above {tolerance:.0e}"


def kda_inputs(vectors: dict[str, Tensor], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Packed inputs in the operator's order, and the initial state."""
    q, k, v, z, beta = (vectors[n][0].to(dtype) for n in ("q", "k", "v", "g_raw", "beta_raw"))
    dt_bias = vectors["dt_bias"].view(q.shape[1:])
    state = vectors.get("initial_state")
    if state is None:
        state = torch.zeros(1, q.shape[1], q.shape[2], v.shape[2])
    return [q, k, v, z, beta, vectors["A_log"], dt_bias], state


def split_cases(vectors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    grouped: dict[str, dict[str, Tensor]] = {}
    for key, value in vectors.items():
        case, name = key.rsplit(".", 1)
        grouped.setdefault(case, {})[name] = value
    return grouped


@pytest.mark.parametrize("backend", KDA_BACKENDS)
def test_kda_output_state_and_gate(backend: str) -> None:
    bounds = cases()["kda"]
    grouped = split_cases(load("kda"))
    assert set(grouped) <= set(bounds)
    assert sum(serves(backend, vectors) for vectors in grouped.values()) >= len(grouped) - 1
    for case, vectors in grouped.items():
        if not serves(backend, vectors):
            continue
        bound = bounds[case]["lower_bound"]
        inputs, state = kda_inputs(vectors, torch.float32)
        gate = reference.kda_gate(inputs[3], inputs[5], inputs[6], bound)
        relative = (gate - vectors["g_log"][0]).abs() / vectors["g_log"][0].abs().clamp(min=1)
        assert relative.max() <= 1e-5, case
        ragged = Ragged.build([inputs[0].shape[0]])
        result = KDA_BACKENDS[backend](*inputs, bound, state, ragged)
        close(result.o_THV, vectors["o"][0], 1e-5)
        close(result.state_SHKV, vectors["final_state"], 1e-5)
        count_vectors(1)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_kda_with_bfloat16_inputs(backend: str) -> None:
    bounds = cases()["kda"]
    for case, vectors in split_cases(load("kda")).items():
        inputs, state = kda_inputs(vectors, torch.bfloat16)
        ragged = Ragged.build([inputs[0].shape[0]])
        result = KDA_BACKENDS[backend](*inputs, bounds[case]["lower_bound"], state, ragged)
        assert result.o_THV.dtype == torch.bfloat16
        close(result.o_THV, vectors["o"][0], 6e-3)
        count_vectors(1)


@pytest.mark.parametrize("backend", KDA_STEPS)
def test_kda_step_replays_every_case(backend: str) -> None:
    bounds = cases()["kda"]
    for case, vectors in split_cases(load("kda")).items():
        if not serves(backend, vectors):
            continue
        inputs, state = kda_inputs(vectors, torch.float32)
        outputs, state, slot = [], state.clone(), torch.tensor([0])
        for t in range(inputs[0].shape[0]):
            row = [x[t : t + 1] for x in inputs[:5]]
            bound = bounds[case]["lower_bound"]
            outputs.append(KDA_STEPS[backend](*row, *inputs[5:], bound, state, slot))
        close(torch.cat(outputs), vectors["o"][0], 1e-5)
        close(state, vectors["final_state"], 1e-5)
        count_vectors(1)


def test_short_conv_full_carry_and_bfloat16() -> None:
    v = load("short_conv")
    weight, zeros = v["weight"][:, 0], torch.zeros(1, 12, 3)
    full = short_conv(v["x"], weight, zeros, Ragged.build([20]), torch.arange(20))
    close(full.y_TC, v["y_full"], 1e-5)
    close(full.carry_SCW[0], v["state_final"], 0)
    assert full.emitted_ECW is not None
    for n in (1, 2, 3, 9):
        close(full.emitted_ECW[n - 1], v[f"state_after_{n}"], 0)
        first = short_conv(v["x"][:n], weight, zeros, Ragged.build([n]))
        rest = short_conv(v["x"][n:], weight, first.carry_SCW, Ragged.build([20 - n]))
        close(torch.cat([first.y_TC, rest.y_TC]), v["y_full"], 1e-5)
    carried = short_conv(v["x"][:2], weight, v["carry_in"][None], Ragged.build([2]))
    close(carried.y_TC, v["y_carry_len2"], 1e-5)
    close(carried.carry_SCW[0], v["state_carry_len2"], 0)
    half = short_conv(v["x"].bfloat16(), weight, zeros.bfloat16(), Ragged.build([20]))
    close(half.y_TC, v["y_full_bf16_input"], 1e-2)
    count_vectors(8)


def test_norms() -> None:
    v = load("norms")
    close(gated_rms_norm(v["x"], v["weight"], v["gate"], 1e-5), v["y"], 1e-5)
    close(rms_norm(v["x"], v["rms_weight"], 1e-5), v["rms_y"], 1e-5)
    half = rms_norm(v["x"].bfloat16(), v["rms_weight"].bfloat16(), 1e-5)
    assert torch.equal(half, v["rms_y_bf16"])
    count_vectors(3)


def test_situ() -> None:
    v = load("situ")
    expected = v["y_b4_lb25"]
    assert torch.allclose(situ_glu(v["gate"], v["up"], 4.0, 25.0), expected, rtol=1e-5, atol=1e-6)
    uncapped = situ_glu(v["gate"], v["up"], 1.0, None)
    assert torch.allclose(uncapped, v["y_b1_nolinear"], rtol=1e-5, atol=1e-6)
    half = situ_glu(v["gate"].bfloat16(), v["up"].bfloat16(), 4.0, 25.0)
    assert torch.allclose(half.float(), v["y_b4_lb25_bf16"].float(), rtol=1e-2, atol=1e-6)
    count_vectors(3)


@pytest.mark.parametrize("suffix", ["", "_bf16"])
def test_attn_res_sequential(suffix: str) -> None:
    v = load("attn_res")
    dtype = torch.bfloat16 if suffix else torch.float32
    weight = v["norm_weight"] * v["proj_weight"][0]
    for n in (0, 1, 2, 5, 8, 9):
        blocks = [v["blocks"][:, i].to(dtype) for i in range(n)]
        out = attn_res_mix(blocks, v["prefix_sum"].to(dtype), weight, 1e-5)
        close(out, v[f"out_n{n}{suffix}"], 2e-2 if suffix else 1e-5)
        count_vectors(1)


def test_attn_res_two_phase() -> None:
    v = load("attn_res")
    weight = v["norm_weight"] * v["proj_weight"][0]
    for n in (1, 2, 5, 8, 9):
        blocks = [v["blocks"][:, i] for i in range(n)]
        fold = attn_res_fold(blocks, torch.stack([weight, weight * 2]), 1e-5)
        for name, part in zip(("m", "l", "acc"), fold[:3], strict=True):
            close(part[0], v[f"phase1_{name}_n{n}"], 1e-5)
        out = attn_res_join(fold, 0, v["prefix_sum"], 1e-5)
        close(out, v[f"out_n{n}"], 1e-5)
        count_vectors(1)


def router_rules(case: dict[str, Any]) -> MoEConfig:
    return MoEConfig(
        num_experts=case["num_experts"],
        num_experts_per_token=case["top_k"],
        moe_intermediate_size=32,
        routed_scaling_factor=case.get("scale", 1.0),
        moe_renormalize=case.get("renorm", True),
        moe_router_activation_func=case.get("fn", "sigmoid"),
        num_expert_group=case.get("ngroup", 1),
        topk_group=case.get("tg", 1),
    )


def test_router_selection_and_weights() -> None:
    v = load("router")
    rules = {name: case for name, case in cases()["router"].items() if isinstance(case, dict)}
    assert len(rules) == 5
    for name, case in rules.items():
        routed = route_topk(v["x"], v["weight"], v["bias"], router_rules(case))
        ids, order = routed.ids_TA.sort(dim=-1)
        assert torch.equal(ids.int(), v[f"{name}.ids"]), name
        close(routed.weights_TA.gather(1, order), v[f"{name}.weights"], 1e-5)
        count_vectors(1)


def test_router_ties_take_the_lowest_index() -> None:
    v = load("router")
    experts, top = v["ties.weight"].shape[0], v["ties.ids_lowest_index_rule"].shape[1]
    rules = MoEConfig(num_experts=experts, num_experts_per_token=top, moe_intermediate_size=32)
    routed = route_topk(v["ties.x"], v["ties.weight"], v["ties.bias"], rules)
    ids, order = routed.ids_TA.sort(dim=-1)
    assert torch.equal(ids.int(), v["ties.ids_lowest_index_rule"])
    close(routed.weights_TA.gather(1, order), v["ties.weights_lowest_index_rule"], 1e-5)
    close(routed.scores_TE, v["ties.scores"], 1e-6)
    close(routed.scores_TE + v["ties.bias"], v["ties.scores_for_choice"], 1e-6)
    # torch's own top-k may take other experts, but only tied ones
    biased = v["ties.scores_for_choice"]
    ours, torchs = (biased.gather(1, x.long()) for x in (ids, v["ties.ids_torch_cpu"]))
    close(ours.sort(-1).values, torchs.sort(-1).values, 1e-6)
    count_vectors(1)
