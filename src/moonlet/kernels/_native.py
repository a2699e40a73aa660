"""The native library: found, checked and called through its C interface.

The library has no Python symbols; it takes raw pointers and trusts its caller. This module is that
caller and the only user of ctypes: every wrapper checks device, dtype, layout and shape before it
hands over an address. ctypes releases the interpreter lock during a call.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonlet.core import env
from moonlet.core.errors import BackendError, BackendUnavailable, ShapeError

__all__ = ["availability", "isa_level", "isa_levels", "mxfp4_dequantize", "shared_library"]

logger = logging.getLogger(__name__)

ABI_VERSION = 7
GROUP_SIZE = 32

_I32 = ctypes.c_int32
_I64 = ctypes.c_int64
_F32 = FLOAT = ctypes.c_float
_POINTER = ctypes.c_void_p
_DEQUANTIZE = (_POINTER, _POINTER, _POINTER, _I64, _I64, _I64, _I64, _I64, _I32, _I32)

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "moonlet_abi_version": (),
    "moonlet_isa_level": (),
    "moonlet_mxfp4_dequantize_f32": _DEQUANTIZE,
    "moonlet_mxfp4_dequantize_bf16": _DEQUANTIZE,
    "moonlet_situ_forward": (*[_POINTER] * 3, _I64, *[_F32] * 2, _I32),
    "moonlet_situ_backward": (*[_POINTER] * 5, _I64, *[_F32] * 2, _I32),
    "moonlet_rms_norm_forward": (*[_POINTER] * 4, *[_I64] * 2, _F32, _I32),
    "moonlet_rms_norm_backward": (*[_POINTER] * 6, *[_I64] * 2, _I32),
    "moonlet_gated_norm_forward": (*[_POINTER] * 5, *[_I64] * 2, _F32, _I32),
    "moonlet_gated_norm_backward": (*[_POINTER] * 8, *[_I64] * 2, _I32),
    "moonlet_attn_res_forward": (_POINTER, _I64, *[_POINTER] * 4, *[_I64] * 2, _F32, _I32),
    "moonlet_attn_res_backward": (_POINTER, _I64, *[_POINTER] * 6, *[_I64] * 2, _I32),
    "moonlet_short_conv_forward": (*[_POINTER] * 5, *[_I64] * 3, _I32),
    "moonlet_short_conv_backward": (*[_POINTER] * 8, *[_I64] * 3, _I32),
    "moonlet_kda_forward": (*[_POINTER] * 7, _F32, *[_POINTER] * 5, *[_I64] * 4, _I32),
    "moonlet_kda_backward": (*[_POINTER] * 7, _F32, *[_POINTER] * 12, *[_I64] * 4, _I32),
    "moonlet_linear": (*[_POINTER] * 5, *[_I64] * 5, *[_I32] * 3),
    "moonlet_round_groups": (*[_POINTER] * 2, _I64, *[_I32] * 3),
    "moonlet_moe_mxfp4": (*[_POINTER] * 14, *[_I64] * 5, _I32, *[_F32] * 2, *[_I32] * 3),
    "moonlet_probe_read": (*[_POINTER] * 2, *[_I64] * 2, *[_I32] * 2),
    "moonlet_probe_fma": (_POINTER, *[_I64] * 2, *[_I32] * 2),
    "moonlet_situ_glu": (*[_POINTER] * 3, *[_I64] * 4, *[_F32] * 2, *[_I32] * 2),
    "moonlet_swiglu": (*[_POINTER] * 3, *[_I64] * 4, *[_I32] * 2),
    "moonlet_attn_res_mix": (_POINTER, _I64, *[_POINTER] * 2, *[_I64] * 2, _F32, *[_I32] * 2),
    "moonlet_attn_res_fold": (_POINTER, _I64, *[_POINTER] * 4, *[_I64] * 3, _F32, *[_I32] * 2),
    "moonlet_attn_res_join": (*[_POINTER] * 6, *[_I64] * 2, _F32, *[_I32] * 2),
    "moonlet_route_topk": (
        *(_POINTER, _POINTER, _I32, *[_POINTER] * 5, *[_I64] * 4),
        *(_I32, _F32, _I32, _I32),
    ),
    "moonlet_sample": (*[_POINTER] * 8, *[_I64] * 3, *[_I32] * 2),
    "moonlet_kda_step_f32": (*[_POINTER] * 7, _F32, *[_POINTER] * 3, *[_I64] * 9, *[_I32] * 2),
    "moonlet_kda_chunk_f32": (*[_POINTER] * 7, _F32, *[_POINTER] * 7, *[_I64] * 9, *[_I32] * 2),
    "moonlet_short_conv_f32": (*[_POINTER] * 9, *[_I64] * 4, *[_I32] * 2),
    "moonlet_rms_norm_f32": (*[_POINTER] * 3, *[_I64] * 3, _F32, *[_I32] * 2),
    "moonlet_gated_rms_norm_f32": (*[_POINTER] * 4, *[_I64] * 2, _F32, *[_I32] * 2),
    "moonlet_mla_absorbed_scratch": (_I64, _POINTER, *[_I64] * 6, *[_I32] * 2),
    "moonlet_mla_absorbed": (*[_POINTER] * 6, _I32, *[_POINTER] * 3, *[_I64] * 11, *[_I32] * 2),
    "moonlet_mla_expanded_scratch": (*[_POINTER] * 3, *[_I64] * 6, *[_I32] * 2),
    "moonlet_mla_expanded": (*[_POINTER] * 6, _I32, *[_POINTER] * 3, *[_I64] * 10, *[_I32] * 2),
    "moonlet_linear_many": (*[_POINTER] * 3, *[_I64] * 4, *[_I32] * 2),
    "moonlet_short_conv_step_f32": (
        *(_POINTER, _POINTER, _I64, *[_POINTER] * 3, *[_I64] * 4, *[_I32] * 2),
    ),
    "moonlet_kda_window_f32": (*[_POINTER] * 6, _F32, *[_POINTER] * 5, *[_I64] * 6, *[_I32] * 2),
    "moonlet_kda_replay_f32": (*[_POINTER] * 6, _F32, *[_POINTER] * 5, *[_I64] * 6, *[_I32] * 2),
    "moonlet_add_f32": (*[_POINTER] * 3, _I64, *[_I32] * 2),
    "moonlet_sigmoid_gate_f32": (*[_POINTER] * 3, _I64, *[_I32] * 2),
    "moonlet_embed": (*[_POINTER] * 2, _I32, _POINTER, *[_I64] * 3, *[_I32] * 2),
    "moonlet_mla_append": (*[_POINTER] * 4, *[_I64] * 6, *[_I32] * 2),
    "moonlet_call_number": (_POINTER,),
    "moonlet_replay": (_POINTER, _I64, _POINTER),
}
"""Argument types of every function in `csrc/moonlet.h`; each returns an int32."""

_STATUS = {1: "bad argument", 2: "this processor or build lacks the instruction-set level"}
_LEVEL_NAMES = env.CPU_ISA_LEVELS


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or None and why there is none; says so once in the log."""
    library, reason = _open()
    logger.info(reason)
    return library, reason


