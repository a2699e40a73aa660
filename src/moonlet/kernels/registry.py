"""Choice of operator backends, made once when a model is built (style.md section 5).

Every operator has a reference and possibly faster backends with the same signature. `resolve`
returns a frozen table of callables; a wanted backend that cannot serve is an error with the reason,
``auto`` takes the first backend of the operator's documented order that can. The operators of
`ENGINE_OPERATORS` are no part of a model: the engine takes them with `resolve_operator`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moonlet.core.config import ModelConfig
from moonlet.core.errors import BackendUnavailable, ConfigError
from moonlet.kernels.spec import Spec

__all__ = [
    "ENGINE_OPERATORS",
    "Choice",
    "Kernels",
    "describe",
    "resolve",
    "resolve_operator",
]

logger = logging.getLogger(__name__)

Supports = Callable[[Spec], "str | None"]


def _always(spec: Spec) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One implementation of an operator.

    Attributes:
        name: Name used in ``wanted`` and in reports.
        target: ``module:function``, imported only when chosen.
        supports: Returns None, or the reason why the case cannot be served.
    """

    name: str
    target: str
    supports: Supports = _always

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


def _op(*backends: tuple[str, str]) -> tuple[Backend, ...]:
    return tuple(Backend(name=name, target=f"moonlet.kernels.{path}") for name, path in backends)


def _asks(module: str, function: str = "refusal") -> Supports:
    """Leave the answer to a module that is imported only when asked."""

    def supports(spec: Spec) -> str | None:
        return getattr(importlib.import_module(f"moonlet.kernels.{module}"), function)(spec)

    return supports


_TRAINS = _asks("_native_training")
_INFERS = _asks("_native_ops")


def _native(path: str, supports: Supports = _TRAINS) -> Backend:
    """A float32 backend for training: never an ``auto`` choice before the reference."""
    return Backend(name="native", target=f"moonlet.kernels.{path}", supports=supports)


def _cpu(path: str, supports: Supports = _INFERS) -> Backend:
    """A native backend for inference, preferred where it can serve."""
    return Backend(name="cpu", target=f"moonlet.kernels.{path}", supports=supports)


