"""`run`: the device that was asked for answers, or an error does."""

from __future__ import annotations

import re
from pathlib import Path

import make_text_classifier
import numpy as np
import onnx
import pytest
from command_line import Cli

from rlx_ort import Device, DType, Graph, Shape, is_available, save_onnx
from rlx_ort.ir.types import TensorType

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Return an npz file with the input of `add_one`."""
    path = tmp_path / "inputs.npz"
    np.savez(path, x=X)
    return path


def test_run_writes_the_outputs(cli: Cli, add_one: Path, inputs: Path, tmp_path: Path) -> None:
    """The npz file that is written holds the right numbers under the output's name."""
    target = tmp_path / "outputs.npz"
    outcome = cli("run", add_one, "--device", "cpu", "--inputs", inputs, "--outputs", target, "--json")
    assert outcome.code == 0
    assert outcome.document["device"] == "cpu"
    assert outcome.document["outputs"] == [
        {"name": "y", "dtype": "float32", "shape": [2, 2], "first": [2.0, 3.0, 4.0, 5.0]}
    ]
    assert outcome.document["took_ns"] > outcome.document["again_ns"] > 0
    with np.load(target, allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["y"], X + 1)


def test_run_agrees_with_the_reference_on_a_real_model(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """The classifier's probabilities, through files, are within 1e-4 of the float64 reference."""
    feeds = make_text_classifier.sample_inputs()
    np.savez(tmp_path / "in.npz", **feeds)
    outcome = cli(
        "run", classifier, "--device", "cpu", "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "y.npz"
    )
    assert outcome.code == 0, outcome.err
    expected = make_text_classifier.reference(make_text_classifier.make_weights(), feeds)
    with np.load(tmp_path / "y.npz", allow_pickle=False) as archive:
        np.testing.assert_allclose(archive["probabilities"], expected, rtol=1e-4, atol=1e-6)


def test_run_without_inputs_makes_them_up_and_says_so(cli: Cli, add_one: Path) -> None:
    """Random inputs come with a note on stderr, and named dims have the sizes that were given."""
    outcome = cli("run", add_one, "--device", "cpu", "--dim", "rows=3", "--json")
    assert outcome.document["inputs"] == "random"
    assert outcome.document["outputs"][0]["shape"] == [3, 2]
    assert "random" in outcome.err


def test_made_up_inputs_are_the_same_each_time(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """Two runs without inputs give the same outputs."""
    arrays = []
    for name in ("first.npz", "second.npz"):
        assert cli("run", add_one, "--device", "cpu", "--outputs", tmp_path / name).code == 0
        with np.load(tmp_path / name, allow_pickle=False) as archive:
            arrays.append(archive["y"])
    np.testing.assert_array_equal(*arrays)


def test_run_prints_where_it_ran(cli: Cli, add_one: Path, inputs: Path) -> None:
    """The text names the device, the time, the placement and the output with its first values."""
    outcome = cli("run", add_one, "--device", "cpu", "--inputs", inputs)
    assert outcome.code == 0
    words = ("ran on", "cpu", "100%", "float32", "[2, 2]", "2.0, 3.0, 4.0, 5.0")
    assert [word for word in words if word not in outcome.out] == []
    assert re.search(r"time +[\d.]+ [mu]?s with choosing and opening; [\d.]+ [mu]?s for a second run", outcome.out)


def test_run_with_no_device_takes_the_variable(
    cli: Cli, add_one: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLX_DEVICE decides when the command line does not."""
    monkeypatch.setenv("RLX_DEVICE", "cpu")
    assert cli("run", add_one, "--inputs", inputs, "--json").document["device"] == "cpu"


def test_cuda_on_a_machine_without_it_gives_no_result(cli: Cli, add_one: Path, inputs: Path, tmp_path: Path) -> None:
    """A named device that cannot be had is exit code 3, and no output file appears."""
    if is_available(Device.CUDA):
        pytest.skip("this machine has CUDA")
    target = tmp_path / "outputs.npz"
    outcome = cli("run", add_one, "--device", "cuda", "--inputs", inputs, "--outputs", target, "--json")
    assert (outcome.code, outcome.document["error"]["exit_code"]) == (3, 3)
    assert "CUDA" in outcome.err
    assert not target.exists()


def test_a_chain_lists_who_refused(cli: Cli, add_one: Path, inputs: Path) -> None:
    """In cuda,webgpu,cpu the first that works answers, and each one before it has its reason."""
    chain = [Device.CUDA, Device.WEBGPU, Device.CPU]
    document = cli("run", add_one, "--chain", "cuda,webgpu,cpu", "--inputs", inputs, "--json").document
    first = next(device for device in chain if is_available(device))
    assert document["device"] == first.label
    assert [row["device"] for row in document["refused"]] == [device.label for device in chain[: chain.index(first)]]
    assert all(row["reason"] for row in document["refused"])


@pytest.mark.webgpu
def test_a_chain_stops_at_a_second_device_that_works(cli: Cli, add_one: Path, inputs: Path) -> None:
    """With WebGPU here, webgpu,cpu is answered by WebGPU, with every node on it."""
    document = cli("run", add_one, "--chain", "webgpu,cpu", "--inputs", inputs, "--json").document
    assert (document["device"], document["placement"]["share"]) == ("webgpu", 1.0)
    assert document["placement"]["nodes"].get("CPUExecutionProvider", 0) == 0


def test_the_chain_variable_counts_as_a_chain(
    cli: Cli, add_one: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLX_DEVICE_CHAIN is followed, and its refusals are printed."""
    monkeypatch.setenv("RLX_DEVICE_CHAIN", "tpu,cpu")
    document = cli("run", add_one, "--inputs", inputs, "--json").document
    assert (document["device"], [row["device"] for row in document["refused"]]) == ("cpu", ["tpu"])


def _text(path: Path) -> None:
    path.write_text("no archive", encoding="utf-8")


def _truncated(path: Path) -> None:
    np.savez(path, x=X)
    path.write_bytes(path.read_bytes()[:60])


def _flipped(path: Path) -> None:
    np.savez(path, x=np.zeros(100, np.float32))
    data = bytearray(path.read_bytes())
    data[250] ^= 0xFF  # inside the array's bytes, which the archive's checksum covers
    path.write_bytes(bytes(data))


def _pickled(path: Path) -> None:
    np.savez(path, x=np.array([{"a": 1}], dtype=object))


def _plain_npy(path: Path) -> None:
    with path.open("wb") as stream:
        np.save(stream, X)


@pytest.mark.parametrize("spoil", [_text, _truncated, _flipped, _pickled, _plain_npy])
def test_a_broken_npz_is_an_input_error(cli: Cli, add_one: Path, tmp_path: Path, spoil: object) -> None:
    """A file that is no intact npz of plain arrays is exit code 5, names the file, and is not unpickled."""
    path = tmp_path / "broken.npz"
    assert callable(spoil)
    spoil(path)
    outcome = cli("run", add_one, "--device", "cpu", "--inputs", path, "--json")
    assert (outcome.code, outcome.document["error"]["exit_code"]) == (5, 5)
    assert "broken.npz" in outcome.err


@pytest.mark.parametrize(
    ("arrays", "word"),
    [
        ({}, "x"),
        ({"x": X, "z": X}, "z"),
        ({"x": X.astype(np.float64)}, "float64"),
        ({"x": X[0]}, "x"),
        ({"x": np.zeros((2, 3), np.float32)}, "x"),
    ],
    ids=["missing", "unknown", "dtype", "rank", "size"],
)
def test_wrong_inputs_are_an_input_error(
    cli: Cli, add_one: Path, tmp_path: Path, arrays: dict[str, np.ndarray], word: str
) -> None:
    """Arrays that do not fit the model are exit code 5 with a message that names what is wrong."""
    np.savez(tmp_path / "wrong.npz", **arrays)
    outcome = cli("run", add_one, "--device", "cpu", "--inputs", tmp_path / "wrong.npz")
    assert (outcome.code, outcome.out) == (5, "")
    assert word in outcome.err


def test_outputs_that_cannot_be_written_leave_nothing(cli: Cli, add_one: Path, inputs: Path, tmp_path: Path) -> None:
    """A target in a folder that does not exist is an error with the path, and no partial file is left."""
    target = tmp_path / "absent" / "outputs.npz"
    before = sorted(tmp_path.iterdir())
    cli("run", add_one, "--device", "cpu", "--inputs", inputs, "--outputs", target).fails(9, "outputs.npz")
    assert sorted(tmp_path.iterdir()) == before


def test_a_resilient_run_shows_the_health_of_each_device(cli: Cli, add_one: Path) -> None:
    """Beside the device that answered; a device or chain of one's own excludes it."""
    document = cli("run", add_one, "--resilient", "--only", "cpu", "--json").document
    assert (document["device"], document["refused"]) == ("cpu", [])
    assert document["health"] == [{"device": "cpu", "state": "ready", "failures": 0, "reason": ""}]
    assert "ready" in cli("run", add_one, "--resilient", "--only", "cpu").out
    assert cli("run", add_one, "--resilient", "--device", "cpu").code == 2


def test_links_are_followed_into_a_folder_that_is_trusted(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """Without --trust-links the error names it; with it a model of Hugging Face's cache runs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    model = onnx.load(add_one)
    weight = onnx.numpy_helper.from_array(np.ones(64, np.float32), "w")
    weight.raw_data = b""
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="model.onnx.data")
    model.graph.initializer.append(weight)
    (snapshot / "model.onnx").write_bytes(model.SerializeToString())
    (blobs / "0a1b").write_bytes(np.ones(64, "<f4").tobytes())
    try:
        (snapshot / "model.onnx.data").symlink_to(blobs / "0a1b")
    except OSError as err:
        pytest.skip(f"no symbolic links here: {err}")
    cli("run", snapshot / "model.onnx", "--device", "cpu").fails(4, "--trust-links FOLDER")
    trusted = ("--trust-links", blobs)
    assert cli("run", snapshot / "model.onnx", "--device", "cpu", *trusted).code == 0
    assert cli("compare", snapshot / "model.onnx", add_one, *trusted).code == 0
    assert cli("convert", snapshot / "model.onnx", tmp_path / "whole.onnx").code == 4
    assert cli("convert", snapshot / "model.onnx", tmp_path / "whole.onnx", *trusted).code == 0


def test_sequences_and_maps_are_written_too(cli: Cli, inputs: Path, tmp_path: Path) -> None:
    """Items and keys and values have names of their own, also where a sequence is empty; nothing is left out."""
    text = """
    <ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 1]>
    outputs (float[2, 2] x) => (seq(map(int64, float)) scores, seq(float[1, 2]) rows, seq(float) none, float[2, 2] y)
    {
        scores = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 5]> (x)
        rows = SplitToSequence <axis = 0> (x)
        none = SequenceEmpty ()
        y = Neg (x)
    }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    target = tmp_path / "outputs.npz"
    outcome = cli("run", tmp_path / "model.onnx", "--device", "cpu", "--inputs", inputs, "--outputs", target)
    assert outcome.code == 0, outcome.err
    assert [word for word in ("3: 1, 5: 2", "-1.0, -2.0") if word not in outcome.out] == []
    expected = {
        "scores.keys": np.array([3, 5]),
        "scores.values": X,
        "rows[0]": X[:1],
        "rows[1]": X[1:],
        "none[]": np.empty(0),
        "y": -X,
    }
    with np.load(target, allow_pickle=False) as archive:
        assert sorted(archive.files) == sorted(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(archive[name], array)


def test_outputs_that_would_have_one_name_in_the_file_are_refused(cli: Cli, inputs: Path, tmp_path: Path) -> None:
    """Neither of the two would be the one that is written."""
    text = """
    <ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 1]>
    outputs (float[2, 2] x) => (seq(map(int64, float)) y, float[2, 2] z)
    {
        y = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 5]> (x)
        z = Neg (x)
    }
    """
    model = onnx.parser.parse_model(text)
    model.graph.output[1].name = model.graph.node[1].output[0] = "y.keys"
    onnx.save(model, tmp_path / "model.onnx")
    target = tmp_path / "outputs.npz"
    outcome = cli("run", tmp_path / "model.onnx", "--device", "cpu", "--inputs", inputs, "--outputs", target)
    assert outcome.code != 0
    assert "'y.keys'" in outcome.err
    assert not target.exists()


def test_inputs_are_made_up_for_a_decoder_with_a_past(cli: Cli, tmp_path: Path) -> None:
    """The mask is added to the lengths of the cache and of the tokens together, so that other sizes would fail."""
    g = Graph("decoder")
    ids = g.input("input_ids", ["batch", "new"], "i64")
    mask = g.input("attention_mask", ["batch", "length"], "i64")
    past = g.input("past_key_values.0.key", ["batch", 2, "past", 4])
    both = g.concat([past.sum([1, 3]), ids.cast("f32")], axis=1)
    kind = TensorType(DType.F32, Shape(["batch", None]))
    g.set_outputs(list(g.onnx_node("Add", [both, mask.cast("f32")], types=[kind], name="masked")), ["logits"])
    save_onnx(g, tmp_path / "decoder.onnx")
    outcome = cli("run", tmp_path / "decoder.onnx", "--device", "cpu", "--dim", "new=1", "--dim", "past=5", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["outputs"][0]["shape"] == [2, 6]
