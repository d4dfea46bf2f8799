"""Weight files: what is read equals what other libraries wrote, and files made to do harm are refused."""

from __future__ import annotations

import io
import json
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sample_models.source_files import Trap, arrays, small_graph, write_source

from rlx_ort import ConversionError, save_onnx
from rlx_ort.converters.sources import read_weights
from rlx_ort.converters.sources.npz import read_npz

KINDS = ["safetensors", "sharded", "npz", "npz-deflated"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_array_is_read_as_it_was_written(kind: str, tmp_path: Path) -> None:
    """Dtype, shape and values, empty arrays and single numbers included; sizes are known without reading."""
    weights = read_weights(write_source(kind, tmp_path))
    expected = arrays()
    assert set(weights) == set(expected)
    for name, values in expected.items():
        entry, data = weights.entries[name], weights[name]
        assert (entry.dtype.numpy, entry.shape) == (values.dtype, values.shape)
        assert np.array_equal(data.numpy(), values)


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "npz"])
def test_what_the_file_has_as_it_is_wanted_is_mapped(kind: str, tmp_path: Path) -> None:
    """The bytes at the returned place of the file are those of the array."""
    weights = read_weights(write_source(kind, tmp_path))
    source = weights["w"].source
    assert source is not None
    assert Path(source.path).read_bytes()[source.offset : source.offset + 512] == arrays()["w"].tobytes()


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    """Also its 16-bit floats, which numpy lacks."""
    library = pytest.importorskip("safetensors.numpy")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = {"a": arrays()["w"], "h": np.linspace(-2, 2, 33).astype(ml_dtypes.bfloat16)}
    library.save_file(values, tmp_path / "file")
    weights = read_weights(tmp_path / "file")
    assert all(np.array_equal(weights[name].numpy(), array) for name, array in values.items())


def test_initializers_of_a_model_are_weights(tmp_path: Path) -> None:
    """Large and small ones."""
    save_onnx(small_graph(), tmp_path / "m.onnx", external_data=True)
    weights = read_weights(tmp_path / "m.onnx")
    assert {"w", "b", "table"} <= set(weights)
    assert weights["b"] == small_graph().weights["b"]


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/hostname", "x/a.safetensors", "..", "", "C:a", "a\\b"])
def test_an_index_names_files_of_its_own_folder_only(name: str, tmp_path: Path) -> None:
    """Anything with a path in it is refused, before it is looked for."""
    write_source("sharded", tmp_path)
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "index.json").write_text(json.dumps({"weight_map": {"w": name}}), encoding="utf-8")
    with pytest.raises(ConversionError, match="must be one in the same folder"):
        read_weights(folder / "index.json")


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights that users of Windows lack")
def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """An index cannot reach outside through one."""
    write_source("sharded", tmp_path)
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "a.safetensors").symlink_to(tmp_path / "a.safetensors")
    (folder / "index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}), encoding="utf-8")
    with pytest.raises(ConversionError, match="a link that leaves"):
        read_weights(folder / "index.json")


def test_an_index_whose_tensor_is_not_in_its_shard_is_refused(tmp_path: Path) -> None:
    """Named, with the shard."""
    write_source("sharded", tmp_path)
    (tmp_path / "i").write_text(json.dumps({"weight_map": {"other": "a.safetensors"}}), encoding="utf-8")
    with pytest.raises(ConversionError, match=r"other in a\.safetensors"):
        read_weights(tmp_path / "i")


def test_a_safetensors_file_that_begins_like_a_pickle_is_read(tmp_path: Path) -> None:
    """A header of 640 bytes makes the first two bytes 80 02, which are those of a pickle."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode().ljust(640)
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert list(read_weights(tmp_path / "f")) == ["w"]


@pytest.mark.parametrize("shape", [[-2, -4], [8.0], ["8"], [True, 8], [float("inf")]])
def test_sizes_that_are_no_sizes_are_refused(shape: list[Any], tmp_path: Path) -> None:
    """Two negative sizes would multiply to the right number of elements."""
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 32]}}).encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    with pytest.raises(ConversionError, match="not a safetensors file"):
        read_weights(tmp_path / "f")


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("values", [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.eye(3, 5))])
def test_other_orders_of_bytes_and_axes_are_put_right(
    values: npt.NDArray[Any], compressed: bool, tmp_path: Path
) -> None:
    """Numpy writes arrays as they are in memory."""
    (np.savez_compressed if compressed else np.savez)(tmp_path / "a.npz", a=values)
    assert np.array_equal(read_weights(tmp_path / "a.npz")["a"].numpy(), values)


def test_arrays_of_objects_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    """They are pickles inside."""
    sprung = tmp_path / "sprung"
    np.savez(tmp_path / "a.npz", a=np.array([Trap(sprung)], object))
    with pytest.raises(ConversionError, match="never"):
        read_weights(tmp_path / "a.npz")
    assert not sprung.exists()


def npy(shape: tuple[int, ...], content: bytes) -> bytes:
    """Return an array file of f32 that says it has a shape."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue() + content


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path: Path) -> None:
    """Zeros compress a thousand times, and memory for them is not taken; nothing was unpacked to find that out."""
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"a{number}.npy", npy((8 << 20,), bytes(32 << 20)))
    with pytest.raises(ConversionError, match=r"would unpack to 1006\d+"):
        read_weights(tmp_path / "bomb.npz")


