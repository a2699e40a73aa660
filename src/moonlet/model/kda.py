"""Kimi Delta Attention layer (model.md section 3.3; report section 2.1).

Projections, short convolution over q, k and v, the delta recurrence, the gated output norm.

Letters: T packed rows, D hidden, H heads, K head width, C = 3 H K convolution channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moonlet.core.config import ModelConfig
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.registry import Kernels
from moonlet.model.layers import Linear, parameter
from moonlet.model.state import BatchMeta, KDASlots, KDAState, KDAWindow

__all__ = ["KDA"]

# decay logits, write logits, A_log, dt_bias, lower bound
Gates = tuple[Tensor, Tensor, Tensor, Tensor, "float | None"]


class _Conv(nn.Module):
    """Holder of one depthwise kernel, float32 ``[H * K, 1, taps]`` as published."""

    def __init__(self, channels: int, taps: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = parameter(channels, 1, taps, dtype=torch.float32, device=device)


class _Scale(nn.Module):
    """Holder of the float32 output norm scale, shared by heads."""

    def __init__(self, size: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=torch.float32, device=device)


class KDA(nn.Module):
    """One Kimi Delta Attention layer."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        kda, hidden = config.kda, config.hidden_size
        width = kda.projection_size
        self.num_heads, self.head_dim = kda.num_heads, kda.head_dim
        self.lower_bound = kda.gate_lower_bound
        self.eps = config.rms_norm_eps
        self.q_proj = Linear(hidden, width, dtype, device)
        self.k_proj = Linear(hidden, width, dtype, device)
        self.v_proj = Linear(hidden, width, dtype, device)
        self.q_conv1d = _Conv(width, kda.short_conv_kernel_size, device)
        self.k_conv1d = _Conv(width, kda.short_conv_kernel_size, device)
        self.v_conv1d = _Conv(width, kda.short_conv_kernel_size, device)
        self.f_a_proj = Linear(hidden, kda.head_dim, dtype, device)
        self.f_b_proj = Linear(kda.head_dim, width, dtype, device)
        self.dt_bias = parameter(width, dtype=torch.float32, device=device)
        self.A_log = parameter(kda.num_heads, dtype=torch.float32, device=device)
        self.b_proj = Linear(hidden, kda.num_heads, dtype, device)
        if kda.use_full_rank_gate:
            self.g_proj = Linear(hidden, width, dtype, device)
        else:
            self.g_a_proj = Linear(hidden, kda.head_dim, dtype, device)
            self.g_b_proj = Linear(kda.head_dim, width, dtype, device)
        self.o_norm = _Scale(kda.head_dim, device)
        self.o_proj = Linear(width, hidden, dtype, device)
        self._full_rank_gate = kda.use_full_rank_gate
        self._kernels = kernels

    def _projections(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v side by side, decay logits, write logits and output gate logits."""
        gate = self.g_proj if self._full_rank_gate else self.g_a_proj
        qkv = (self.q_proj.stored, self.k_proj.stored, self.v_proj.stored)
        groups = (qkv, (self.f_a_proj.stored,), (self.b_proj.stored,), (gate.stored,))
        raw_TC, decay, beta_TH, gate_TF = self._kernels.linear_many(x_TD, groups)
        if not self._full_rank_gate:
            gate_TF = self.g_b_proj(gate_TF)
        return raw_TC, self.f_b_proj(decay), beta_TH, gate_TF

    def forward(self, x_TD: Tensor, meta: BatchMeta, state: KDAState) -> Tensor:
        """Run the layer and update ``state``; ``[T, D] -> [T, D]``."""
        heads = (self.num_heads, self.head_dim)
        raw_TC, decay, beta_TH, gate = self._projections(x_TD)
        z = decay.unflatten(-1, heads)
        gates = (z, beta_TH, self.A_log, self.dt_bias.view(heads), self.lower_bound)
        if meta.is_plain_step:
            # the states are most of what a decode step moves: they are updated where they lie
            o = self._step(raw_TC, gates, state.in_place(meta))
        elif state.keeps_inputs and any(meta.tentative):
            o = self._with_windows(raw_TC, gates, meta, state)
        else:
            o = self._chunk(raw_TC, gates, meta, state)
        gate = gate.unflatten(-1, heads)
        y = self._kernels.gated_rms_norm(o, self.o_norm.weight, gate, self.eps)
        return self.o_proj(y.flatten(-2))

    def _step(self, raw_SC: Tensor, gates: Gates, memory: KDASlots) -> Tensor:
        slots_S = memory.slots_S
        y_SC = self._kernels.short_conv_step(raw_SC, self._taps(), memory.conv_GCW, slots_S)
        q, k, v = self._heads(y_SC)
        return self._kernels.kda_step(q, k, v, *gates, memory.recurrent_GHKV, slots_S)

    def _chunk(self, raw_TC: Tensor, gates: Gates, meta: BatchMeta, state: KDAState) -> Tensor:
        carry, emit_at = state.load_conv(meta), meta.tentative_rows_E
        taps_CJ = torch.cat(self._taps())
        conv = self._kernels.short_conv(raw_TC, taps_CJ, carry, meta.ragged, emit_at)
        q, k, v = self._heads(conv.y_TC)
        o, recurrent, emitted = self._kernels.kda_chunk(
            q, k, v, *gates, state.load(meta), meta.ragged, emit_at
        )
        state.store(meta, recurrent, conv.carry_SCW, emitted, conv.emitted_ECW)
        return o

    def _with_windows(
        self, raw_TC: Tensor, gates: Gates, meta: BatchMeta, state: KDAState
    ) -> Tensor:
        """Run windows without changing their state, and the other sequences as without windows."""
        windows, settled = meta.window_parts
        assert windows is not None
        memory = state.in_place(meta)
        rows = KDAWindow(raw_TC, self._taps(), *gates)
        kept = state.keep(meta, rows, self._kernels.kda_replay)
        slots_S = memory.slots_S
        if settled is not None:
            slots_S = slots_S.index_select(0, windows.seqs)
        arenas = (memory.recurrent_GHKV, memory.conv_GCW)
        o_EHK = self._kernels.kda_window(*kept, *arenas, slots_S, windows.ragged)
        if settled is None:
            return o_EHK
        z, beta, a_log, dt_bias, bound = gates
        at, others_S = settled.rows, memory.slots_S.index_select(0, settled.seqs)
        gates_of = (z.index_select(0, at), beta.index_select(0, at), a_log, dt_bias, bound)
        raw_of = raw_TC.index_select(0, at)
        o_of = self._settle(raw_of, gates_of, settled.ragged, memory._replace(slots_S=others_S))
        o_THK = o_EHK.new_empty((meta.ragged.num_rows, *o_EHK.shape[1:]))
        o_THK.index_copy_(0, windows.rows, o_EHK).index_copy_(0, at, o_of)
        return o_THK

    def _settle(self, raw_TC: Tensor, gates: Gates, ragged: Ragged, memory: KDASlots) -> Tensor:
        """Run the sequences of ``memory.slots_S`` and move their memory on."""
        if ragged.is_single_rows:
            return self._step(raw_TC, gates, memory)
        recurrent_GHKV, conv_GCW, slots_S = memory
        carry_SCW = conv_GCW.index_select(0, slots_S)
        conv = self._kernels.short_conv(raw_TC, torch.cat(self._taps()), carry_SCW, ragged)
        q, k, v = self._heads(conv.y_TC)
        state_SHKV = recurrent_GHKV.index_select(0, slots_S)
        result = self._kernels.kda_chunk(q, k, v, *gates, state_SHKV, ragged)
        recurrent_GHKV.index_copy_(0, slots_S, result.state_SHKV)
        conv_GCW.index_copy_(0, slots_S, conv.carry_SCW)
        return result.o_THV

    def _taps(self) -> list[Tensor]:
        """Taps of q, k and v, ``[H * K, J]`` each."""
        return [conv.weight[:, 0] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]

    def _heads(self, qkv: Tensor) -> list[Tensor]:
        """Cut q, k, v apart: three ``[T, H, K]``."""
        heads = (self.num_heads, self.head_dim)
        return [part.unflatten(-1, heads) for part in qkv.chunk(3, dim=-1)]
