"""Bytes and floating point operations, by formula.

The cost of a call is what any implementation must do: every input read once, every output written
once, and the arithmetic of the equation. A multiply-add counts two operations; a reciprocal, root,
exponential or hyperbolic tangent counts one. What an implementation does beyond that (padding, a
chunk form's triangular products, copies) is not useful work and lowers the fraction of the bound.

Activations are float32. Letters as in the kernels: H heads, K key and V value width, D hidden,
R latent width, E experts, A experts per token, F intermediate width.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonlet.core.budget import derive_budget
from moonlet.core.config import ModelConfig
from moonlet.core.storage import KIMI_LINEAR_STORAGE

__all__ = [
    "Cost",
    "StepFlops",
    "absorbed_flops",
    "attn_res_fold",
    "attn_res_join",
    "attn_res_mix",
    "decode_flops",
    "expanded_flops",
    "gated_rms_norm",
    "kda",
    "kda_window",
    "linear",
    "mix_sources",
    "mla_decode",
    "mla_prefill",
    "moe_experts",
    "prefill_flops",
    "rms_norm",
    "route_topk",
    "sample",
    "short_conv",
    "situ_glu",
    "state_bytes",
    "swiglu",
]

F32 = 4
I64 = 8
# scale, maximum, exponential, sum, division of one attention score
SOFTMAX_FLOPS = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one call.

    Attributes:
        num_bytes: Bytes read and written.
        flops: Floating point operations.
    """

    num_bytes: float
    flops: float

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of both."""
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)


# ---- one operator ------------------------------------------------------------------------------


def rms_norm(rows: int, size: int) -> Cost:
    """``x rsqrt(mean x^2) w``: x in, weight in, y out; 2 for the square, 2 for both products."""
    return Cost(F32 * (2 * rows * size + size), 4 * rows * size)


def gated_rms_norm(rows: int, size: int) -> Cost:
    """As `rms_norm` with a gate in: its sigmoid (3: exponential, sum, reciprocal) and product."""
    return Cost(F32 * (3 * rows * size + size), 8 * rows * size)


def short_conv(rows: int, num_seqs: int, channels: int, taps: int) -> Cost:
    """Rows in and out, taps in, carries in and out; 2 per tap and 4 for SiLU."""
    carries = 2 * num_seqs * channels * (taps - 1)
    values = 2 * rows * channels + channels * taps + carries
    return Cost(F32 * values, rows * channels * (2 * taps + 4))


def kda(rows: int, num_seqs: int, heads: int, key: int, value: int) -> Cost:
    """The recurrence of `kda_step` and `kda_chunk`, whatever form computes it.

    Bytes: q, k, z, v, o and beta of every row, the states in and out, ``A_log`` and ``dt_bias``.
    Per row and head 7 K V: decay 1, ``S^T k`` 2, rank-one update 2, ``S^T q`` 2. Beside it
    14 K for both L2 norms (3 each), the scale of q (1) and the gate (7: bias, scale, sigmoid,
    bound, exponential), and 2 V for ``beta (v - S^T k)``.
    """
    per_row = heads * (3 * key + 2 * value + 1)
    values = rows * per_row + 2 * num_seqs * heads * key * value + heads * (key + 1)
    return Cost(F32 * values, rows * heads * (7 * key * value + 14 * key + 2 * value))


def kda_window(
    rows: int, num_seqs: int, heads: int, key: int, value: int, taps: int, *, moves: bool
) -> Cost:
    """Convolution and recurrence of windows: `kda_window`, or `kda_replay`, which ``moves`` memory.

    Bytes: raw q, k, v, z and beta of every row, taps, ``A_log`` and ``dt_bias``, states and carries
    in; out the outputs of every row, or states and carries.
    """
    channels = heads * (2 * key + value)
    inputs = rows * (channels + heads * (key + 1)) + channels * taps + heads * (key + 1)
    memory = num_seqs * (heads * key * value + channels * (taps - 1))
    written = memory if moves else rows * heads * value
    work = kda(rows, 0, heads, key, value).flops + short_conv(rows, 0, channels, taps).flops
    return Cost(F32 * (inputs + memory + written), work)


def mla_decode(
    num_seqs: int,
    context: int,
    heads: int,
    nope: int,
    shared: int,
    latent: int,
    value: int,
    weight_bytes: int = F32,
) -> Cost:
    """Absorbed attention of one row per sequence over ``context`` cached rows each.

    Bytes: the cached rows, the expansion (``weight_bytes`` an element), queries and outputs, not
    the table of pages. Operations: `absorbed_flops`.
    """
    cached = num_seqs * context * (latent + shared)
    expansion = heads * (nope + value) * latent
    in_out = num_seqs * heads * (nope + shared + value)
    flops = num_seqs * absorbed_flops(1, context - 1, heads, nope, shared, latent, value)
    return Cost(F32 * (cached + in_out) + weight_bytes * expansion, flops)


def mla_prefill(
    rows: int,
    start: int,
    heads: int,
    nope: int,
    shared: int,
    latent: int,
    value: int,
    weight_bytes: int = F32,
) -> Cost:
    """Causal attention of ``rows`` new rows of one sequence after ``start`` others.

    Bytes as in `mla_decode`. Operations: of the form that needs fewer, absorbed for a few rows over
    a long context, else expanded.
    """
    cached = (start + rows) * (latent + shared)
    expansion = heads * (nope + value) * latent
    in_out = rows * heads * (nope + shared + value)
    widths = (heads, nope, shared, latent, value)
    flops = min(form(rows, start, *widths) for form in (absorbed_flops, expanded_flops))
    return Cost(F32 * (cached + in_out) + weight_bytes * expansion, flops)


def absorbed_flops(
    rows: int, start: int, heads: int, nope: int, shared: int, latent: int, value: int
) -> int:
    """Operations of attention in which queries meet the latents, arguments as in `mla_prefill`.

    Per head and new row: absorbing the expansion into query and output 2 R (nope + V); per visible
    pair its score over R + shared, its weight over R, and the softmax.
    """
    per_pair = 2 * (latent + shared) + 2 * latent + SOFTMAX_FLOPS
    return heads * (rows * 2 * latent * (nope + value) + _pairs(rows, start) * per_pair)


def expanded_flops(
    rows: int, start: int, heads: int, nope: int, shared: int, latent: int, value: int
) -> int:
    """Operations of attention over expanded keys and values, arguments as in `mla_prefill`.

    Per head: expanding every cached row 2 R (nope + V), and per visible pair its score, its weight
    and the softmax.
    """
    per_pair = 2 * (nope + shared) + 2 * value + SOFTMAX_FLOPS
    return heads * ((start + rows) * 2 * latent * (nope + value) + _pairs(rows, start) * per_pair)


def _pairs(rows: int, start: int) -> int:
    """Pairs of a new row and one that it sees."""
    return rows * start + rows * (rows + 1) // 2


def attn_res_mix(rows: int, sources: int, size: int) -> Cost:
    """Sources and weight in, mix out; per source 2 each for square, score and weighted sum."""
    values = rows * size * (sources + 1) + size
    return Cost(F32 * values, 6 * rows * sources * size)


def attn_res_fold(rows: int, blocks: int, mixes: int, size: int) -> Cost:
    """Blocks and weights in, partial sums of every mix out; the squares are shared by the mixes."""
    values = rows * size * (blocks + mixes) + mixes * (size + 2 * rows)
    return Cost(F32 * values, rows * blocks * size * (2 + 4 * mixes))


def attn_res_join(rows: int, size: int) -> Cost:
    """Partial sum, prefix and weight in, mix out; square 2, score 2, blend 3, division 1."""
    return Cost(F32 * (3 * rows * size + size + 2 * rows), 8 * rows * size)


def route_topk(rows: int, size: int, experts: int, active: int) -> Cost:
    """Rows, float32 weight and bias in; scores, ids, weights and cut-off out.

    The product, and 4 per score for the sigmoid and the bias. Ranking does no arithmetic.
    """
    values = rows * size + experts * (size + 1) + rows * (experts + active + 1)
    return Cost(F32 * values + I64 * rows * active, 2 * rows * size * experts + 4 * rows * experts)


def moe_experts(
    rows: int, active: int, distinct: int, size: int, width: int, expert_bytes: float
) -> Cost:
    """Three matrices of every distinct expert in, rows in and out.

    Args:
        rows: Rows T.
        active: Experts per row A.
        distinct: Different experts that the rows chose.
        size: Input width R.
        width: Intermediate width F.
        expert_bytes: Stored bytes of one expert's three matrices.
    """
    values = 2 * rows * size + rows * active
    activation = situ_glu(width).flops
    flops = rows * active * (6 * size * width + activation + 2 * size)
    return Cost(F32 * values + I64 * rows * active + distinct * expert_bytes, flops)


def situ_glu(count: int) -> Cost:
    """Gate and up in, product out: two caps of 3, a sigmoid of 3, two products."""
    return Cost(F32 * 3 * count, 11 * count)


def swiglu(count: int) -> Cost:
    """Gate and up in, product out: a sigmoid of 3, two products."""
    return Cost(F32 * 3 * count, 5 * count)


def linear(rows: int, size_in: int, size_out: int, weight_bytes: float) -> Cost:
    """Rows in and out, the matrix in as stored (``weight_bytes`` in all, its scales included)."""
    values = rows * (size_in + size_out)
    return Cost(F32 * values + weight_bytes, 2 * rows * size_in * size_out)


def embed(rows: int, size: int, element_bytes: int) -> Cost:
    """Ids and rows of the table as stored in, rows out; nothing is computed."""
    return Cost(rows * (I64 + size * (element_bytes + F32)), 0)


def add(count: int) -> Cost:
    """Two inputs, their sum out."""
    return Cost(F32 * 3 * count, count)


def sigmoid_gate(count: int) -> Cost:
    """Input and gate in, product out: a sigmoid of 3, one product."""
    return Cost(F32 * 3 * count, 4 * count)


def mla_append(rows: int, row_size: int) -> Cost:
    """Row numbers and rows in, rows out; nothing is computed."""
    return Cost(rows * (I64 + 2 * F32 * row_size), 0)


def sample(rows: int, vocab: int, parameters: int) -> Cost:
    """Logits and some parameters of every row in, its id out.

    Per logit the maximum, difference, scale, exponential, sum and the running sum of the draw; cuts
    do no arithmetic.
    """
    return Cost(rows * (F32 * vocab + I64 * (parameters + 1)), 6 * rows * vocab)


# ---- the whole model ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Operations of one forward pass by part.

    Attributes:
        weights: Every weight that a row passes through, once per row: two each.
        kda: The recurrences.
        mla: Scores and weighted sums over the context (the expansion counts as a weight).
        attn_res: The mixes over depth.
        lm_head: Logits.
    """

    weights: float
    kda: float
    mla: float
    attn_res: float
    lm_head: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.weights + self.kda + self.mla + self.attn_res + self.lm_head


