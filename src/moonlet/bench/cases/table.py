"""Which builder makes the cases of which operator.

A new operator needs one line here and one builder; a test names operators without one.
"""

from __future__ import annotations

from collections.abc import Mapping

from moonlet.bench.cases import activation, attn_res, kda, linear, mla, moe, norm, rows, sample
from moonlet.bench.cases.case import Builder

__all__ = ["ALONG_CONTEXT", "CASES", "OVER_CONTEXT"]

CASES: Mapping[str, Builder] = {
    "rms_norm": norm.rms_norm,
    "gated_rms_norm": norm.gated_rms_norm,
    "short_conv": kda.short_conv,
    "short_conv_step": kda.short_conv_step,
    "kda_chunk": kda.kda_chunk,
    "kda_step": kda.kda_step,
    "kda_window": kda.kda_window,
    "kda_replay": kda.kda_replay,
    "mla_prefill": mla.mla_prefill,
    "mla_decode": mla.mla_decode,
    "mla_append": mla.mla_append,
    "attn_res_mix": attn_res.attn_res_mix,
    "attn_res_fold": attn_res.attn_res_fold,
    "attn_res_join": attn_res.attn_res_join,
    "route_topk": moe.route_topk,
    "moe_experts": moe.moe_experts,
    "moe_mxfp4": moe.moe_mxfp4,
    "situ_glu": activation.situ_glu,
    "swiglu": activation.swiglu,
    "linear": linear.linear,
    "linear_many": linear.linear_many,
    "embed": rows.embed,
    "add": rows.add,
    "sigmoid_gate": rows.sigmoid_gate,
    "sample": sample.sample,
}

# operators of which a context is the rows that a sequence has before
OVER_CONTEXT = frozenset({"kda_step", "mla_decode", "mla_prefill"})
# operators that take one sequence of that many rows
ALONG_CONTEXT = frozenset({"kda_chunk"})
