"""Sessions that were handed over and wait for their request (hybrid-cache.md section 13).

A session stands at any position, aligned or not, so the prefix index cannot hold it. It waits in
host memory under the hash of its whole prefix, tenant and model included, until a request begins
with exactly its tokens, its lease ends, or newer ones need the room.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from moonlet.core.errors import CapacityError
from moonlet.engine.cache.chain import PrefixChain
from moonlet.engine.cache.external.geometry import Payload, StateGeometry
from moonlet.engine.cache.external.session import SessionHeader, import_session

__all__ = ["ParkedSession", "ParkedSessions"]


@dataclass(slots=True, eq=False)
class ParkedSession:
    """Rows and state of one session; its own load, which has ended (`engine.request.PrefixLoad`).

    Attributes:
        num_tokens: Its position.
        parts: Rows by first position, in order.
        state: KDA state after the last of them.
        key: Chain hash of its complete units.
        rest: Tokens after those.
        expires_at: Clock time at which it goes.
    """

    num_tokens: int
    parts: list[tuple[int, Payload]] = field(default_factory=list)
    state: Payload = field(default_factory=lambda: np.empty(0, np.uint8))
    key: bytes = b""
    rest: tuple[int, ...] = ()
    expires_at: float = 0.0
    is_done: bool = True

    @property
    def checkpoint(self) -> ParkedSession:
        """What has arrived."""
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of rows and state."""
        return sum(rows.nbytes for _, rows in self.parts) + self.state.nbytes

    def pieces(self, unit_size: int) -> Iterator[tuple[int, Payload]]:
        """Yield rows with the position of the first one."""
        yield from self.parts

    def write_rows(self, start: int, rows: Payload) -> None:
        """Take rows from `import_session`."""
        self.parts.append((start, rows))

    def write_state(self, state: Payload) -> None:
        """Take the state from `import_session`."""
        self.state = state


class ParkedSessions:
    """The sessions that wait. Safe for threads.

    Args:
        fingerprint: Of the model that will continue.
        geometry: Of that model.
        unit_size: Tokens per hash.
        max_bytes: Most bytes that are kept; the oldest sessions make room.
        lease_s: How long a session is kept.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        *,
        fingerprint: str,
        geometry: StateGeometry,
        unit_size: int,
        max_bytes: int = 2 << 30,
        lease_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fingerprint, self.geometry = fingerprint, geometry
        self._unit_size, self._max_bytes, self._lease_s = unit_size, max_bytes, lease_s
        self._clock = clock
        self._sessions: list[ParkedSession] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._sessions)

    def park(self, stream: BinaryIO, root: bytes) -> SessionHeader:
        """Read a session and keep it for requests whose prefixes begin with ``root``.

        Raises:
            CheckpointError: It is damaged or belongs to another model, by the name of the field.
            CapacityError: It is larger than all sessions together may be.
        """
        session = ParkedSession(0)

        def reserve(header: SessionHeader) -> ParkedSession:
            if header.payload_bytes > self._max_bytes:
                raise CapacityError(
                    f"the session has {header.payload_bytes} bytes; {self._max_bytes} are kept"
                )
            return session

        header = import_session(
            stream, fingerprint=self.fingerprint, geometry=self.geometry, reserve=reserve
        )
        if not header.position:
            return header
        tokens = header.token_ids[: header.position]
        chain = PrefixChain(root, self._unit_size)
        chain.extend(tokens, 0)
        session.num_tokens = header.position
        session.key = chain.keys[-1] if chain.keys else root
        session.rest = tokens[len(chain.keys) * self._unit_size :]
        with self._lock:
            session.expires_at = self._clock() + self._lease_s
            self._sessions.append(session)
            self._expire()
            while sum(known.num_bytes for known in self._sessions) > self._max_bytes:
                del self._sessions[0]
        return header

    def find(self, chain: PrefixChain, tokens: Sequence[int]) -> ParkedSession | None:
        """Return the longest session that is a proper beginning of a sequence.

        Args:
            chain: Of the sequence.
            tokens: All its tokens; one at least must be left to compute.
        """
        size = self._unit_size
        with self._lock:
            self._expire()
            fitting = [s for s in self._sessions if s.num_tokens < len(tokens)]
        for session in sorted(fitting, key=lambda known: known.num_tokens, reverse=True):
            units = session.num_tokens // size
            key = chain.keys[units - 1] if units else chain.root
            if key == session.key and tuple(tokens[units * size : session.num_tokens]) == (
                session.rest
            ):
                return session
        return None

    def _expire(self) -> None:
        now = self._clock()
        self._sessions = [s for s in self._sessions if s.expires_at > now]