def mix_sources(config: ModelConfig) -> list[int]:
    """Return the sources of every AttnRes mix in network order; empty without AttnRes.

    With blocks of b layers, the attention of layer L mixes ceil(L / b) blocks and the prefix sum
    (none at L = 0: the embedding passes), its FFN floor(L / b) + 1 and the prefix sum, and the
    output every block and the prefix sum (model.md section 3.2).
    """
    block, layers = config.attn_res_block_size, config.num_hidden_layers
    if block is None:
        return []
    sources: list[int] = []
    for layer in range(layers):
        sources += [-(-layer // block) + 1 if layer else 0, layer // block + 2]
    return [*sources, (layers - 1) // block + 2]


def _flops(config: ModelConfig, rows: int, pair_flops: float, logits_rows: int) -> StepFlops:
    budget = derive_budget(config, storage=KIMI_LINEAR_STORAGE)
    heads, width = config.kda.num_heads, config.kda.head_dim
    return StepFlops(
        weights=2.0 * rows * budget.active_parameters_without_tables,
        kda=len(config.kda_layers) * kda(rows, 0, heads, width, width).flops,
        mla=len(config.mla_layers) * config.mla.num_attention_heads * pair_flops,
        attn_res=sum(attn_res_mix(rows, n, config.hidden_size).flops for n in mix_sources(config)),
        lm_head=2.0 * logits_rows * config.hidden_size * config.vocab_size,
    )


def decode_flops(config: ModelConfig, rows: int, context: float) -> StepFlops:
    """Operations of one decode step.

    Args:
        config: Architecture.
        rows: Sequences; each gets logits.
        context: Mean length of a sequence, the new row included.
    """
    mla = config.mla
    per_row = 2 * mla.cache_size + 2 * mla.kv_lora_rank + SOFTMAX_FLOPS
    return _flops(config, rows, rows * context * per_row, rows)


def prefill_flops(config: ModelConfig, num_tokens: int) -> StepFlops:
    """Operations of one prompt of ``num_tokens`` from its start, logits for the last row only."""
    mla = config.mla
    pairs = num_tokens * (num_tokens + 1) // 2
    per_pair = 2 * mla.qk_head_dim + 2 * mla.v_head_dim + SOFTMAX_FLOPS
    return _flops(config, num_tokens, pairs * per_pair, 1)


def state_bytes(config: ModelConfig, rows: int, context: int, element_bytes: int = F32) -> float:
    """Bytes of state that a decode step moves.

    Recurrent states (float32) and convolution tails are read and written, the cached rows of every
    Gated MLA layer read.

    Args:
        config: Architecture.
        rows: Sequences.
        context: Length of each.
        element_bytes: Bytes of one cached value or convolution input.
    """
    state = derive_budget(config, storage=KIMI_LINEAR_STORAGE).state
    # the budget counts convolution and cache at two bytes
    scale = element_bytes / 2
    moved = 2 * (state.recurrent_bytes + scale * state.conv_bytes)
    return rows * (moved + scale * context * state.mla_bytes_per_token)
