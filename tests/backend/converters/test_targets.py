"""What targets write: the same results, whole files or none, and clear refusals."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file
from sample_models.bundles import convnet, decoder, images, relative, run, tokens

from rlx_ort import ConversionError, DeviceUnavailableError, RlxError, Session
from rlx_ort.converters.bundle import bundle_from_graph, bundle_of
from rlx_ort.converters.files import load_graph
from rlx_ort.converters.targets import TargetOptions, write_target
from rlx_ort.ir.tensor import TensorData
from rlx_ort.providers.ort_provider import save_optimized

FEEDS = {"ids": tokens(2)}


def run_file(path: Path, *, optimize: bool = True) -> np.ndarray[Any, Any]:
    """Run an ONNX or ORT file with plain ONNX Runtime."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, FEEDS)[0])


@pytest.mark.parametrize(
    ("name", "options", "written"),
    [
        ("a.onnx", TargetOptions(), ["a.onnx"]),
        ("b.onnx", TargetOptions(external_data=True), ["b.onnx", "b.onnx.data"]),
        ("c.onnx", TargetOptions(params="weights.safetensors"), ["c.onnx", "weights.safetensors"]),
        ("d.onnx", TargetOptions(opset=17, ir_version=9), ["d.onnx"]),
        ("e.ort", TargetOptions(saver=save_optimized), ["e.ort"]),
        ("f.onnx", TargetOptions(saver=save_optimized, device="cpu"), ["f.onnx"]),
        ("g.onnx", TargetOptions(saver=save_optimized, device="cpu", external_data=True), ["g.onnx", "g.onnx.data"]),
    ],
    ids=["inside", "data file", "safetensors", "older", "ort format", "optimised", "optimised, data file"],
)
def test_a_written_model_gives_the_same_results(
    tmp_path: Path, name: str, options: TargetOptions, written: list[str]
) -> None:
    """Plain ONNX Runtime opens it from another folder than the working one; the model is named first."""
    source = decoder(1)
    files = write_target(source, tmp_path / name, options)
    assert [file.name for file in files] == written
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(written)
    fresh = options.saver is None
    assert relative(run_file(tmp_path / name, optimize=fresh), run(source, FEEDS)[0]) < 1e-5


def test_a_graph_file_is_read_back_with_the_same_results(tmp_path: Path) -> None:
    """JSON and safetensors."""
    source = decoder(1)
    written = write_target(source, tmp_path / "m.json")
    assert [file.name for file in written] == ["m.json", "m.safetensors"]
    again = bundle_from_graph(load_graph(tmp_path / "m.json"))
    assert relative(run(again, FEEDS)[0], run(source, FEEDS)[0]) < 1e-5


def test_detached_weights_are_a_safetensors_file_for_everybody(tmp_path: Path) -> None:
    """Its reference implementation reads it, and the model holds no weight."""
    source = convnet()
    write_target(source, tmp_path / "m.onnx", TargetOptions(params="m.safetensors"))
    stored = load_file(tmp_path / "m.safetensors")
    assert stored.keys() == source.weights.keys()
    np.testing.assert_array_equal(stored["stem"], source.weights["stem"].numpy())
    assert (tmp_path / "m.onnx").stat().st_size < 10_000
    again = bundle_of(onnx.load(tmp_path / "m.onnx", load_external_data=False), tmp_path)
    feeds = {"image": images(1)}
    np.testing.assert_array_equal(run(again, feeds)[0], run(source, feeds)[0])


def test_the_chosen_opset_and_ir_version_are_in_the_file(tmp_path: Path) -> None:
    """And the checker agrees."""
    write_target(decoder(1), tmp_path / "m.onnx", TargetOptions(opset=18, ir_version=9))
    model = onnx.load(tmp_path / "m.onnx")
    assert (model.opset_import[0].version, model.ir_version) == (18, 9)
    onnx.checker.check_model(model, full_check=True)


def test_ort_format_without_a_device_holds_nothing_of_this_processor(tmp_path: Path) -> None:
    """No blocked layout, which depends on the width of its vectors; fusions that hold everywhere are done."""
    write_target(convnet(), tmp_path / "m.ort", TargetOptions(saver=save_optimized))
    written = (tmp_path / "m.ort").read_bytes()
    assert written[4:8] == b"ORTM"  # the identifier of the format
    assert b"ReorderInput" not in written
    assert b"FusedConv" in written


