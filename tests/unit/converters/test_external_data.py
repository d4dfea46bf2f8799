"""External data: plain ranges of plain files inside the model's folder are mapped, everything else is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx_text import parsed

from rlx_ort import ConversionError, from_onnx
from rlx_ort.converters.files import load_graph

WEIGHT = np.arange(64, dtype="<f4")


def write_model(folder: Path, **entries: object) -> Path:
    """Write a model whose weight of 64 floats is external, described by `entries`."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[64], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "w.bin", "offset": 0, "length": WEIGHT.nbytes, **entries}.items():
        if value is not None:
            weight.external_data.add(key=key, value=str(value))
    model = parsed("(float[64] x) => (float[64] y) { y = Add (x, w) }")
    model.graph.initializer.append(weight)
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder with a data file that holds the weight."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").write_bytes(WEIGHT.tobytes())
    return folder


def test_external_data_is_mapped_not_read(folder: Path) -> None:
    """The parameter's buffer is a view of a memory map of the file."""
    data = from_onnx(write_model(folder)).weights["w"]
    np.testing.assert_array_equal(data.numpy(), WEIGHT)
    base = data.buffer
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


@pytest.mark.parametrize(
    "entries", [{"offset": 4}, {"offset": 4, "length": None}, {"offset": 4, "location": "data/w.bin"}], ids=str
)
def test_a_range_of_a_file_inside_is_taken(folder: Path, entries: dict[str, object]) -> None:
    """Offset and length choose the bytes; the shape says how many there are; sub-folders are allowed."""
    (folder / "data").mkdir()
    for place in (folder, folder / "data"):
        (place / "w.bin").write_bytes(b"xxxx" + WEIGHT.tobytes() + b"yy")
    np.testing.assert_array_equal(from_onnx(write_model(folder, **entries)).weights["w"].numpy(), WEIGHT)


def test_bytes_need_a_base_folder(folder: Path) -> None:
    """A model given as bytes does not say where its files are."""
    data = write_model(folder).read_bytes()
    with pytest.raises(ConversionError, match="base_dir"):
        from_onnx(data)
    assert "w" in from_onnx(data, base_dir=folder).weights


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "absent.bin"}, "absent.bin"),
        ({"location": ""}, "relative path"),
        ({"location": "../secret.bin"}, "inside the folder"),
        ({"location": "a/../../secret.bin"}, "inside the folder"),
        ({"location": "..\\secret.bin"}, "inside the folder"),
        ({"location": "/etc/hostname"}, "relative path"),
        ({"location": "C:\\w.bin"}, "relative path"),
        ({"location": "\\\\host\\share\\w.bin"}, "relative path"),
        ({"location": "."}, "relative path|regular file"),
        ({"offset": 4}, "truncated"),
        ({"offset": 1 << 62}, "truncated"),
        ({"offset": -4}, "'-4'"),
        ({"offset": "four"}, "'four'"),
        ({"offset": "0x10"}, "'0x10'"),
        ({"length": 8}, "needs 256 bytes"),
        ({"length": -1}, "'-1'"),
        ({"length": "9" * 400}, "not a size"),
    ],
)
def test_a_reference_that_is_no_range_of_a_file_inside_is_refused(
    folder: Path, entries: dict[str, object], message: str
) -> None:
    """Nothing outside the folder is read, and nothing beyond the end of a file."""
    (folder.parent / "secret.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ConversionError, match=message):
        from_onnx(write_model(folder, **entries))


def test_an_empty_file_is_refused(folder: Path) -> None:
    """An empty file cannot be mapped, and holds no tensor."""
    (folder / "w.bin").write_bytes(b"")
    with pytest.raises(ConversionError, match="truncated"):
        from_onnx(write_model(folder))


@pytest.mark.parametrize(("target", "message"), [("../secret.bin", "leaves"), ("link.bin", r"link\.bin")])
def test_a_symlink_that_leaves_the_folder_or_leads_nowhere_is_refused(
    folder: Path, tmp_path: Path, target: str, message: str
) -> None:
    """Where a link leads counts, not where it lies; a loop of links ends in an error."""
    (tmp_path / "secret.bin").write_bytes(WEIGHT.tobytes())
    symlink(folder / "link.bin", folder / target)
    with pytest.raises(ConversionError, match=message):
        from_onnx(write_model(folder, location="link.bin"))


def test_a_hard_link_is_refused_with_the_reason(folder: Path, tmp_path: Path) -> None:
    """A second name may be a way to a file outside the folder."""
    try:
        os.link(folder / "w.bin", tmp_path / "other-name")
    except OSError as err:
        pytest.skip(f"no hard links here: {err}")
    with pytest.raises(ConversionError, match=r"2 hard links.*copy it"):
        from_onnx(write_model(folder))


def symlink(link: Path, target: Path) -> None:
    try:
        link.symlink_to(target)
    except OSError as err:
        pytest.skip(f"no symbolic links here: {err}")


def test_a_symlink_inside_the_folder_is_followed(folder: Path) -> None:
    """A link that stays inside is harmless."""
    symlink(folder / "link.bin", folder / "w.bin")
    assert "w" in from_onnx(write_model(folder, location="link.bin")).weights


def test_a_symlink_into_a_trusted_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    """The layout of Hugging Face's cache: each file is a link into a folder of blobs, which the caller names."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (folder / "w.bin").rename(blobs / "0a1b")
    symlink(folder / "link.bin", blobs / "0a1b")
    model = write_model(folder, location="link.bin")
    assert "w" in from_onnx(model, trusted_links=blobs).weights
    assert "w" in load_graph(model, trusted_links=[blobs]).weights


def test_trust_in_one_folder_is_no_trust_in_others(folder: Path, tmp_path: Path) -> None:
    """A link that leads elsewhere is refused, and the message has the target and the way."""
    (tmp_path / "secret.bin").write_bytes(b"0" * 64)
    (tmp_path / "blobs").mkdir()
    symlink(folder / "link.bin", tmp_path / "secret.bin")
    with pytest.raises(ConversionError, match=r"link that leaves .*secret\.bin.*trusted_links=FOLDER"):
        from_onnx(write_model(folder, location="link.bin"), trusted_links=[tmp_path / "blobs"])


def test_a_trusted_folder_that_is_not_there_is_an_error(folder: Path, tmp_path: Path) -> None:
    """A typing error in the name of a trusted folder is reported before anything is read."""
    with pytest.raises(ConversionError, match="cannot be trusted"):
        from_onnx(write_model(folder), trusted_links=tmp_path / "nowhere")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes in folders are a POSIX thing")
def test_a_pipe_is_refused_without_waiting_for_a_writer(folder: Path) -> None:
    """Opening a pipe would hang."""
    os.mkfifo(folder / "pipe.bin")
    with pytest.raises(ConversionError, match="not a regular file"):
        from_onnx(write_model(folder, location="pipe.bin"))


def test_external_data_in_a_body_is_checked_too(folder: Path) -> None:
    """A subgraph's weight is no way around the checks."""
    model = onnx.load(write_model(folder, location="../secret.bin"), load_external_data=False)
    body = "() => (float[64] r) { r = Identity (w) }"
    proto = parsed(f"(bool c) => (float[64] y) {{ y = If (c) <then_branch = t {body}, else_branch = e {body}> }}")
    for attribute in proto.graph.node[0].attribute:
        attribute.g.initializer.append(model.graph.initializer[0])
    with pytest.raises(ConversionError, match="inside the folder"):
        from_onnx(proto, base_dir=folder)