# the order is the order of preference of ``auto``
OPERATORS: Mapping[str, tuple[Backend, ...]] = {
    "rms_norm": (
        _cpu("rms_norm.cpu:rms_norm"),
        *_op(("reference", "rms_norm.reference:rms_norm")),
        _native("rms_norm.native:rms_norm"),
    ),
    "gated_rms_norm": (
        _cpu("rms_norm.cpu:gated_rms_norm"),
        *_op(("reference", "rms_norm.reference:gated_rms_norm")),
        _native("rms_norm.native:gated_rms_norm"),
    ),
    "short_conv": (
        _cpu("short_conv.cpu:short_conv", _asks("short_conv.cpu")),
        *_op(("reference", "short_conv.reference:short_conv")),
        _native("short_conv.native:short_conv"),
    ),
    "short_conv_step": (
        _cpu("short_conv.cpu:short_conv_step", _asks("short_conv.cpu")),
        *_op(("reference", "short_conv.reference:short_conv_step")),
    ),
    "kda_chunk": (
        _cpu("kda.cpu:kda_chunk", _asks("kda.cpu")),
        *_op(("torch", "kda.chunkwise:kda_chunk"), ("reference", "kda.reference:kda_chunk")),
        _native("kda.native:kda_chunk", _asks("kda.native")),
    ),
    "kda_step": (
        _cpu("kda.cpu:kda_step", _asks("kda.cpu")),
        *_op(("reference", "kda.reference:kda_step")),
    ),
    "kda_window": (
        _cpu("kda_window.cpu:kda_window", _asks("kda_window.cpu")),
        *_op(("reference", "kda_window.reference:kda_window")),
    ),
    "kda_replay": (
        _cpu("kda_window.cpu:kda_replay", _asks("kda_window.cpu")),
        *_op(("reference", "kda_window.reference:kda_replay")),
    ),
    "mla_prefill": (
        _cpu("mla.cpu:mla_prefill"),
        *_op(
            ("reference", "mla.reference:mla_prefill"), ("blockwise", "mla.blockwise:mla_prefill")
        ),
    ),
    "mla_decode": (
        _cpu("mla.cpu:mla_decode"),
        *_op(("reference", "mla.reference:mla_decode")),
    ),
    "mla_append": (
        _cpu("mla.cpu:mla_append"),
        *_op(("reference", "mla.reference:mla_append")),
    ),
    "attn_res_mix": (
        _cpu("attn_res.cpu:attn_res_mix"),
        *_op(("reference", "attn_res.reference:attn_res_mix")),
        _native("attn_res.native:attn_res_mix"),
    ),
    "attn_res_fold": (
        _cpu("attn_res.cpu:attn_res_fold"),
        *_op(("reference", "attn_res.reference:attn_res_fold")),
    ),
    "attn_res_join": (
        _cpu("attn_res.cpu:attn_res_join"),
        *_op(("reference", "attn_res.reference:attn_res_join")),
    ),
    "route_topk": (
        _cpu("route_topk.cpu:route_topk", _asks("route_topk.cpu")),
        *_op(("reference", "route_topk.reference:route_topk")),
    ),
    "moe_experts": (
        _cpu("moe_experts.cpu:moe_experts"),
        *_op(
            ("torch", "moe_experts.grouped:moe_experts"),
            ("reference", "moe_experts.reference:moe_experts"),
            ("sorted", "moe_experts.sorted:moe_experts"),
        ),
    ),
    "moe_mxfp4": (
        _cpu("moe_mxfp4.cpu:moe_mxfp4", _asks("moe_mxfp4.cpu")),
        *_op(("reference", "moe_mxfp4.reference:moe_mxfp4")),
    ),
    "situ_glu": (
        _cpu("situ.cpu:situ_glu"),
        *_op(("reference", "situ.reference:situ_glu")),
        _native("situ.native:situ_glu"),
    ),
    "swiglu": (_cpu("situ.cpu:swiglu"), *_op(("reference", "situ.reference:swiglu"))),
    "linear": (
        _cpu("linear.cpu:linear"),
        *_op(("reference", "linear.reference:linear")),
    ),
    "linear_many": (
        _cpu("linear.cpu:linear_many"),
        *_op(("reference", "linear.reference:linear_many")),
    ),
    "embed": (_cpu("rows.cpu:embed"), *_op(("reference", "rows.reference:embed"))),
    "add": (_cpu("rows.cpu:add"), *_op(("reference", "rows.reference:add"))),
    "sigmoid_gate": (
        _cpu("rows.cpu:sigmoid_gate"),
        *_op(("reference", "rows.reference:sigmoid_gate")),
    ),
    "sample": (
        _cpu("sample.cpu:sample", _asks("sample.cpu")),
        *_op(("reference", "sample.reference:sample")),
    ),
}