def _open() -> tuple[ctypes.CDLL | None, str]:
    path = _library_path()
    if path is None:
        return None, "native kernels: not built"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"native kernels: {path.name} does not load ({error})"
    for name, argtypes in PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            return None, f"native kernels: {path.name} lacks {name}; reinstall moonlet"
        function.argtypes = argtypes
        function.restype = _I32
    built = library.moonlet_abi_version()
    if built != ABI_VERSION:
        text = f"{path.name} has ABI {built}, not {ABI_VERSION}; reinstall moonlet"
        return None, f"native kernels: {text}"
    return library, "native kernels: built"


def _library_path() -> Path | None:
    # an editable install keeps the library in another folder than the sources, so every folder of
    # the package is searched
    package = importlib.import_module("moonlet.kernels")
    for folder in package.__path__:
        for name in ("libmoonlet.so", "libmoonlet.dylib"):
            path = Path(folder) / name
            if path.is_file():
                return path
    return None


def availability() -> tuple[bool, str]:
    """Return whether the native library can be called, and the reason in words."""
    library, reason = _load()
    return library is not None, reason


def shared_library() -> Any:
    """Return the loaded library, for the checked wrappers of this package.

    Raises:
        BackendUnavailable: The library is not available here.
    """
    loaded, reason = _load()
    if loaded is None:
        raise BackendUnavailable("the native library cannot be called", {"cpu": reason})
    return loaded


