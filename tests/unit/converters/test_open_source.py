"""Opening model files: recognised by content, kept mapped, and nothing of them executed."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_text import parsed
from sample_models.source_files import Trap, small_graph, write_source

from rlx_ort import ConversionError, save_onnx, to_onnx
from rlx_ort.converters.bundle import graph_from_bundle
from rlx_ort.converters.sources import Format, format_of, open_source, read_weights

FORMATS = {
    "onnx": Format.ONNX,
    "onnx-external": Format.ONNX,
    "json": Format.IR_JSON,
    "safetensors": Format.SAFETENSORS,
    "sharded": Format.SAFETENSORS_INDEX,
    "npz": Format.NPZ,
    "npz-deflated": Format.NPZ,
    "gguf": Format.GGUF,
}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_content_says_what_a_file_is(kind: str, tmp_path: Path) -> None:
    """The name says nothing here."""
    assert format_of(write_source(kind, tmp_path))[0] is FORMATS[kind]


@pytest.mark.parametrize("kind", ["onnx", "onnx-external", "json"])
def test_an_opened_model_is_the_graph_that_was_written(kind: str, tmp_path: Path) -> None:
    """Interface, ops and weights; the weights stay in the file."""
    graph = small_graph()
    bundle = open_source(write_source(kind, tmp_path))
    assert bundle.weights.keys() == {"w", "table"}
    source = bundle.weights["w"].source
    assert source is not None
    assert source.unchanged
    again = graph_from_bundle(bundle)
    assert again.output_names == ["y"]
    assert again.weights["w"] == graph.weights["w"]
    assert again.weights["b"] == graph.weights["b"]
    exported, wanted = (to_onnx(each).graph.node for each in (again, graph))
    assert [node.op_type for node in exported] == [node.op_type for node in wanted]


def test_ranges_of_a_model_file_are_where_the_weights_are(tmp_path: Path) -> None:
    """Engines and writers read the same bytes from the file themselves."""
    path = write_source("onnx", tmp_path)
    content = path.read_bytes()
    for data in open_source(path).weights.values():
        assert data.source is not None
        assert content[data.source.offset : data.source.offset + data.nbytes] == data.buffer.tobytes()


def test_fields_in_any_order_and_in_pieces_are_one_model(tmp_path: Path) -> None:
    """Protobuf allows a message's fields in any order, and merges a message that comes in pieces."""
    model = to_onnx(small_graph())
    first, second, rest = (onnx.ModelProto() for _ in range(3))
    first.graph.CopyFrom(model.graph)
    second.graph.initializer.extend(model.graph.initializer[1:])
    del first.graph.initializer[1:]
    rest.CopyFrom(model)
    rest.ClearField("graph")
    path = tmp_path / "pieces.onnx"
    path.write_bytes(b"".join(part.SerializeToString() for part in (first, second, rest)))
    bundle = open_source(path)
    whole = {tensor.name: tensor.raw_data for tensor in model.graph.initializer}
    assert {name: data.buffer.tobytes() for name, data in bundle.weights.items()}.items() <= whole.items()
    assert bundle.proto.graph.node == model.graph.node
    assert bundle.proto.opset_import == model.opset_import


def test_a_weight_that_names_the_models_own_bytes_is_not_taken_for_one_inside(tmp_path: Path) -> None:
    """A location is a file name, whatever it looks like."""
    tensor = TensorProto(name="w", data_type=1, dims=[64], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "\0" + "0" * 32), ("offset", "0"), ("length", "256")):
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph([], "g", [], [], [tensor])
    path = tmp_path / "self.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(ConversionError, match="relative path inside the folder"):
        open_source(path)


