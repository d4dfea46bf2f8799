"""`convert` with options: what it writes and prints, and what it refuses before it reads anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Cli
from onnx import TensorProto, numpy_helper
from sample_models.source_files import small_graph

from rlx_ort import GraphError, save_onnx
from rlx_ort.ir.serde import save_json


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a small model with a product that can be quantised, and a dim called batch."""
    path = tmp_path / "small.onnx"
    save_onnx(small_graph(), path)
    return path


def test_the_summary_says_what_changed(cli: Cli, small: Path, tmp_path: Path) -> None:
    """Size, nodes, opset, dtypes, what stayed f32, and the error of each output; notes go to stderr."""
    outcome = cli("convert", small, tmp_path / "half.onnx", "--precision", "f16", "--keep", "Relu")
    assert outcome.code == 0, outcome.err
    for text in ("written", "size", "f32 ", "-> f16", "kept in f32", "1 Relu", "relative L2", "cosine", "ok"):
        assert text in outcome.out
    assert "verified on random inputs, seed 0 with batch=2" in outcome.err
    model = onnx.load(tmp_path / "half.onnx")
    assert TensorProto.FLOAT16 in {tensor.data_type for tensor in model.graph.initializer}


@pytest.mark.parametrize("name", ["sub/w.safetensors", "sub\\w.safetensors", "C:w.safetensors", "..", ""])
def test_detached_weights_are_beside_the_target(cli: Cli, small: Path, tmp_path: Path, name: str) -> None:
    """A name with a folder or drive is wrong usage on every system, and nothing is written."""
    cli("convert", small, tmp_path / "o.onnx", "--detach", name).fails(2, "beside the target")
    assert not (tmp_path / "o.onnx").exists()


def test_sizes_that_were_not_given_are_those_of_other_commands(cli: Cli, small: Path, tmp_path: Path) -> None:
    """`report`, `compare` and the check of `convert` assume the same sizes for named dims."""
    reported = cli("report", small, "--only", "cpu", "--json").document["assumed_dims"]
    assert reported.keys() == {"batch"}
    assert cli("compare", small, small, "--json").document["assumed_dims"] == reported
    converted = cli("convert", small, tmp_path / "o.onnx", "--json").document
    assert converted["verification"]["assumed_dims"] == reported


