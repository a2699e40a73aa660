"""Hand-over of one session between two moonlet processes (hybrid-cache.md section 13).

The state at an arbitrary position n: MLA rows ``[0, n)`` and the KDA state after exactly n tokens.
The receiver computes the token at position n itself and samples from it, so at least that token is
known; at position 0 there is no payload.

Stream, integers little-endian:

    8 bytes   ``MOONSESS``
    8 bytes   length of the header
    header    JSON: layout, fingerprint, geometry, token_ids, position
    payload   rows token by token, then the state (layout of `cache.state`)
    32 bytes  sha256 of everything before

Nothing of the state of sampling travels: it is a function of the request, which the receiver gets
anyway. Several ranks and re-sharding are left out; the bytes of a head are contiguous for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np

from moonlet.core.errors import CheckpointError, ConfigError
from moonlet.engine.cache.external.geometry import Payload, StateGeometry, first_difference, view

__all__ = ["SessionHeader", "SessionTarget", "export_session", "import_session"]

MAGIC = b"MOONSESS"
LAYOUT_VERSION = 1
DIGEST_BYTES = 32
PIECE_BYTES = 8 << 20
# a context of ten million ids of seven digits
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHeader:
    """What a session is, without its payload.

    Attributes:
        fingerprint: Of the model's weights and configuration.
        geometry: Sizes and dtypes of the state.
        token_ids: All tokens of the session known so far.
        position: How many of them the state has seen.
    """

    fingerprint: str
    geometry: StateGeometry
    token_ids: tuple[int, ...]
    position: int

    def __post_init__(self) -> None:
        """Check the position."""
        if not 0 <= self.position < len(self.token_ids):
            raise ConfigError(
                f"session.position is {self.position}; at least one of the "
                f"{len(self.token_ids)} tokens must be left to compute"
            )

    @property
    def payload_bytes(self) -> int:
        """Bytes of rows and state."""
        return self.geometry.session_bytes(self.position)


def _identity(fingerprint: str, geometry: StateGeometry) -> dict[str, Any]:
    """Return the fields that must be equal on both sides."""
    return {
        "layout": LAYOUT_VERSION,
        "fingerprint": fingerprint,
        "geometry": dataclasses.asdict(geometry),
    }


class SessionTarget(Protocol):
    """Where an imported state goes: memory that the caller has reserved."""

    def write_rows(self, start: int, rows: Payload) -> None:
        """Take the rows of the positions from ``start`` on."""
        ...

    def write_state(self, state: Payload) -> None:
        """Take the KDA state."""
        ...


class _Stream:
    """A binary stream that hashes what passes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def write(self, data: bytes | Payload) -> None:
        self._send(view(data))

    def _send(self, rest: memoryview) -> None:
        self._hash.update(rest)
        # a raw file or socket may take less than it was given
        while rest:
            rest = rest[self._stream.write(rest) :]

    def read(self, num_bytes: int, what: str) -> Payload:
        payload = self._read(num_bytes, what)
        self._hash.update(payload.data)
        return payload

    def _read(self, num_bytes: int, what: str) -> Payload:
        payload = np.empty(num_bytes, np.uint8)
        target, num_read = payload.data, 0
        while num_read < num_bytes:
            part = self._stream.read(num_bytes - num_read)
            if not part:
                raise CheckpointError(
                    f"a session ends after {num_read} of {num_bytes} bytes of its {what}; "
                    "transfer it again"
                )
            target[num_read : num_read + len(part)] = part
            num_read += len(part)
        return payload

    def close_writing(self) -> None:
        self._send(memoryview(self._hash.digest()))

    def close_reading(self) -> None:
        wanted = self._hash.digest()
        if self._read(DIGEST_BYTES, "sha256").tobytes() != wanted:
            raise CheckpointError("a session does not have its sha256; transfer it again")


def export_session(
    stream: BinaryIO,
    header: SessionHeader,
    read_rows: Callable[[int, int], Payload],
    read_state: Callable[[], Payload],
) -> int:
    """Write a session; its source must not change during the call.

    Args:
        stream: Binary, written in order; a file, a pipe or a socket's file.
        header: What the session is.
        read_rows: Copies the MLA rows of positions start to stop, flat.
        read_state: Copies the KDA state after ``header.position`` tokens, flat.

    Returns:
        Bytes of the payload.
    """
    table = _identity(header.fingerprint, header.geometry)
    table |= {"token_ids": header.token_ids, "position": header.position}
    text = json.dumps(table).encode()
    sink = _Stream(stream)
    sink.write(MAGIC + len(text).to_bytes(8, "little") + text)
    if header.position:
        for start, stop in _pieces(header):
            sink.write(read_rows(start, stop).reshape(-1))
        sink.write(read_state().reshape(-1))
    sink.close_writing()
    return header.payload_bytes


def import_session(
    stream: BinaryIO,
    *,
    fingerprint: str,
    geometry: StateGeometry,
    reserve: Callable[[SessionHeader], SessionTarget],
) -> SessionHeader:
    """Read a session into memory that is reserved once its header is known to fit.

    Args:
        stream: Binary, read in order and not beyond the session.
        fingerprint: Of the model that will continue.
        geometry: Of that model.
        reserve: Reserves a slot and pages for ``header.position`` tokens. Not called when the
            session is refused by its header.

    Returns:
        The header. Only now may the target be used; after an error its contents are void and the
        caller frees what it reserved.

    Raises:
        CheckpointError: The session belongs to another model, layout or dtype (the field is
            named), is cut short, or differs from its sha256.
    """
    source = _Stream(stream)
    header = _read_header(source, fingerprint, geometry)
    target = reserve(header)
    if header.position:
        for start, stop in _pieces(header):
            rows = source.read((stop - start) * geometry.row_bytes, f"rows from {start} on")
            target.write_rows(start, rows)
        target.write_state(source.read(geometry.state_bytes, "state"))
    source.close_reading()
    return header


def _read_header(source: _Stream, fingerprint: str, geometry: StateGeometry) -> SessionHeader:
    prefix = source.read(len(MAGIC) + 8, "header").tobytes()
    length = int.from_bytes(prefix[len(MAGIC) :], "little")
    if not prefix.startswith(MAGIC) or length > MAX_HEADER_BYTES:
        raise CheckpointError("the stream holds no session of moonlet")
    try:
        table = json.loads(source.read(length, "header").tobytes())
    except ValueError:
        raise CheckpointError("the header of a session is damaged; transfer it again") from None
    difference = first_difference(_identity(fingerprint, geometry), table)
    if difference is not None:
        raise CheckpointError(f"a session of another model or version is refused: {difference}")
    token_ids, position = table.get("token_ids"), table.get("position")
    if not _are_integers(token_ids) or not _are_integers([position]):
        raise CheckpointError("the header of a session lacks token_ids or position")
    try:
        return SessionHeader(
            fingerprint=fingerprint,
            geometry=geometry,
            token_ids=tuple(token_ids),
            position=position,
        )
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def _are_integers(values: object) -> bool:
    return isinstance(values, Sequence) and all(type(value) is int for value in values)


def _pieces(header: SessionHeader) -> list[tuple[int, int]]:
    """Ranges of positions of about `PIECE_BYTES` each."""
    step = max(1, PIECE_BYTES // header.geometry.row_bytes)
    return [
        (start, min(start + step, header.position)) for start in range(0, header.position, step)
    ]
