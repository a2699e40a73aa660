"""The formulas against counted operations, counted bytes, and what one changed field must add."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moonlet.bench import costs
from moonlet.bench.cases.case import Case, Shape, another, tensors_in
from moonlet.bench.cases.table import CASES
from moonlet.bench.scales import k3_quarter
from moonlet.core.config import ModelConfig
from moonlet.kernels.registry import OPERATORS
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.testing import tiny_config, tiny_model

CONFIG = tiny_config()
# heads, nope, shared, latent and value width
WIDTHS = (
    *(CONFIG.mla.num_attention_heads, CONFIG.mla.qk_nope_head_dim, CONFIG.mla.qk_rope_head_dim),
    *(CONFIG.mla.kv_lora_rank, CONFIG.mla.v_head_dim),
)


def changed(part: str | None = None, **fields: Any) -> ModelConfig:
    """The tiny architecture with fields of it, or of one of its parts, replaced."""
    if part is None:
        return dataclasses.replace(CONFIG, **fields)
    inner = dataclasses.replace(getattr(CONFIG, part), **fields)
    return dataclasses.replace(CONFIG, **{part: inner})


def cases(rows: int, context: int = 5) -> list[tuple[str, Case]]:
    shape = Shape(
        config=CONFIG, rows=rows, context=context, generator=torch.Generator().manual_seed(0)
    )
    return [(op, case) for op, build in CASES.items() for case in build(shape)]


def reference(op: str) -> Any:
    return next(b for b in OPERATORS[op] if b.name == "reference").load()


# ---- operators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7])
def test_the_bytes_are_those_of_the_tensors(rows: int) -> None:
    for op, case in cases(rows):
        arguments = case.make()
        before = another(arguments)
        result = reference(op)(*arguments)
        changes = zip(tensors_in(before), tensors_in(arguments), strict=True)
        written = [now for then, now in changes if not torch.equal(then, now)]
        old = {t.data_ptr() for t in tensors_in(arguments)}
        new = [t for t in tensors_in(result) if t.data_ptr() not in old and t.ndim]
        read = [t for t in tensors_in(arguments) if t.ndim]
        moved = sum(t.nbytes for t in (*read, *written, *new))
        moved -= left_alone(op, arguments, rows)
        # slots, or lengths and pages of sequences, are not counted: eight bytes each
        assert 0 <= moved - case.cost.num_bytes <= 16 * rows, (op, case.label)


def left_alone(op: str, arguments: Any, rows: int) -> int:
    """Bytes of the arguments that no implementation needs to touch."""
    if op.startswith("moe_"):
        # all experts are arguments, the chosen ones are read
        ids, stacks = arguments[1], arguments[3:6]
        each = sum(w[0].nbytes for w in tensors_in(stacks))
        expected = round(4 * (1 - 0.5**rows))
        assert expected <= len(ids.unique()) + 1
        return (4 - expected) * each
    if op == "attn_res_join":
        # one of two sublayers
        return sum(t.nbytes for t in tensors_in(arguments[0])) // 2
    if op in ("kda_step", "short_conv_step"):
        # slots of other sequences, neither read nor written
        arena, slots = arguments[-2:]
        return 2 * (len(arena) - len(slots)) * arena[0].nbytes
    if op in ("kda_window", "kda_replay"):
        # likewise; a window writes no memory at all
        *arenas, slots = arguments[7:10]
        others = [(len(arena) - len(slots)) * arena[0].nbytes for arena in arenas]
        return sum(others) * (2 if op == "kda_replay" else 1)
    if op == "embed":
        ids, table = arguments[:2]
        return (len(table) - len(ids)) * table[0].nbytes
    if op == "mla_append":
        # other rows are neither read nor written, new ones are only written
        held = arguments[0].flatten(0, 1)
        return (2 * len(held) - rows) * held[0].nbytes
    if op in ("mla_decode", "mla_prefill"):
        pages = arguments[1]
        held = pages.rows_GLC.flatten(0, 1)
        return (len(held) - int(pages.lengths_S.sum())) * held[0].nbytes
    return 0


MATRIX_OPS = ("linear", "moe_experts", "moe_mxfp4", "mla_decode", "mla_prefill")


@pytest.mark.parametrize("op", MATRIX_OPS)
def test_the_products_are_counted_like_torch_counts_them(op: str) -> None:
    # one row, where causal attention sees all pairs
    for case in [case for name, case in cases(rows=1) if name == op]:
        arguments = case.make()
        with FlopCounterMode(display=False) as counter:
            reference(op)(*arguments)
        products, mla, moe = counter.get_total_flops(), CONFIG.mla, CONFIG.moe
        assert moe is not None
        flops = case.cost.flops
        if op == "mla_prefill":
            # the reference expands, which is not the cheaper form for one row
            assert flops < products
            flops = costs.expanded_flops(1, 5, *WIDTHS)
        beside = {
            "linear": 0,
            "mla_decode": mla.num_attention_heads * 6 * costs.SOFTMAX_FLOPS,
            "mla_prefill": mla.num_attention_heads * 6 * costs.SOFTMAX_FLOPS,
            "moe": moe.num_experts_per_token
            * (costs.situ_glu(moe.moe_intermediate_size).flops + 2 * CONFIG.expert_input_size),
        }
        name = "moe" if op.startswith("moe_") else op
        assert flops - beside[name] == products


def test_causal_prefill_counts_each_visible_pair_once() -> None:
    widths = (2, 16, 8, 24, 12)
    pair = 2 * (2 * (16 + 8) + 2 * 12 + costs.SOFTMAX_FLOPS)
    expansion = 2 * 2 * 24 * (16 + 12)
    three = costs.expanded_flops(3, 10, *widths)
    assert three == 13 * expansion + (11 + 12 + 13) * pair
    # cut anywhere the pairs are the same; the expansion is repeated
    cut = costs.expanded_flops(1, 10, *widths) + costs.expanded_flops(2, 11, *widths)
    assert cut - three == 11 * expansion
    # the absorbed form repeats nothing
    cut = costs.absorbed_flops(1, 10, *widths) + costs.absorbed_flops(2, 11, *widths)
    assert cut == costs.absorbed_flops(3, 10, *widths)


def test_prefill_counts_the_form_that_needs_fewer_operations() -> None:
    widths = (24, 128, 64, 512, 128)
    one = costs.mla_prefill(1, 1024, *widths)
    assert one == costs.mla_decode(1, 1025, *widths)
    assert costs.expanded_flops(1, 1024, *widths) > 100 * one.flops
    many = costs.mla_prefill(512, 1024, *widths)
    assert many.flops == costs.expanded_flops(512, 1024, *widths)
    assert many.flops < costs.absorbed_flops(512, 1024, *widths)


@pytest.mark.parametrize(
    ("less", "more", "num_bytes", "flops"),
    [
        (costs.rms_norm(3, 10), costs.rms_norm(4, 10), 4 * 20, 40),
        (costs.rms_norm(3, 10), costs.rms_norm(3, 11), 4 * 7, 12),
        (costs.gated_rms_norm(3, 10), costs.gated_rms_norm(4, 10), 4 * 30, 80),
        (costs.short_conv(3, 1, 8, 4), costs.short_conv(3, 2, 8, 4), 4 * 48, 0),
        (costs.short_conv(3, 1, 8, 4), costs.short_conv(3, 1, 8, 5), 4 * (8 + 16), 48),
        (costs.kda(1, 1, 2, 8, 8), costs.kda(1, 2, 2, 8, 8), 4 * 2 * 128, 0),
        (costs.kda(1, 1, 2, 8, 8), costs.kda(2, 1, 2, 8, 8), 4 * 82, 2 * (448 + 112 + 16)),
        (costs.mla_decode(1, 9, 2, 4, 2, 6, 4), costs.mla_decode(1, 10, 2, 4, 2, 6, 4), 32, 66),
        (costs.attn_res_mix(3, 2, 10), costs.attn_res_mix(3, 3, 10), 4 * 30, 180),
        (costs.attn_res_fold(3, 2, 4, 10), costs.attn_res_fold(3, 2, 5, 10), 4 * 46, 240),
        (costs.attn_res_join(3, 10), costs.attn_res_join(4, 10), 4 * 32, 80),
        (costs.route_topk(3, 10, 8, 2), costs.route_topk(3, 10, 9, 2), 4 * 14, 72),
        (costs.route_topk(3, 10, 8, 2), costs.route_topk(3, 10, 8, 3), 36, 0),
        (costs.moe_experts(3, 2, 4, 8, 6, 100), costs.moe_experts(3, 2, 5, 8, 6, 100), 100, 0),
        (costs.situ_glu(10), costs.situ_glu(11), 12, 11),
        (costs.swiglu(10), costs.swiglu(11), 12, 5),
        (costs.linear(3, 8, 6, 48), costs.linear(4, 8, 6, 48), 4 * 14, 96),
        (costs.linear(3, 8, 6, 48), costs.linear(3, 8, 6, 96), 48, 0),
        (costs.mla_decode(1, 9, 2, 4, 2, 6, 4, 2), costs.mla_decode(1, 9, 2, 4, 2, 6, 4), 192, 0),
        (costs.mla_prefill(5, 9, 2, 4, 2, 6, 4, 2), costs.mla_prefill(5, 9, 2, 4, 2, 6, 4), 192, 0),
        (costs.sample(3, 10, 1), costs.sample(4, 10, 1), 40 + 16, 60),
        (costs.sample(3, 10, 1), costs.sample(3, 10, 4), 3 * 24, 0),
    ],
)
def test_one_more_of_something_costs_what_it_must(
    less: costs.Cost, more: costs.Cost, num_bytes: int, flops: int
) -> None:
    assert more.num_bytes - less.num_bytes == num_bytes
    assert more.flops - less.flops == flops


# ---- whole model -------------------------------------------------------------------------------


def test_sources_of_the_mixes_are_those_of_the_report() -> None:
    # model.md section 3.2, note d: blocks of 12 in 93 layers end with 9 sources
    k3 = dataclasses.replace(k3_quarter(), num_hidden_layers=93, attn_res_block_size=12)
    sources = costs.mix_sources(k3)
    assert len(sources) == 2 * 93 + 1
    assert sources[:4] == [0, 2, 2, 2]
    assert sources[2 * 12 : 2 * 12 + 4] == [2, 3, 3, 3]
    assert sources[-1] == 9
    assert costs.mix_sources(changed(attn_res_block_size=None)) == []


def test_a_whole_prompt_counts_what_the_model_multiplies() -> None:
    model, rows = tiny_model(), 24
    meta = BatchMeta.build([rows])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden_TD = model.forward(torch.arange(rows), meta, NoState(CONFIG))
        model.logits(hidden_TD[-1:])
    counts = counter.get_flop_counts()["Global"]
    products = sum(counts.values())
    formula = costs.prefill_flops(CONFIG, rows)
    linear = formula.weights + formula.lm_head
    vectors = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim != 2 and "experts" not in n
    )
    # beyond the weights the counter sees attention over all pairs, the chunk form's products and
    # every expert padded to the busiest; the formula never exceeds what is multiplied
    assert linear - 2 * rows * vectors < products
    assert formula.lm_head == 2 * CONFIG.hidden_size * CONFIG.vocab_size
    assert formula.weights > 0.5 * products


@pytest.mark.parametrize(
    ("config", "part", "more"),
    [
        # a row more of the output table for each of 3 sequences
        (changed(vocab_size=513), "lm_head", 3 * 2 * 32),
        # one more expert: a row of the router and its bias in each of 3 MoE layers
        (changed("moe", num_experts=5), "weights", 3 * 2 * (32 + 1) * 3),
        # one more chosen expert in each of 3 layers: three matrices of 32 by 32
        (changed("moe", num_experts_per_token=3), "weights", 3 * 2 * 3 * 32 * 32 * 3),
        # one more channel of the dense FFN: three vectors of 32
        (changed(intermediate_size=65), "weights", 3 * 2 * 3 * 32),
        # one more latent channel: score and weighted sum over 10 rows of 2 heads
        (changed("mla", kv_lora_rank=25), "mla", 3 * 2 * 10 * 4),
        (changed("mla", qk_rope_head_dim=9), "mla", 3 * 2 * 10 * 2),
        # value and nope widths are absorbed: they count as weights
        (changed("mla", v_head_dim=13), "mla", 0),
        # one more head of width 16 in each of 3 layers
        (changed("kda", num_heads=3), "kda", 3 * 3 * (7 * 256 + 14 * 16 + 2 * 16)),
        (changed(kda_layers=(0, 1)), "kda", -3 * 2 * (7 * 256 + 14 * 16 + 2 * 16)),
        (changed(kda_layers=(0, 1)), "mla", 3 * 2 * 10 * (2 * 32 + 2 * 24 + 5)),
        # blocks of one layer: attention mixes 0 2 3 4 for 0 2 2 3, the FFN 2 3 4 5 for 2 2 3 3,
        # the output 5 for 3
        (changed(attn_res_block_size=1), "attn_res", 3 * 6 * 32 * (2 + 4 + 2)),
    ],
)
def test_one_field_changes_one_part_by_what_it_must(
    config: ModelConfig, part: str, more: int
) -> None:
    before, after = costs.decode_flops(CONFIG, 3, 10), costs.decode_flops(config, 3, 10)
    assert getattr(after, part) - getattr(before, part) == more


def test_parts_add_up() -> None:
    flops = costs.decode_flops(CONFIG, 3, 10)
    assert flops.total == sum(dataclasses.asdict(flops).values())
    assert all(part > 0 for part in dataclasses.asdict(flops).values())


def test_a_prompt_is_its_rows_with_logits_for_one() -> None:
    one, ten = costs.prefill_flops(CONFIG, 1), costs.prefill_flops(CONFIG, 10)
    assert ten.lm_head == one.lm_head
    assert ten.weights == 10 * one.weights
    assert ten.kda == 10 * one.kda
    assert ten.mla == 55 * one.mla


def test_state_of_a_step() -> None:
    one = costs.state_bytes(CONFIG, 1, 100)
    # states and tails in and out: 3 layers of 2 heads of 16 x 16, and 3 x 32 channels of 3 rows
    fixed = 2 * 3 * 4 * (2 * 256 + 3 * 32 * 3)
    assert one == fixed + 100 * 32 * 4
    assert costs.state_bytes(CONFIG, 1, 101) - one == 32 * 4
    assert costs.state_bytes(CONFIG, 2, 100) == 2 * one
    assert costs.state_bytes(changed(kda_layers=()), 1, 100) == 100 * 4 * 32 * 4
    assert costs.state_bytes(changed(kda_layers=()), 1, 100, 2) == 100 * 4 * 32 * 2