@pytest.mark.parametrize("kind", ["onnx-external", "json"])
def test_a_data_file_that_was_cut_off_is_refused(kind: str, tmp_path: Path) -> None:
    """Before anything of it is read."""
    path = write_source(kind, tmp_path)
    side = next(file for file in tmp_path.iterdir() if file != path)
    for length in (0, 7, side.stat().st_size // 2, side.stat().st_size - 1):
        content = side.read_bytes()
        side.unlink()
        side.write_bytes(content[:length])
        with pytest.raises(ConversionError):
            open_source(path)
        side.unlink()
        side.write_bytes(content)
    open_source(path)


def checkpoints(trap: Trap) -> dict[str, bytes]:
    """Return pickles in the containers that PyTorch and others put them in."""
    plain = pickle.dumps(trap)

    def archive(**members: bytes) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as file:
            for name, content in members.items():
                file.writestr(name.replace("__", "/").replace("_pkl", ".pkl"), content)
        return stream.getvalue()

    return {
        "plain": plain,
        "protocol 2": pickle.dumps(trap, protocol=2),
        "torch": archive(model__data_pkl=plain, model__version=b"3"),
        "torch, flat": archive(data_pkl=plain),
        "torchscript": archive(model__data_pkl=plain, model__constants_pkl=plain, model__code=b""),
    }


@pytest.mark.parametrize("name", ["plain", "protocol 2", "torch", "torch, flat", "torchscript"])
@pytest.mark.parametrize("suffix", ["pt", "pth", "pt2", "bin", "onnx", "npz"])
def test_a_pickle_is_refused_and_never_read(name: str, suffix: str, tmp_path: Path) -> None:
    """Whatever the file is called: the file that reading it would make is not there afterwards."""
    sprung = tmp_path / "sprung"
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(checkpoints(Trap(sprung))[name])
    for reader in (open_source, read_weights):
        with pytest.raises(ConversionError, match="runs code"):
            reader(path)
    assert not sprung.exists()


def test_the_trap_springs_when_it_is_unpickled(tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    sprung = tmp_path / "sprung"
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\x18\0\0\0ORTM" + bytes(40), r"\.ort.*convert the ONNX model it was made from"),
        (b"\x89HDF\r\n\x1a\n" + bytes(8), "HDF5"),
        (b"\x1c\0\0\0TFL3" + bytes(8), "TensorFlow Lite"),
        (b"<?xml version='1.0'?>", "XML"),
        (b"\x93NUMPY\x01\0", "numpy array"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b'{"a": 1}', "entries a"),
        (b"\xff\xfe\x00\x01 what is this", "begins with ff fe 00 01"),
        (b"PK\x03\x04" + bytes(30), "damaged zip"),
        (b"hello, world", "begins with|ONNX"),
    ],
)
def test_what_is_no_model_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    """The message says what was found and what is known."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ConversionError, match=f"(?s){message}"):
        open_source(path)


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "npz", "gguf"])
def test_weights_alone_are_no_model(kind: str, tmp_path: Path) -> None:
    """The message says what to do with them."""
    with pytest.raises(ConversionError, match=r"holds weights and no computation.*apply_weights"):
        open_source(write_source(kind, tmp_path))


def test_a_folder_is_refused_with_the_file_to_name(tmp_path: Path) -> None:
    """Where it holds one by the usual name."""
    save_onnx(small_graph(), tmp_path / "model.onnx")
    with pytest.raises(ConversionError, match=r"is a folder.*model\.onnx"):
        open_source(tmp_path)


def test_a_file_that_is_not_there_is_a_conversion_error(tmp_path: Path) -> None:
    """The command line turns those into messages."""
    with pytest.raises(ConversionError, match="cannot be read"):
        open_source(tmp_path / "nowhere.onnx")
    with pytest.raises(ConversionError, match="not a path"):
        open_source("a\0b")


def test_old_models_open(tmp_path: Path) -> None:
    """Opset 7 and IR version 3, where weights are inputs too."""
    values = np.arange(64, dtype=np.float32)
    path = tmp_path / "old.onnx"
    onnx.save(parsed("(float[64] x, float[64] w) => (float[64] y) { y = Add (x, w) }", 7, 3, w=values), path)
    bundle = open_source(path)
    assert (bundle.opset, list(bundle.input_types())) == (7, ["x"])
    assert bundle.weights["w"].numpy().tolist() == values.tolist()