ENGINE_OPERATORS = frozenset({"mla_append", "sample"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which backend an operator got, and why not the ones before it."""

    op: str
    backend: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The chosen operators; fields are callables with the signature of their reference."""

    rms_norm: Callable[..., Any]
    gated_rms_norm: Callable[..., Any]
    short_conv: Callable[..., Any]
    short_conv_step: Callable[..., Any]
    kda_chunk: Callable[..., Any]
    kda_step: Callable[..., Any]
    kda_window: Callable[..., Any]
    kda_replay: Callable[..., Any]
    mla_prefill: Callable[..., Any]
    mla_decode: Callable[..., Any]
    attn_res_mix: Callable[..., Any]
    attn_res_fold: Callable[..., Any]
    attn_res_join: Callable[..., Any]
    route_topk: Callable[..., Any]
    moe_experts: Callable[..., Any]
    moe_mxfp4: Callable[..., Any]
    situ_glu: Callable[..., Any]
    swiglu: Callable[..., Any]
    linear: Callable[..., Any]
    linear_many: Callable[..., Any]
    embed: Callable[..., Any]
    add: Callable[..., Any]
    sigmoid_gate: Callable[..., Any]
    choices: tuple[Choice, ...]

    def backend(self, op: str) -> str:
        """Return the name of the backend that ``op`` got."""
        return next(choice.backend for choice in self.choices if choice.op == op)


def _choose(op: str, wanted: str, spec: Spec) -> tuple[Backend, str]:
    backends = OPERATORS[op]
    if wanted != "auto" and wanted not in {b.name for b in backends}:
        raise BackendUnavailable(
            f"operator {op} has no backend {wanted!r}; choose one of "
            f"{', '.join(b.name for b in backends)}",
            {},
        )
    refused: dict[str, str] = {}
    for backend in backends:
        if wanted not in ("auto", backend.name):
            continue
        reason = backend.supports(spec)
        if reason is None:
            skipped = "; ".join(f"{n}: {r}" for n, r in refused.items())
            return backend, skipped or ("asked for" if wanted != "auto" else "first in order")
        refused[backend.name] = reason
    raise BackendUnavailable(f"operator {op}: backend {wanted!r} cannot serve", refused)


def resolve(
    device: torch.device | str = "cpu",
    config: ModelConfig | None = None,
    wanted: Mapping[str, str] | str = "auto",
    *,
    dtype: torch.dtype = torch.float32,
    is_inference: bool = False,
) -> Kernels:
    """Choose every operator's backend.

    Args:
        device: Where the model will run.
        config: The architecture, for backends that serve only some shapes.
        wanted: One backend name for all operators that have it (``auto``, ``reference``), or a
            mapping from operator to backend name.
        dtype: Dtype of the model's activations.
        is_inference: Whether gradients are never wanted, which lets the native inference kernels
            serve.

    Raises:
        ConfigError: ``wanted`` names an operator that a model does not have.
        BackendUnavailable: A named backend does not exist or cannot serve.
    """
    spec = Spec(device=torch.device(device), config=config, dtype=dtype, is_inference=is_inference)
    per_op = {"*": wanted} if isinstance(wanted, str) else dict(wanted)
    operators = [op for op in OPERATORS if op not in ENGINE_OPERATORS]
    unknown = sorted(set(per_op) - {*operators, "*"})
    if unknown:
        raise ConfigError(
            f"kernels names {', '.join(unknown)}, which a model does not have; "
            f"its operators are {', '.join(operators)}"
        )
    chosen: dict[str, Callable[..., Any]] = {}
    choices: list[Choice] = []
    for op in operators:
        name = per_op.get(op, per_op.get("*", "auto"))
        backend, reason = _choose(op, name, spec)
        chosen[op] = backend.load()
        choices.append(Choice(op=op, backend=backend.name, reason=reason))
    logger.info("kernels: %s", ", ".join(f"{c.op}={c.backend}" for c in choices))
    return Kernels(**chosen, choices=tuple(choices))


def resolve_operator(
    op: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Callable[..., Any]:
    """Choose one operator for inference, for callers that have no model at hand.

    Args:
        op: One of `OPERATORS`.
        device: Where its tensors are.
        dtype: Dtype of its activations.

    Raises:
        BackendUnavailable: No backend can serve.
    """
    spec = Spec(device=torch.device(device), dtype=dtype, is_inference=True)
    return _choose(op, "auto", spec)[0].load()


def describe(device: torch.device | str = "cpu") -> tuple[Choice, ...]:
    """Return what ``auto`` chooses for serving on ``device``, for ``moonlet env``."""
    spec = Spec(device=torch.device(device), is_inference=True)
    chosen = {op: _choose(op, "auto", spec) for op in OPERATORS}
    return tuple(
        Choice(op=op, backend=backend.name, reason=reason)
        for op, (backend, reason) in chosen.items()
    )
