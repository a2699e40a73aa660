"""Native calls of one computation, recorded once and then run again with a single call.

A decode step of a small model is some hundred native calls, each of which takes less time than
Python needs to prepare it, and from step to step nothing in them changes but the numbers in the
tensors. A `Tape` hears of every call while the computation runs as usual, keeps all memory that it
touched, and runs the same calls on the same memory again.

That is right only if nothing else computes: while recording, every torch operator but views and
fresh memory marks the tape as unusable, with the operator's name as the reason. Values that Python
read (sizes, lengths, branches) are fixed; who records answers for them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moonlet.core.errors import BackendError
from moonlet.kernels import _native, _native_ops

__all__ = ["Tape"]

# fresh memory, and constants that depend on Python numbers only
_FRESH = ("empty", "new_empty", "empty_like", "empty_strided", "arange")


class Tape:
    """Recorded native calls with the memory that they use.

    Attributes:
        refusal: Why the calls cannot be run again, or None.
        num_calls: Recorded calls.
        num_bytes: Memory that was made while recording and is kept.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.num_calls = 0
        self.num_bytes = 0
        self._words = array("q")
        self._kept: list[object] = []

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record what this thread computes inside, in inference mode; it runs as it would."""
        with _native_ops.recording(self), _Watch(self):
            yield

    def add(self, name: str, values: Sequence[int | float | None], kept: object) -> None:
        """Note a call, in order; ``kept`` holds the memory that its values point to."""
        number = _native.shared_library().moonlet_call_number(name.encode())
        if number < 0:
            self.refuse(f"{name} cannot be run from a tape")
            return
        types = _native.PROTOTYPES[name]
        self._words.append(number)
        self._words.extend(map(_word, values, types))
        self._kept.append(kept)
        self.num_calls += 1

    def keep(self, tensor: Tensor) -> None:
        """Hold memory that was made while recording."""
        self._kept.append(tensor)
        self.num_bytes += tensor.untyped_storage().nbytes()

    def refuse(self, reason: str) -> None:
        """Make the tape unusable; the first reason stays."""
        if self.refusal is None:
            self.refusal = reason

    def replay(self) -> None:
        """Run the calls again.

        Raises:
            BackendError: The tape is unusable, or a call was refused; the ones before it ran.
        """
        if self.refusal is not None:
            raise BackendError(f"the tape cannot be replayed: {self.refusal}")
        failed = array("q", [0])
        status = _native.shared_library().moonlet_replay(
            self._words.buffer_info()[0], len(self._words), failed.buffer_info()[0]
        )
        if status:
            raise BackendError(f"call {failed[0]} of a tape failed with status {status}")


def _word(value: int | float | None, kind: object) -> int:
    if kind is _native.FLOAT:
        return struct.unpack("<i", struct.pack("<f", value))[0]
    return 0 if value is None else int(value)


class _Watch(TorchDispatchMode):
    """Sees every torch operator and tells the tape what it means."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")  # type: ignore[attr-defined]
        if name in _FRESH:
            self._tape.keep(result)
        elif func._schema.is_mutable or not _is_view(result, args):  # type: ignore[attr-defined]
            self._tape.refuse(f"torch computes {name} in between")
        return result


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether all results lie in the memory of the first argument, unchanged."""
    results = result if isinstance(result, tuple | list) else (result,)
    first = args[0] if args else None
    return isinstance(first, Tensor) and all(
        isinstance(x, Tensor)
        and x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for x in results
    )