def test_json_holds_the_report_and_nothing_else(cli: Cli, small: Path, tmp_path: Path) -> None:
    """One document with files, facts before and after, steps, times and the verification."""
    outcome = cli("convert", small, tmp_path / "b.onnx", "--opset", "17", "--simplify", "--dim", "batch=3", "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["target"] == [str(tmp_path / "b.onnx")]
    assert document["target_bytes"] == (tmp_path / "b.onnx").stat().st_size
    assert (document["before"]["opset"] != 17, document["after"]["opset"]) == (True, 17)
    assert {"dims", "opset", "simplify"} <= set(document["steps"])
    assert {"read", "write", "verify"} <= set(document["seconds"])
    assert document["verification"]["ok"] is True
    assert document["verification"]["inputs"] == {"x": [3, 16]}
    assert document["verification"]["outputs"][0]["relative_l2"] <= 1e-5


def test_bf16_is_verified_where_no_kernel_runs_it(cli: Cli, small: Path, tmp_path: Path) -> None:
    """Its results are rounded, so the error is that of bf16, and the document says how it was run."""
    outcome = cli("convert", small, tmp_path / "b.onnx", "--precision", "bf16", "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["verified"] is True
    assert "rounded" in document["emulated"]
    assert 2**-12 < document["verification"]["outputs"][0]["relative_l2"] < 4e-2
    assert cli("convert", tmp_path / "b.onnx", tmp_path / "c.json").code == 0
    model = onnx.load(tmp_path / "b.onnx")
    assert TensorProto.BFLOAT16 in {tensor.data_type for tensor in model.graph.initializer}


def test_a_result_beyond_the_tolerance_is_not_written(cli: Cli, small: Path, tmp_path: Path) -> None:
    """Exit code 8, the error of each output, an old target as it was, and the source untouched."""
    target, before = tmp_path / "half.onnx", small.read_bytes()
    target.write_bytes(b"old")
    arguments = ("convert", small, target, "--precision", "f16", "--tolerance", "1e-9", "--force")
    cli(*arguments).fails(8, "relative L2 <= 1e-09", "y: max abs")
    assert target.read_bytes() == b"old"
    assert small.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half.onnx", "small.onnx"]
    document = json.loads(cli(*arguments, "--json").out)
    assert document["verification"]["ok"] is False


def test_without_verification_nothing_is_run(cli: Cli, tmp_path: Path) -> None:
    """A model that no engine runs converts with --no-verify, and the note says that it was not verified."""
    text = '<ir_version: 8, opset_import: ["" : 18, "mine" : 1]> m (float[2] x) => (float[2] y) { y = mine.Secret (x) }'
    source = tmp_path / "mine.onnx"
    onnx.save(onnx.parser.parse_model(text), source)
    refused = cli("convert", source, tmp_path / "out.onnx")
    assert refused.code == GraphError.exit_code
    assert not (tmp_path / "out.onnx").exists()
    outcome = cli("convert", source, tmp_path / "out.onnx", "--no-verify")
    assert outcome.code == 0, outcome.err
    assert "not verified" in outcome.err


def test_given_inputs_are_used(cli: Cli, small: Path, tmp_path: Path) -> None:
    """The verification runs on the arrays of the file; a missing one is an error."""
    np.savez(tmp_path / "in.npz", x=np.ones((5, 16), np.float32))
    outcome = cli("convert", small, tmp_path / "b.json", "--inputs", tmp_path / "in.npz", "--json")
    assert json.loads(outcome.out)["verification"]["inputs"] == {"x": [5, 16]}
    np.savez(tmp_path / "in.npz", z=np.ones((5, 16), np.float32))
    cli("convert", small, tmp_path / "c.json", "--inputs", tmp_path / "in.npz").fails(5, "not given: x")
    assert not (tmp_path / "c.json").exists()


def test_weights_are_taken_from_a_file(cli: Cli, small: Path, tmp_path: Path) -> None:
    """With --params the model has the file's weights, and the summary names what did not fit together."""
    np.savez(tmp_path / "w.npz", w=np.full((16, 8), 2, np.float32), stranger=np.zeros(3, np.float32))
    outcome = cli("convert", small, tmp_path / "b.onnx", "--params", tmp_path / "w.npz")
    assert outcome.code == 0, outcome.err
    assert "stranger" in outcome.out
    weights = {tensor.name: tensor for tensor in onnx.load(tmp_path / "b.onnx").graph.initializer}
    assert (numpy_helper.to_array(weights["w"]) == 2).all()


@pytest.mark.parametrize("by_file", [True, False])
def test_weights_of_other_names_are_renamed(cli: Cli, small: Path, tmp_path: Path, by_file: bool) -> None:
    """By a rename file or by a pattern."""
    np.savez(tmp_path / "w.npz", **{"model.w": np.full((16, 8), 2, np.float32)})
    (tmp_path / "renames.json").write_text('{"model.w": "w"}', encoding="utf-8")
    rename = tmp_path / "renames.json" if by_file else r"model\.(.*)=\1"
    outcome = cli("convert", small, tmp_path / "b.onnx", "--params", tmp_path / "w.npz", "--rename", rename)
    assert outcome.code == 0, outcome.err
    weights = {tensor.name: tensor for tensor in onnx.load(tmp_path / "b.onnx").graph.initializer}
    assert (numpy_helper.to_array(weights["w"]) == 2).all()


def test_weights_of_no_use_are_an_error(cli: Cli, small: Path, tmp_path: Path) -> None:
    """A file of which the model takes nothing is most likely the wrong one."""
    np.savez(tmp_path / "w.npz", stranger=np.zeros(3, np.float32))
    cli("convert", small, tmp_path / "b.onnx", "--params", tmp_path / "w.npz").fails(4, "stranger")


def test_a_graph_without_weights_gets_them(cli: Cli, tmp_path: Path) -> None:
    """A graph file whose parameters have no data yet becomes a whole model."""
    graph = small_graph()
    graph.weights.clear()
    save_json(graph, tmp_path / "bare.json")
    np.savez(tmp_path / "w.npz", w=np.ones((16, 8), np.float32), b=np.ones(8, np.float32))
    assert cli("convert", tmp_path / "bare.json", tmp_path / "b.onnx").code == 4
    outcome = cli("convert", tmp_path / "bare.json", tmp_path / "b.onnx", "--params", tmp_path / "w.npz")
    assert outcome.code == 0, outcome.err


def test_a_part_is_cut_out(cli: Cli, small: Path, tmp_path: Path) -> None:
    """--cut-outputs names a value inside, and --cut-inputs where the part begins."""
    [relu] = [node for node in onnx.load(small).graph.node if node.op_type == "Relu"]
    inside, outside = relu.input[0], relu.output[0]
    outcome = cli("convert", small, tmp_path / "part.onnx", "--cut-inputs", inside, "--cut-outputs", outside)
    assert outcome.code == 0, outcome.err
    graph = onnx.load(tmp_path / "part.onnx").graph
    assert [node.op_type for node in graph.node] == ["Relu"]
    assert ([value.name for value in graph.input], [value.name for value in graph.output]) == ([inside], [outside])


def test_weights_go_beside_the_model_where_asked(cli: Cli, small: Path, tmp_path: Path) -> None:
    """--external-data writes a data file, --detach a safetensors file; both belong to the target."""
    assert cli("convert", small, tmp_path / "a.onnx", "--external-data").code == 0
    assert (tmp_path / "a.onnx.data").exists()
    assert cli("convert", tmp_path / "a.onnx", tmp_path / "b.onnx", "--detach", "b.safetensors").code == 0
    assert (tmp_path / "b.safetensors").exists()
    assert cli("convert", tmp_path / "b.onnx", tmp_path / "c.onnx", "--one-file").code == 0
    assert cli("compare", small, tmp_path / "c.onnx").code == 0


def test_static_quantisation_is_calibrated(cli: Cli, small: Path, tmp_path: Path) -> None:
    """--calibration gives the samples; the model holds int8 weights afterwards."""
    np.savez(tmp_path / "samples.npz", x=np.random.default_rng(0).standard_normal((8, 1, 16)).astype(np.float32))
    arguments = ("--quantize", "int8-static", "--calibration", tmp_path / "samples.npz", "--json")
    outcome = cli("convert", small, tmp_path / "int8.onnx", *arguments)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["steps"]["quantize"]["samples"] == 8
    assert document["verification"]["tolerance"] == {"relative_l2": None, "cosine": 0.99}


def test_an_optimised_model_and_an_ort_file_are_verified_too(cli: Cli, small: Path, tmp_path: Path) -> None:
    """Both are opened and run before they appear."""
    for target, more in (("cpu.onnx", ("--device", "cpu")), ("model.ort", ())):
        outcome = cli("convert", small, tmp_path / target, *more, "--json")
        assert outcome.code == 0, outcome.err
        assert json.loads(outcome.out)["verification"]["ok"] is True


NO_ENGINE = """
import importlib.machinery, sys

HIDDEN = ("onnxruntime", "onnx_ir", "torch")

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
from rlx_ort.cli import main
main(sys.argv[1:])
"""


def test_without_an_engine_formats_convert_and_the_note_says_unverified(small: Path, tmp_path: Path) -> None:
    """ONNX to JSON and back need no extra; asking for a tolerance does."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", NO_ENGINE, "convert", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)

    there, back = run(small, tmp_path / "b.json"), run(tmp_path / "b.json", tmp_path / "c.onnx")
    assert (there.returncode, back.returncode) == (0, 0), there.stderr + back.stderr
    assert "not verified" in there.stderr
    asked = run(small, tmp_path / "d.json", "--tolerance", "1")
    assert asked.returncode == 4
    assert "cannot be verified" in asked.stderr


def test_a_model_may_be_converted_in_its_place(cli: Cli, small: Path, tmp_path: Path) -> None:
    """With --force the source may be the target, with its data file beside it too."""
    assert cli("convert", small, small, "--force", "--external-data").code == 0
    outcome = cli("convert", small, small, "--force", "--external-data", "--precision", "f16")
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.onnx", "small.onnx.data"]
    assert cli("inspect", small).code == 0


@pytest.mark.parametrize(("shape", "code"), [((-1, 6), 0), ((0, 6), 0), ((1, -1), 4), ((1, 6), 4)])
def test_a_fixed_dim_is_opened_where_the_graph_allows_it(
    cli: Cli, tmp_path: Path, shape: tuple[int, int], code: int
) -> None:
    """The result takes other sizes, with a name for the dim; a graph that repeats the size is refused."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> fixed (float[1, 6] x, float[1, 6] b) => (float[1, 6] y)'
        f"<int64[2] s = {{{shape[0]}, {shape[1]}}}> {{ h = Add (x, b)  y = Reshape (h, s) }}"
    )
    onnx.save(model, tmp_path / "fixed.onnx")
    outcome = cli("convert", tmp_path / "fixed.onnx", tmp_path / "free.onnx", "--free", "batch")
    assert outcome.code == code, outcome.err
    if code:
        assert "dim 'batch' cannot be opened" in outcome.err
        assert not (tmp_path / "free.onnx").exists()
    else:
        shown = cli("inspect", tmp_path / "free.onnx", "--json").document
        assert [row["shape"] for row in shown["inputs"]] == [["batch", 6]] * 2
        assert shown["outputs"][0]["shape"][0] != 1
        assert cli("run", tmp_path / "free.onnx", "--device", "cpu", "--dim", "batch=5").code == 0
    wrong = cli("convert", tmp_path / "fixed.onnx", tmp_path / "b.onnx", "--free", "rows=x[0],c[0]")
    assert "no dim 'c[0]'" in wrong.err


@pytest.mark.parametrize("name", ["fp16", "float16", "half"])
def test_a_precision_has_the_names_that_others_give_it(cli: Cli, small: Path, tmp_path: Path, name: str) -> None:
    """They give the same file as `f16`, which help lists alone."""
    for precision in ("f16", name):
        assert cli("convert", small, tmp_path / f"{precision}.onnx", "--precision", precision).code == 0
    assert (tmp_path / f"{name}.onnx").read_bytes() == (tmp_path / "f16.onnx").read_bytes()
    assert name not in cli("convert", "--help").out


def test_int8_is_a_quantisation(cli: Cli, small: Path, tmp_path: Path) -> None:
    """As a precision it leads to the option; there it is the dynamic one."""
    target = tmp_path / "small8.onnx"
    outcome = cli("convert", small, target, "--precision", "int8")
    assert outcome.code == 4
    assert "--quantize int8" in outcome.err
    outcome = cli("convert", small, target, "--quantize", "int8", "--no-verify", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["steps"]["quantize"]["kind"] == "int8-dynamic"
