"""A session crosses to another process bit by bit, or is refused with the reason."""

import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moonlet.core.errors import CheckpointError, ConfigError
from moonlet.core.hf_config import parse_config
from moonlet.engine.cache.external import (
    Payload,
    SessionHeader,
    StateGeometry,
    break_even_tokens,
    export_session,
    import_session,
)
from moonlet.engine.cache.external import session as session_module
from moonlet.engine.cache.state import PagedState
from moonlet.engine.cache.transfer import SequenceMemory
from moonlet.testing import tiny_config, tiny_model
from tests.core.published import k3
from tests.engine.external.chains import GEOMETRY
from tests.engine.external.sessions import continued, memory, session_tokens

ROOT = Path(__file__).parents[3]


class Memory:
    """Rows and state in plain arrays."""

    def __init__(self, position: int, geometry: StateGeometry = GEOMETRY) -> None:
        generator = np.random.default_rng(position)
        self.row_bytes = geometry.row_bytes
        self.rows = generator.integers(0, 256, position * geometry.row_bytes, np.uint8)
        self.state = generator.integers(0, 256, geometry.state_bytes, np.uint8)

    def read_rows(self, start: int, stop: int) -> Payload:
        return self.rows[start * self.row_bytes : stop * self.row_bytes]

    def read_state(self) -> Payload:
        return self.state

    def write_rows(self, start: int, rows: Payload) -> None:
        self.rows[start * self.row_bytes :][: len(rows)] = rows

    def write_state(self, state: Payload) -> None:
        self.state[:] = state


def header_of(position: int, **changes: object) -> SessionHeader:
    fields = {
        "fingerprint": "model-a",
        "geometry": GEOMETRY,
        "token_ids": tuple(range(position + 1)),
        "position": position,
    }
    return SessionHeader(**{**fields, **changes})


def exported(position: int, **changes: object) -> bytes:
    stream, source = io.BytesIO(), Memory(position)
    header = header_of(position, **changes)
    num_bytes = export_session(stream, header, source.read_rows, source.read_state)
    assert num_bytes == header.payload_bytes
    return stream.getvalue()


def imported(
    data: bytes, geometry: StateGeometry = GEOMETRY, fingerprint: str = "model-a"
) -> tuple[SessionHeader, Memory]:
    targets: list[Memory] = []

    def reserve(header: SessionHeader) -> Memory:
        targets.append(Memory(header.position))
        targets[0].rows[:] = 0
        targets[0].state[:] = 0
        return targets[0]

    header = import_session(
        io.BytesIO(data), fingerprint=fingerprint, geometry=geometry, reserve=reserve
    )
    return header, targets[0]


@pytest.mark.parametrize("piece_bytes", [1, 50, 8 << 20])
@pytest.mark.parametrize("position", [1, 3, 17])
def test_every_byte_arrives(
    position: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PIECE_BYTES", piece_bytes)
    header, target = imported(exported(position))
    assert header == header_of(position)
    np.testing.assert_array_equal(target.rows, Memory(position).rows)
    np.testing.assert_array_equal(target.state, Memory(position).state)


def test_before_the_first_token_there_is_nothing_to_send() -> None:
    data = exported(0)
    header, target = imported(data)
    assert header.payload_bytes == 0
    assert not target.state.any()
    assert len(exported(1)) > len(data) + GEOMETRY.state_bytes


def test_two_sessions_share_a_stream() -> None:
    stream = io.BytesIO(exported(2) + exported(5))
    for position in (2, 5):
        target = Memory(position)
        header = import_session(
            stream, fingerprint="model-a", geometry=GEOMETRY, reserve=lambda _, t=target: t
        )
        assert header.position == position
    assert stream.read() == b""


def refuse_to_reserve(header: SessionHeader) -> Memory:
    raise AssertionError("memory was reserved for a session that is refused")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fingerprint": "model-b"}, "fingerprint is 'model-b', here it is 'model-a'"),
        ({"geometry": replace(GEOMETRY, dtype="float32")}, "geometry.dtype is 'float32'"),
        ({"geometry": replace(GEOMETRY, state_dtype="float16")}, "geometry.state_dtype"),
        ({"geometry": replace(GEOMETRY, num_mla_layers=4)}, "geometry.num_mla_layers is 4"),
        ({"geometry": replace(GEOMETRY, row_width=4)}, "geometry.row_width is 4"),
        ({"geometry": replace(GEOMETRY, num_kda_layers=4)}, "geometry.num_kda_layers is 4"),
        ({"geometry": replace(GEOMETRY, num_heads=4)}, "geometry.num_heads is 4"),
        ({"geometry": replace(GEOMETRY, head_dim=4)}, "geometry.head_dim is 4"),
        ({"geometry": replace(GEOMETRY, conv_rows=2)}, "geometry.conv_rows is 2"),
    ],
)
def test_another_model_is_refused_by_field(changes: dict[str, object], field: str) -> None:
    header = header_of(3, **changes)
    stream, source = io.BytesIO(), Memory(3, header.geometry)
    export_session(stream, header, source.read_rows, source.read_state)
    with pytest.raises(CheckpointError) as refusal:
        import_session(
            io.BytesIO(stream.getvalue()),
            fingerprint="model-a",
            geometry=GEOMETRY,
            reserve=refuse_to_reserve,
        )
    assert field in str(refusal.value)


