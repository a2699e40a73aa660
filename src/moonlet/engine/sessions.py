"""Hand-over of sessions for the users of an engine: take one out, put one in.

The sender computes all tokens but the last one and copies what the layers keep at that very
position; the receiver computes the last token itself and samples from it, so sampling needs no
state (hybrid-cache.md section 13). Blocks are free again as soon as they are copied: what is sent
is the copy, so nothing stays pinned for a receiver that never answers.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import BinaryIO

import torch

from moonlet.core.config import ModelConfig
from moonlet.engine.cache.chain import root_hash
from moonlet.engine.cache.external import Payload, SessionHeader, StateGeometry, export_session
from moonlet.engine.cache.external.parked import ParkedSessions
from moonlet.engine.cache.manager import CacheManager
from moonlet.engine.cache.state import PagedState
from moonlet.engine.cache.transfer import SequenceMemory
from moonlet.engine.memory import MemoryOptions, state_geometry
from moonlet.engine.request import EngineRequest, SamplingParams, Sequence

__all__ = ["SessionCopy", "SessionDesk", "build_sessions"]


class SessionCopy:
    """The bytes of one session, copied by the engine's thread when its prompt is computed.

    Args:
        fingerprint: Of the model, in hex.
        geometry: Of its state.
        token_ids: All tokens; the last one is not computed.
    """

    def __init__(
        self, fingerprint: str, geometry: StateGeometry, token_ids: SequenceOf[int]
    ) -> None:
        self.header = SessionHeader(
            fingerprint=fingerprint,
            geometry=geometry,
            token_ids=tuple(token_ids),
            position=len(token_ids) - 1,
        )
        self._rows: Payload | None = None
        self._state: Payload | None = None

    def capture(self, sequence: Sequence, state: PagedState) -> None:
        """Copy the sequence's rows and state; called before it is freed."""
        assert sequence.slot is not None
        assert sequence.num_computed == self.header.position
        memory = SequenceMemory(state=state, slot=sequence.slot, pages=sequence.pages)
        self._rows = memory.read_rows(0, self.header.position)
        self._state = memory.read_state()

    def write(self, stream: BinaryIO) -> int:
        """Write the session and return the bytes of its payload."""
        row_bytes = self.header.geometry.row_bytes

        def rows(start: int, stop: int) -> Payload:
            assert self._rows is not None, "a session is written before it is computed"
            return self._rows[start * row_bytes : stop * row_bytes]

        def state() -> Payload:
            assert self._state is not None
            return self._state

        return export_session(stream, self.header, rows, state)


class SessionDesk:
    """Where an engine's sessions leave and arrive.

    Args:
        fingerprint: Of the model.
        geometry: Of its state.
        unit_size: Tokens per hash.
    """

    def __init__(self, fingerprint: bytes, geometry: StateGeometry, unit_size: int) -> None:
        self._fingerprint = fingerprint
        self._geometry = geometry
        self.parked = ParkedSessions(
            fingerprint=fingerprint.hex(), geometry=geometry, unit_size=unit_size
        )

    def request(
        self, request_id: str, token_ids: SequenceOf[int], salt: str
    ) -> tuple[EngineRequest | None, SessionCopy]:
        """Return what to submit, and the copy that is whole when that request has finished.

        Of a single token nothing is computed, so there is nothing to submit.
        """
        copy = SessionCopy(self._fingerprint.hex(), self._geometry, token_ids)
        if not copy.header.position:
            return None, copy
        request = EngineRequest(
            request_id=request_id,
            prompt_ids=token_ids[:-1],
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            cache_salt=salt,
            capture=copy.capture,
        )
        return request, copy

    def park(self, stream: BinaryIO, salt: str) -> SessionHeader:
        """Keep a session for the request that continues it.

        Raises:
            CheckpointError: It is damaged or belongs to another model; the field is named.
            CapacityError: It is too large.
        """
        return self.parked.park(stream, root_hash(self._fingerprint, salt))


def build_sessions(
    config: ModelConfig, options: MemoryOptions, manager: CacheManager, dtype: torch.dtype
) -> SessionDesk:
    """Make the desk of an engine and let its manager look up what is parked there."""
    geometry = state_geometry(config, dtype)
    desk = SessionDesk(options.fingerprint, geometry, options.unit_size)
    manager.parked = desk.parked
    return desk