def test_an_archive_above_the_limit_is_refused(tmp_path: Path) -> None:
    """However well it compresses."""
    np.savez(tmp_path / "a.npz", a=np.ones(1000))
    with pytest.raises(ConversionError, match="would unpack to"):
        read_npz(tmp_path / "a.npz", limit_bytes=8000)
    assert list(read_npz(tmp_path / "a.npz", limit_bytes=9000)) == ["a"]


def test_an_array_that_says_it_is_larger_than_its_member_is_refused(tmp_path: Path) -> None:
    """Before memory for it is taken."""
    for shape in ((1 << 40,), (1 << 20, 1 << 20), (3,)):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", npy(shape, bytes(16)))
        with pytest.raises(ConversionError, match="needs"):
            read_weights(tmp_path / "a.npz")


def test_a_member_that_unpacks_to_more_than_it_declares_is_refused(tmp_path: Path) -> None:
    """The directory of an archive can say anything; what comes out is counted."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy((4,), bytes(1 << 20)))
    content = (tmp_path / "a.npz").read_bytes()
    true, false = struct.pack("<I", len(npy((4,), b"")) + (1 << 20)), struct.pack("<I", len(npy((4,), b"")) + 16)
    assert content.count(true) == 2
    (tmp_path / "b.npz").write_bytes(content.replace(true, false))
    with pytest.raises(ConversionError, match="damaged"):
        read_weights(tmp_path / "b.npz")["a"]


def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    """One stretch of a file that is many members is how a small archive unpacks to petabytes."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", npy((1000,), bytes(4000)))
        info = archive.infolist()[0]
        for number in range(5):
            twin = zipfile.ZipInfo(f"b{number}.npy")
            for field in ("header_offset", "file_size", "compress_size", "CRC", "compress_type"):
                setattr(twin, field, getattr(info, field))
            archive.filelist.append(twin)
    with pytest.raises(ConversionError, match="overlap"):
        read_weights(tmp_path / "a.npz")


def test_a_deflated_array_that_was_changed_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """By the archive's own sum."""
    np.savez_compressed(tmp_path / "a.npz", a=np.random.default_rng(0).random(1000))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[5000] ^= 1
    (tmp_path / "b.npz").write_bytes(content)
    weights = read_weights(tmp_path / "b.npz")
    with pytest.raises(ConversionError, match="cannot be read"):
        weights["a"]