def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "LAYOUT_VERSION", 0)
    data = exported(3)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="layout is 0, here it is 1"):
        imported(data)


def test_a_session_cut_anywhere_is_refused() -> None:
    data = exported(3)
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match="ends after"):
            imported(data[:length])


def test_a_session_changed_anywhere_is_refused() -> None:
    data = exported(3)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 4
        with pytest.raises(CheckpointError):
            imported(bytes(changed))


@pytest.mark.parametrize(
    "changes",
    [
        '"position": 4',
        '"position": -1',
        '"position": true',
        '"position": 1.0',
        '"position": "1"',
        '"token_ids": [true, 1, 2, 3, 4]',
        '"token_ids": "abcde"',
        '"token_ids": 5',
    ],
)
def test_a_header_that_makes_no_sense_is_refused(changes: str) -> None:
    # position or token_ids given twice: the later one counts
    data = exported(3)
    length = int.from_bytes(data[8:16], "little")
    text = data[16 : 16 + length].decode()[:-1] + f", {changes}}}"
    forged = data[:8] + len(text).to_bytes(8, "little") + text.encode() + data[16 + length :]
    with pytest.raises(CheckpointError):
        import_session(
            io.BytesIO(forged), fingerprint="model-a", geometry=GEOMETRY, reserve=refuse_to_reserve
        )


def test_an_absurd_header_length_is_not_allocated() -> None:
    with pytest.raises(CheckpointError, match="no session"):
        imported(b"MOONSESS" + (1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="no session"):
        imported(b"GET / HTTP/1.1\r\n\r\n")


def test_a_token_must_be_left_to_compute() -> None:
    with pytest.raises(ConfigError, match="at least one of the 3 tokens"):
        header_of(3, token_ids=(1, 2, 3))


def test_the_payload_of_k3_is_that_of_the_specification() -> None:
    """hybrid-cache.md sections 1.1, 13 and 17 (case 13); computed, not allocated."""
    geometry = StateGeometry.of(parse_config(k3()).text, "bfloat16")
    assert geometry.row_bytes == 27_648
    assert geometry.state_bytes == 449_372_160
    num_tokens = 32_768
    header = SessionHeader(
        fingerprint="k3",
        geometry=geometry,
        token_ids=(0,) * num_tokens,
        position=num_tokens - 1,
    )
    assert header.payload_bytes == 27_648 * 32_767 + 449_372_160 == 1_355_314_176
    length = break_even_tokens(geometry, read_bytes_per_s=2e9, prefill_tps=5000)
    assert round(length) == 1207
    assert break_even_tokens(geometry, read_bytes_per_s=1e8, prefill_tps=5000) == float("inf")


def test_geometry_counts_what_the_arenas_hold() -> None:
    config = tiny_config()
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        geometry = StateGeometry.of(config, name)
        state = PagedState(
            config, num_slots=1, num_pages=2, page_size=4, max_model_len=8, dtype=dtype
        )
        source = SequenceMemory(state=state, slot=1, pages=[1, 2])
        assert source.read_state().nbytes == geometry.state_bytes
        assert source.read_rows(0, 3).nbytes == 3 * geometry.row_bytes


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"dtype": "int3"}, "geometry.dtype"), ({"num_heads": 0}, "geometry.num_heads is 0")],
)
def test_an_impossible_geometry_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(GEOMETRY, **changes)


@pytest.mark.parametrize("position", [1, 13, 20])
def test_a_session_continues_bit_equal(position: int) -> None:
    """The receiver has other slots, pages and page sizes than the sender."""
    model = tiny_model()
    geometry = StateGeometry.of(model.config, "float32")
    tokens = session_tokens(position)
    source = memory(model.config, page_size=4, slot=2, pages=[9, 3, 7, 1, 4, 8])
    continued(model, source, tokens[:position], 0, 0)
    header = SessionHeader(
        fingerprint="tiny", geometry=geometry, token_ids=tuple(tokens), position=position
    )
    stream = io.BytesIO()
    export_session(stream, header, source.read_rows, source.read_state)
    stream.seek(0)
    target = memory(model.config, page_size=8, slot=1, pages=[2, 5, 1])
    arrived = import_session(
        stream, fingerprint="tiny", geometry=geometry, reserve=lambda _: target
    )
    assert arrived == header
    expected = continued(model, source, [tokens[position]], position, 3)
    actual = continued(model, target, [tokens[position]], position, 3)
    assert [logits.tobytes() for logits in actual] == [logits.tobytes() for logits in expected]


def test_a_session_moves_between_two_processes(tmp_path: Path) -> None:
    """The other process computes the prompt, hands over through a pipe, and goes on itself."""
    command = [sys.executable, "-m", "tests.engine.external.sessions", str(tmp_path / "logits")]
    model, position = tiny_model(), 13
    target = memory(model.config, page_size=8, slot=1, pages=[2, 5, 1])
    reserve: Callable[[SessionHeader], SequenceMemory] = lambda _: target  # noqa: E731
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as sender:
        header = import_session(
            sender.stdout,
            fingerprint="tiny",
            geometry=StateGeometry.of(model.config, "float32"),
            reserve=reserve,
        )
    assert sender.returncode == 0
    assert header.token_ids == tuple(session_tokens(position))
    actual = continued(model, target, [header.token_ids[position]], position, 3)
    assert b"".join(x.tobytes() for x in actual) == (tmp_path / "logits").read_bytes()