def isa_levels() -> tuple[str, ...]:
    """Return the instruction-set levels that can run here, lowest first; empty when not built."""
    library, _ = _load()
    return () if library is None else _LEVEL_NAMES[: library.moonlet_isa_level() + 1]


def isa_level() -> str | None:
    """Return the level in use: the highest one here that ``MOONLET_CPU_ISA`` allows.

    Raises:
        ConfigError: ``MOONLET_CPU_ISA`` is not a level.
    """
    cap = env.cpu_isa_cap()
    levels = isa_levels()
    if cap is not None:
        levels = tuple(x for x in levels if _rank(x) <= _rank(cap))
    return levels[-1] if levels else None


def _rank(level: str) -> int:
    return env.CPU_ISA_LEVELS.index(level)


def mxfp4_dequantize(
    packed: Tensor,
    scale: Tensor,
    out: Tensor,
    isa: str | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Decode MXFP4 into `out`.

    Args:
        packed: uint8 [..., I/2] on the CPU, contiguous.
        scale: uint8 [..., I/32] on the CPU, contiguous.
        out: float32 or bfloat16 [..., I] on the CPU, contiguous; overwritten.
        isa: Instruction-set level instead of the one of `isa_level`.
        num_threads: Upper bound of threads; torch's own number by default.

    Returns:
        `out`.

    Raises:
        BackendUnavailable: The library or the level is not available here.
        ShapeError: A tensor is on another device, of another dtype, strided, or of another shape.
    """
    library, reason = _load()
    if library is None:
        raise BackendUnavailable("mxfp4 dequantize cannot run natively", {"cpu": reason})
    _check("packed", packed, (torch.uint8,))
    _check("scale", scale, (torch.uint8,))
    _check("out", out, (torch.float32, torch.bfloat16))
    size = out.shape[-1]
    lead = out.shape[:-1]
    if size % GROUP_SIZE or packed.shape != (*lead, size // 2):
        raise ShapeError(
            f"packed has shape {list(packed.shape)} for an output of {list(out.shape)}; "
            "it holds two elements a byte and groups of 32"
        )
    if scale.shape != (*lead, size // GROUP_SIZE):
        raise ShapeError(
            f"scale has shape {list(scale.shape)} for an output of {list(out.shape)}; "
            "it holds one byte per 32 elements"
        )
    level = isa_level() if isa is None else isa
    if level not in isa_levels():
        text = f"this machine has {', '.join(isa_levels())}"
        raise BackendUnavailable(f"instruction-set level {level!r}", {"cpu": text})
    is_float = out.dtype == torch.float32
    name = "moonlet_mxfp4_dequantize_f32" if is_float else "moonlet_mxfp4_dequantize_bf16"
    status = getattr(library, name)(
        packed.data_ptr(),
        scale.data_ptr(),
        out.data_ptr(),
        out.numel() // size if size else 0,
        size // GROUP_SIZE,
        size // 2,
        size // GROUP_SIZE,
        size,
        _rank(level),
        torch.get_num_threads() if num_threads is None else num_threads,
    )
    if status:
        raise BackendError(f"{name} failed: {_STATUS.get(status, status)}")
    return out


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.device.type != "cpu":
        raise ShapeError(f"{name} is on {tensor.device}; move it to the CPU")
    if tensor.dtype not in dtypes:
        raise ShapeError(f"{name} has dtype {tensor.dtype}; use one of {dtypes}")
    if not tensor.is_contiguous():
        raise ShapeError(f"{name} is not contiguous; call .contiguous() first")
    if tensor.dim() < 1:
        raise ShapeError(f"{name} is a scalar; it needs at least one dimension")
