import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moonlet.core.errors import CorruptShard
from moonlet.weights.extents import DTYPE_BYTES, read_header
from moonlet.weights.reader import TORCH_DTYPES
from tests.weights.tampering import write_raw


def entry(
    begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8"
) -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    tensors = {
        "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "a": torch.ones(4, dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 5),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    extents = read_header(file)
    assert {n: (e.dtype, e.shape, e.length) for n, e in extents.items()} == {
        "b": ("F32", (2, 3), 24),
        "a": ("BF16", (4,), 8),
        "scalar": ("I64", (), 8),
        "empty": ("F32", (0, 5), 0),
    }
    content = file.read_bytes()
    for name, tensor in tensors.items():
        extent = extents[name]
        data = content[extent.offset : extent.offset + extent.length]
        assert data == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert list(extents) == [n for n, _ in sorted(extents.items(), key=lambda x: x[1].offset)]


def test_every_dtype_has_a_size_and_a_torch_type() -> None:
    assert set(DTYPE_BYTES) == set(TORCH_DTYPES)
    for name, size in DTYPE_BYTES.items():
        assert TORCH_DTYPES[name].itemsize == size


BROKEN: dict[str, tuple[dict[str, Any] | bytes, int, str]] = {
    # header, bytes of the buffer, words of the message
    "truncated": ({"a": entry(0, 8)}, 7, "truncated"),
    "longer than its tensors": ({"a": entry(0, 8)}, 9, "1 bytes after"),
    "overlapping": ({"a": entry(0, 8), "b": entry(7, 12)}, 12, "b overlaps a"),
    "same place": ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "overlaps"),
    "hole": ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "2 unused bytes"),
    "hole at the start": ({"a": entry(2, 8)}, 8, "2 unused bytes"),
    "size of shape and span differ": ({"a": entry(0, 8, [3], "F32")}, 8, "needs 12"),
    "unknown dtype": ({"a": entry(0, 8, [8], "F4")}, 8, "unknown dtype"),
    "negative shape": ({"a": entry(0, 8, [-8])}, 8, "malformed shape"),
    "shape of words": ({"a": {**entry(0, 8), "shape": ["8"]}}, 8, "malformed shape"),
    "reversed offsets": ({"a": {**entry(0, 8), "data_offsets": [8, 0]}}, 8, "data_offsets"),
    "three offsets": ({"a": {**entry(0, 8), "data_offsets": [0, 4, 8]}}, 8, "data_offsets"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [8]}}, 8, "data_offsets"),
    "entry is a list": ({"a": [0, 8]}, 8, "not an object"),
    "header is a list": (b"[1, 2]", 0, "not an object"),
    "header is no JSON": (b"{'a': 1}", 0, "not JSON"),
    "header is no text": (b"\xff\xfe{}", 0, "not JSON"),
    "repeated name": (
        f'{{"a": {json.dumps(entry(0, 4))}, "a": {json.dumps(entry(0, 4))}}}'.encode(),
        4,
        "repeats the key 'a'",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_shard_is_refused_by_file_name(fault: str, tmp_path: Path) -> None:
    header, num_bytes, words = BROKEN[fault]
    file = tmp_path / "model-00007-of-000009.safetensors"
    write_raw(file, header, bytes(num_bytes))
    with pytest.raises(CorruptShard, match=words) as caught:
        read_header(file)
    assert file.name in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x10", bytes(8) + b"x", (10**9).to_bytes(8, "little")])
def test_a_file_that_is_no_shard_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    with pytest.raises(CorruptShard, match=r"a\.safetensors"):
        read_header(file)
    with pytest.raises(CorruptShard, match=r"cannot read b\.safetensors"):
        read_header(tmp_path / "b.safetensors")
