"""What people trip over: misspelt names, folders that cannot be written, devices that fail alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Cli
from onnx import parser
from safetensors.numpy import save_file

WEIGHTED = """
<ir_version: 8, opset_import: ["": 18]>
weighted (float[rows, 2] x) => (float[rows, 2] y)
<float[2] w = {1.0, 1.0}> { y = Mul (x, w) }
"""
CLASSIFIER = """
<ir_version: 8, opset_import: ["": 18]>
classifier (float[rows, 3] x) => (float[rows, 2] y)
<float[2, 3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}> { y = Gemm <transB = 1> (x, w) }
"""
PACKAGE = ("package", "create")


def _outputs(command: str, folder: Path) -> list[str]:
    """Return the arguments that make a command write below a folder."""
    name = {"run": "y.npz", "convert": "m.onnx", "package": "m.ortpackage", "report": "m.svg"}[command]
    option = {"run": ["--outputs"], "package": ["--output"], "report": ["--plot"]}.get(command, [])
    return [*option, str(folder / name)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "{model}", "--only", "cpu"),
        ("run", "{model}", "--device", "cpu"),
        ("bench", "{model}", "--device", "cpu", "--runs", "1"),
        ("compare", "{model}", "{model}"),
        ("convert", "{model}", "{out}.onnx"),
        (*PACKAGE, "{model}", "-o", "{out}.ortpackage"),
        ("calibrate", "{model}", "--device", "cpu"),
        ("cache", "explain", "{model}"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_misspelt_dim_is_refused(cli: Cli, add_one: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A size for a dim that the model does not have is refused with the nearest name, and nothing is written."""
    filled = [part.format(model=add_one, out=tmp_path / "out") for part in arguments]
    outcome = cli(*filled, "--dim", "rosw=2")
    assert outcome.code == 4
    assert "dim 'rosw'" in outcome.err
    assert "did you mean 'rows'" in outcome.err
    assert [*tmp_path.glob("out*")] == []


@pytest.mark.parametrize("command", ["run", "convert", "package", "report"])
def test_what_cannot_be_written_has_an_exit_code_of_its_own(
    cli: Cli, add_one: Path, tmp_path: Path, command: str
) -> None:
    """A target in a folder that does not exist is exit code 9 for every command, with the path and no traceback."""
    if command == "report":
        pytest.importorskip("matplotlib")
    words = PACKAGE if command == "package" else (command,)
    outcome = cli(*words, add_one, *_outputs(command, tmp_path / "absent"))
    assert outcome.code == 9
    assert "absent" in outcome.err
    assert "cannot be written" in outcome.err


@pytest.mark.parametrize("form", ["onnx", "triton"])
def test_an_export_into_a_file_has_that_code_too(cli: Cli, add_one: Path, tmp_path: Path, form: str) -> None:
    """`package export` to a place that cannot be a folder is exit code 9."""
    assert cli(*PACKAGE, add_one, "-o", tmp_path / "m.ortpackage").code == 0
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    target = tmp_path / "taken" / "below"
    outcome = cli("package", "export", tmp_path / "m.ortpackage", target, "--format", form)
    assert outcome.code == 9, outcome.err
    assert "cannot be written" in outcome.err


def test_a_benchmark_in_which_every_device_fails_is_a_failure(cli: Cli, add_one: Path) -> None:
    """The exit code is that of the device's error; with another device that answers it is 0."""
    absent = "ane" if sys.platform != "darwin" else "directx"
    outcome = cli("bench", add_one, "--device", absent, "--runs", 1, "--json")
    assert outcome.code == 3
    assert "not available" in outcome.document["devices"][0]["failure"]
    assert cli("bench", add_one, "--device", f"{absent},cpu", "--runs", 1).code == 0


def test_sizes_that_were_not_given_are_the_same_everywhere(cli: Cli, add_one: Path) -> None:
    """`report`, `bench`, `run` and `compare` assume the same size for a dim, and state it."""
    outcomes = [
        cli("report", add_one, "--only", "cpu"),
        cli("bench", add_one, "--device", "cpu", "--runs", 1),
        cli("run", add_one, "--device", "cpu"),
        cli("compare", add_one, add_one),
    ]
    assert [outcome.code for outcome in outcomes] == [0] * 4
    assert ["rows=2" in outcome.err for outcome in outcomes] == [True] * 4
    assert cli("report", add_one, "--only", "cpu", "--json").document["assumed_dims"] == {"rows": 2}


def test_a_weight_file_is_named_and_not_called_damaged(cli: Cli, tmp_path: Path) -> None:
    """`inspect` and `run` name what a file is that holds no model."""
    save_file({"w": np.zeros((4, 4), np.float32)}, tmp_path / "w.safetensors")
    (tmp_path / "w.gguf").write_bytes(b"GGUF" + bytes(60))
    np.savez(tmp_path / "w.npz", w=np.zeros(3))
    for name, what in (
        ("w.safetensors", "a safetensors file"),
        ("w.gguf", "a GGUF file"),
        ("w.npz", "a numpy archive"),
    ):
        for command in ("inspect", "run"):
            outcome = cli(command, tmp_path / name)
            assert outcome.code == 4
            assert f"{what}, which holds weights and no computation" in outcome.err.replace(" (.npz)", "")


def test_messages_name_options_of_the_command_line(cli: Cli, tmp_path: Path) -> None:
    """An error whose remedy is an argument in Python names the option; here `--cast`, which then works."""
    onnx.save(parser.parse_model(WEIGHTED), tmp_path / "m.onnx")
    np.savez(tmp_path / "w.npz", w=np.array([2, 3], np.float64))
    arguments = ("convert", tmp_path / "m.onnx", tmp_path / "out.onnx", "--params", tmp_path / "w.npz", "--no-verify")
    outcome = cli(*arguments)
    assert outcome.code == 4
    assert "--cast converts floats" in outcome.err
    assert "cast=True" not in outcome.err
    assert cli(*arguments, "--cast").code == 0
    assert cli("convert", tmp_path / "m.onnx", tmp_path / "b.onnx", "--cast").code == 2
    assert "--force to replace" in cli(*arguments).err


def test_a_classifier_with_types_of_its_weights_is_quantised(cli: Cli, tmp_path: Path) -> None:
    """Exporters list the types of weights, which are stale once the tool has transposed the weight of a Gemm."""
    model = parser.parse_model(CLASSIFIER)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [2, 3]))
    onnx.save(model, tmp_path / "m.onnx")
    outcome = cli("convert", tmp_path / "m.onnx", tmp_path / "q.onnx", "--quantize", "int8-dynamic", "--no-verify")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("folder", [False, True])
def test_packages_are_taken_where_a_model_is(cli: Cli, add_one: Path, tmp_path: Path, folder: bool) -> None:
    """`inspect`, `run`, `bench` and `report` open a package with its own policy and dims."""
    package = tmp_path / "m.ortpackage"
    settings = ("--dim", "rows=3", "--only", "cpu", *["--folder"] * folder)
    assert cli(*PACKAGE, add_one, "-o", package, *settings).code == 0
    assert cli("inspect", package, "--json").document["dims"] == ["rows"]
    assert cli("run", package, "--json").document["outputs"][0]["shape"] == [3, 2]
    [row] = cli("bench", package, "--runs", 1, "--json").document["devices"]
    assert (row["device"], row["failure"]) == ("cpu", "")
    rows = cli("report", package, "--open", "--json").document["devices"]
    assert [(row["device"], row["placement_share"]) for row in rows] == [("cpu", 1.0)]
    assert cli("run", package, "--device", "webgpu").code == 3
    assert cli("run", tmp_path).code == 4
