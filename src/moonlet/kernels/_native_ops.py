"""Calls of the native inference operators.

The operators beside each reference (``<op>/cpu.py``) check dtypes and shapes of what they get with
`require`; `call` checks device and layout, adds level and threads, and hands the addresses over.
Inference operators have no gradient: they compute in float32 and read weights as they are stored.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, Protocol, Union

import torch
from torch import Tensor

from moonlet.core.errors import BackendError, BackendUnavailable, ShapeError
from moonlet.kernels import _native
from moonlet.kernels.spec import Spec

__all__ = [
    "Recorder",
    "Rows",
    "address",
    "call",
    "level",
    "query",
    "recording",
    "refusal",
    "require",
]


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


class Rows(NamedTuple):
    """A tensor read by rows with their stride; whoever makes this has checked its layout."""

    tensor: Tensor


Argument = Union[Tensor, Rows, "array[int]", int, float, None]


def call(name: str, *arguments: Argument) -> None:
    """Run a function of the library on torch's number of threads.

    Args:
        name: Function without the ``moonlet_`` prefix.
        arguments: All but the level and the thread count, which are added; None is a null pointer,
            an array is handed over by its address.

    Raises:
        ShapeError: A tensor is not contiguous or not on the CPU.
        BackendUnavailable: The library is not available.
        BackendError: The library refused the call.
    """
    values = [_value(argument) for argument in arguments]
    values += (level(), torch.get_num_threads())
    function = f"moonlet_{name}"
    status = _function(function)(*values)
    if status:
        raise BackendError(f"{function} failed with status {status}")
    if _recording.tape is not None:
        _recording.tape.add(function, values, arguments)


def query(name: str, first: Sequence[Argument], then: Sequence[Argument]) -> int:
    """Ask the library for one number, which it writes between the ``first`` and other arguments.

    Raises:
        ShapeError: A tensor is not contiguous or not on the CPU.
        BackendError: The library refused the call.
    """
    answer = array("q", [0])
    values = [_value(argument) for argument in (*first, answer, *then)]
    status = _function(f"moonlet_{name}")(*values, level(), torch.get_num_threads())
    if status:
        raise BackendError(f"moonlet_{name} failed with status {status}")
    return answer[0]


class Recorder(Protocol):
    """What hears of every call; see `kernels.tape`."""

    def add(self, name: str, values: Sequence[int | float | None], kept: object) -> None:
        """Note a call; ``kept`` holds the memory that the values point to."""
        ...


class _Recording(threading.local):
    tape: Recorder | None = None


_recording = _Recording()


@contextmanager
def recording(tape: Recorder) -> Generator[None]:
    """Tell ``tape`` of every call that this thread makes inside."""
    before, _recording.tape = _recording.tape, tape
    try:
        yield
    finally:
        _recording.tape = before


@cache
def _function(name: str) -> Callable[..., int]:
    return getattr(_native.shared_library(), name)


def _value(argument: Argument) -> int | float | None:
    if isinstance(argument, Tensor):
        return address(argument)
    if isinstance(argument, Rows):
        return argument.tensor.data_ptr()
    return argument.buffer_info()[0] if isinstance(argument, array) else argument


def address(tensor: Tensor) -> int:
    """Return where a contiguous tensor on the CPU lies.

    Raises:
        ShapeError: It is strided or elsewhere.
    """
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise ShapeError(
            f"native operators take contiguous tensors on the CPU, got {tensor.dtype} on "
            f"{tensor.device} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()
