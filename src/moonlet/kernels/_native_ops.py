"""Calls of the native inference operators.

The operators beside each reference (``<op>/cpu.py``) check dtypes and shapes of what they get with
`require`; `call` checks device and layout, adds level and threads, and hands the addresses over.
Inference operators have no gradient: they compute in float32 and read weights as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from moonlet.core.errors import BackendError, BackendUnavailable, ShapeError
from moonlet.kernels import _native
from moonlet.kernels.spec import Spec

__all__ = ["call", "level", "refusal", "require"]


def refusal(spec: Spec) -> str | None:
    """Return why the native inference operators cannot serve, or None if they can."""
    is_built, reason = _native.availability()
    if not is_built:
        return reason
    if spec.device.type != "cpu":
        return f"the native kernels run on the CPU, not on {spec.device}"
    if not spec.is_inference:
        return "inference only: it has no gradient"
    if spec.dtype != torch.float32:
        return f"the native kernels compute in float32, not in {spec.dtype}"
    return None


@cache
def level() -> int:
    """Return the number of the instruction-set level in use.

    Raises:
        BackendUnavailable: The library is not available.
    """
    name = _native.isa_level()
    if name is None:
        _, reason = _native.availability()
        raise BackendUnavailable("native operators", {"cpu": reason})
    return _native.isa_levels().index(name)


def require(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Check what the library would trust.

    Raises:
        ShapeError: ``tensor`` has another dtype or another shape.
    """
    if tensor.dtype != dtype:
        raise ShapeError(f"{name} has dtype {tensor.dtype}; the native kernel reads {dtype}")
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} has shape {list(tensor.shape)}; {list(shape)} is needed")


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Run a function of the library on torch's number of threads.

    Args:
        name: Function without the ``moonlet_`` prefix.
        arguments: All but the level and the thread count, which are added; None is a null pointer.

    Raises:
        ShapeError: A tensor is not contiguous or not on the CPU.
        BackendUnavailable: The library is not available.
        BackendError: The library refused the call.
    """
    values = [_address(a) if isinstance(a, Tensor) else a for a in arguments]
    status = _function(name)(*values, level(), torch.get_num_threads())
    if status:
        raise BackendError(f"moonlet_{name} failed with status {status}")


@cache
def _function(name: str) -> Callable[..., int]:
    return getattr(_native.shared_library(), f"moonlet_{name}")


def _address(tensor: Tensor) -> int:
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise ShapeError(
            f"native operators take contiguous tensors on the CPU, got {tensor.dtype} on "
            f"{tensor.device} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()
