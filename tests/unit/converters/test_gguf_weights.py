"""GGUF: every block format is unpacked as the `gguf` package does it, bit for bit, and headers are checked first."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sample_models.source_files import write_gguf

from rlx_ort import ConversionError, DType
from rlx_ort.converters.sources import WeightFile, read_weights
from rlx_ort.ir.gguf_blocks import GGUF_FORMATS

gguf = pytest.importorskip("gguf")

# Byte of each f16 scale in a block: random bytes there would make infinities and NaN, whose bits say nothing.
SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
ISSUED = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return random blocks, u8 `(rows, row bytes)`, with finite scales."""
    rng = np.random.default_rng(seed)
    form = GGUF_FORMATS[kind.lower()]
    raw = rng.integers(0, 256, (rows, columns // form.elements, form.bytes), np.uint8)
    for at in SCALES[kind]:
        scales = rng.standard_normal((rows, columns // form.elements)).astype("<f2")
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[str, npt.NDArray[Any]]]) -> Path:
    """Write tensors of the given types with the package's own writer."""
    writer = gguf.GGUFWriter(path, "test")
    for name, (kind, values) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ISSUED)
def test_a_quantised_tensor_is_read_as_gguf_unpacks_it(kind: str, tmp_path: Path) -> None:
    """In the shape of numpy: rows are outputs."""
    raw = blocks(kind, 6, 512, seed=1)
    weights = read_weights(write(tmp_path / "w.gguf", {"w": (kind, raw)}))
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert weights.entries["w"].shape == (6, 512)
    assert weights["w"].numpy().tobytes() == expected.tobytes()


def test_large_tensors_are_unpacked_in_pieces_that_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces are rows, the last one shorter."""
    raw = blocks("Q8_0", 7, 64)
    path = write(tmp_path / "w.gguf", {"w": ("Q8_0", raw)})
    monkeypatch.setattr("rlx_ort.converters.sources.gguf_file._CHUNK_WEIGHTS", 128)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(read_weights(path)["w"].numpy(), expected)


def test_f16_halves_are_the_rounded_floats(tmp_path: Path) -> None:
    """Half the memory where that is enough."""
    raw = blocks("Q6_K", 2, 256)
    data = read_weights(write(tmp_path / "w.gguf", {"w": ("Q6_K", raw)}), gguf_as="f16")["w"]
    assert data.dtype is DType.F16
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q6_K).astype(np.float16)
    assert np.array_equal(data.numpy(), expected)


def test_packed_blocks_are_mapped(tmp_path: Path) -> None:
    """As bytes of the file, one row after the other."""
    raw = blocks("Q4_K", 4, 256)
    data = read_weights(write(tmp_path / "w.gguf", {"w": ("Q4_K", raw)}), gguf_as="packed")["w"]
    assert (data.dtype, data.shape) == (DType.U8, (4, 144))
    assert np.array_equal(data.numpy(), raw)
    assert data.source is not None


def test_plain_tensors_are_mapped_in_their_own_type(tmp_path: Path) -> None:
    """F32, F16 and BF16, whose numbers numpy lacks."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.linspace(-3, 3, 96).reshape(3, 32)
    halves = values.astype(ml_dtypes.bfloat16)
    path = write(
        tmp_path / "w.gguf",
        {
            "f32": ("F32", values.astype(np.float32)),
            "f16": ("F16", values.astype(np.float16)),
            "bf16": ("BF16", halves.view(np.uint8).reshape(3, 64)),
        },
    )
    weights: WeightFile = read_weights(path)
    assert np.array_equal(weights["f32"].numpy(), values.astype(np.float32))
    assert np.array_equal(weights["f16"].numpy(), values.astype(np.float16))
    assert np.array_equal(weights["bf16"].numpy(), halves)
    assert all(weights[name].source is not None for name in weights)


def test_a_format_that_the_ir_lacks_cannot_stay_packed(tmp_path: Path) -> None:
    """It can be dequantised, as gguf does it."""
    kind = gguf.GGMLQuantizationType.Q5_0
    raw = gguf.quants.quantize(np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32), kind)
    path = write(tmp_path / "w.gguf", {"w": ("Q5_0", raw)})
    assert np.array_equal(read_weights(path)["w"].numpy(), gguf.quants.dequantize(raw, kind))
    with pytest.raises(ConversionError, match="Q5_0, which cannot stay packed"):
        read_weights(path, gguf_as="packed")


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (4, struct.pack("<I", 9), "version 9"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "truncated"),
        (16, struct.pack("<Q", 1 << 60), "truncated"),
        (24, struct.pack("<Q", 1 << 62), "at most"),
    ],
)
def test_counts_that_no_file_can_hold_are_refused(at: int, change: bytes, message: str, tmp_path: Path) -> None:
    """The package's reader would follow them for years."""
    write_gguf(tmp_path / "w.gguf")
    content = bytearray((tmp_path / "w.gguf").read_bytes())
    content[at : at + len(change)] = change
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ConversionError, match=message):
        read_weights(tmp_path / "x.gguf")


def test_an_array_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    """Of numbers, whose reader never notices that the file has ended."""
    text = struct.pack("<Q", 1) + b"a"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text + struct.pack("<IIQ", 9, 5, 1 << 61) + bytes(64)
    (tmp_path / "w.gguf").write_bytes(head)
    with pytest.raises(ConversionError, match="more are needed"):
        read_weights(tmp_path / "w.gguf")