@pytest.mark.webgpu
def test_a_model_is_optimised_for_another_device(tmp_path: Path) -> None:
    """It opens on that device and gives nearly the same."""
    source = convnet()
    write_target(source, tmp_path / "m.onnx", TargetOptions(saver=save_optimized, device="webgpu"))
    assert (tmp_path / "m.onnx").stat().st_size > 10_000


def test_a_model_is_not_optimised_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    """The provider's remedy is in the message and nothing is left."""
    with pytest.raises((DeviceUnavailableError, ConversionError)):
        write_target(convnet(), tmp_path / "m.onnx", TargetOptions(saver=save_optimized, device="qnn"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("m.pb", TargetOptions(), r"m.pb has to end in .onnx, .json, .ort"),
        ("m.json", TargetOptions(opset=17), "m.json: opset cannot be chosen for .json"),
        ("m.ort", TargetOptions(external_data=True), "external_data cannot be chosen for .ort"),
        ("m.onnx", TargetOptions(device="cpu", opset=17), "opset cannot be chosen for .onnx for a device"),
        ("m.onnx", TargetOptions(params="../w.safetensors"), "params is the name of a file beside it"),
        ("m.onnx", TargetOptions(params="w.safetensors", external_data=True), "excludes external_data"),
        ("m.ort", TargetOptions(), "m.ort is written by ONNX Runtime; pass"),
        ("m.onnx", TargetOptions(opset=6), "cannot go from opset 21 to 6"),
        ("missing/m.onnx", TargetOptions(), "give a target in a folder that exists"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(
    tmp_path: Path, name: str, options: TargetOptions, message: str
) -> None:
    """And nothing is left behind."""
    with pytest.raises(ConversionError, match=message):
        write_target(decoder(1), tmp_path / name, options)
    assert list(tmp_path.iterdir()) == []


ALL_TARGETS = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m.onnx", {}),
        ("m.onnx", {"external_data": True}),
        ("m.onnx", {"params": "m.safetensors"}),
        ("m.json", {}),
        ("m.ort", {"saver": save_optimized}),
        ("m.onnx", {"saver": save_optimized, "device": "cpu", "external_data": True}),
    ],
    ids=["onnx", "data file", "safetensors", "json", "ort", "optimised"],
)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@ALL_TARGETS
def test_nothing_is_replaced_unless_asked_for(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """What is there stays as it is; with overwrite it is replaced, and no temporary file is left."""
    write_target(convnet(), tmp_path / name, TargetOptions(**options))
    before = contents(tmp_path)
    with pytest.raises(ConversionError, match="exists and was left as it is"):
        write_target(decoder(1), tmp_path / name, TargetOptions(**options))
    assert contents(tmp_path) == before
    write_target(decoder(1), tmp_path / name, TargetOptions(**options, overwrite=True))
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert all(after[file] != before[file] for file in before)


@ALL_TARGETS
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interruption_leaves_the_old_files_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], failure: BaseException
) -> None:
    """The failure comes when the last file is moved into place, after all were written."""
    write_target(convnet(), tmp_path / name, TargetOptions(**options))
    before = contents(tmp_path)
    replace, moved = os.replace, []

    def failing(source: Path, target: Path) -> None:
        if target == tmp_path / name and not moved:
            moved.append(source)
            raise failure
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises((RlxError, KeyboardInterrupt)):
        write_target(decoder(1), tmp_path / name, TargetOptions(**options, overwrite=True))
    assert moved
    assert contents(tmp_path) == before


@pytest.mark.parametrize("options", [{}, {"external_data": True}])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_disk_that_fills_up_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], failure: BaseException
) -> None:
    """The tenth weight does not fit any more."""
    pieces, count = TensorData.pieces, []

    def failing(data: TensorData) -> Any:
        count.append(data)
        if len(count) == 10:
            raise failure
        return pieces(data)

    monkeypatch.setattr(TensorData, "pieces", failing)
    with pytest.raises((ConversionError, KeyboardInterrupt)):
        write_target(decoder(1), tmp_path / "m.onnx", TargetOptions(**options))
    assert list(tmp_path.iterdir()) == []


def test_a_session_of_ours_runs_an_ort_file_s_graph_source(tmp_path: Path) -> None:
    """The graph file of a model compiles and runs through the library as the model does."""
    source = convnet()
    write_target(source, tmp_path / "m.json")
    feeds = {"image": images(2)}
    (got,) = Session("cpu").compile(load_graph(tmp_path / "m.json")).run(feeds)
    assert relative(got, run(source, feeds)[0]) < 1e-5
