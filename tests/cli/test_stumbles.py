"""What people trip over: misspelt names, folders that cannot be written, devices that fail alone."""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Cli
from onnx import parser
from safetensors.numpy import save_file

from rlx_ort.errors import CalibrationError

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
DET = """
<ir_version: 8, opset_import: ["": 18]>
det (float[rows, 2, 2] x) => (float[rows] y) { a = Add (x, x)  y = Det (a) }
"""
PACKAGE = ("package", "create")


def _outputs(command: str, folder: Path) -> list[str]:
    """Return the arguments that make a command write below a folder."""
    name = {"run": "y.npz", "convert": "m.onnx", "package": "m.ortpackage", "report": "m.svg", "split": "p.json"}[
        command
    ]
    option = {"run": ["--outputs"], "package": ["--output"], "report": ["--plot"], "split": ["--out"]}.get(command, [])
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
    cli(*filled, "--dim", "rosw=2").fails(4, "dim 'rosw'", "did you mean 'rows'")
    assert [*tmp_path.glob("out*")] == []


@pytest.mark.parametrize("command", ["run", "convert", "package", "report", "split"])
def test_what_cannot_be_written_has_an_exit_code_of_its_own(
    cli: Cli, add_one: Path, tmp_path: Path, command: str
) -> None:
    """A target in a folder that does not exist is exit code 9 for every command, with the path and no traceback."""
    if command == "report":
        pytest.importorskip("matplotlib")
    words = PACKAGE if command == "package" else (command,)
    cli(*words, add_one, *_outputs(command, tmp_path / "absent")).fails(9, "absent", "cannot be written")


@pytest.mark.parametrize("form", ["onnx", "triton"])
def test_an_export_into_a_file_has_that_code_too(cli: Cli, add_one: Path, tmp_path: Path, form: str) -> None:
    """`package export` to a place that cannot be a folder is exit code 9."""
    assert cli(*PACKAGE, add_one, "-o", tmp_path / "m.ortpackage").code == 0
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    target = tmp_path / "taken" / "below"
    cli("package", "export", tmp_path / "m.ortpackage", target, "--format", form).fails(9, "cannot be written")


def test_a_benchmark_of_a_named_device_that_fails_is_a_failure(cli: Cli, add_one: Path) -> None:
    """The exit code is that of the device's error, whether another device answers or not."""
    absent = "ane" if sys.platform != "darwin" else "directx"
    outcome = cli("bench", add_one, "--device", absent, "--runs", 1, "--json")
    assert outcome.code == 3
    assert "not available" in outcome.document["devices"][0]["failure"]
    assert cli("bench", add_one, "--device", f"{absent},cpu", "--runs", 1).code == 3


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
    rows = cli("report", package, "--sessions", "--json").document["devices"]
    assert [(row["device"], row["placement_share"]) for row in rows] == [("cpu", 1.0)]
    assert cli("run", package, "--device", "webgpu").code == 3
    assert cli("run", tmp_path).code == 4


@pytest.mark.parametrize("folder", [False, True])
def test_packages_are_compared_and_converted(cli: Cli, add_one: Path, tmp_path: Path, folder: bool) -> None:
    """With the package's own dims, on either side of `compare`, and `convert` also fixes them in the target."""
    package = tmp_path / "m.ortpackage"
    assert cli(*PACKAGE, add_one, "-o", package, "--dim", "rows=3", *["--folder"] * folder).code == 0
    document = cli("compare", package, add_one, "--html", tmp_path / "page.html", "--json").document
    assert (document["ok"], document["inputs"], document["assumed_dims"]) == (True, {"x": [3, 2]}, {})
    assert "m.ortpackage on cpu" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert cli("compare", add_one, package, "--dim", "rows=3", "--json").document["ok"] is True
    assert cli("convert", package, tmp_path / "out.onnx", "--precision", "f16").code == 0
    [given] = onnx.load(tmp_path / "out.onnx").graph.input
    assert [dim.dim_value for dim in given.type.tensor_type.shape.dim] == [3, 2]


def test_a_package_runs_in_its_precisions_in_compare(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """A package that runs in f16 on the CPU differs from its model by more than f32 does, and by less than f16 may."""
    package = tmp_path / "m.ortpackage"
    assert cli(*PACKAGE, classifier, "-o", package, "--precision", "cpu:f16").code == 0
    assert cli("compare", package, classifier).code == 0
    assert cli("compare", package, classifier, "--tolerance", "1e-5").code == 8


def test_a_damaged_package_is_neither_compared_nor_converted(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """The weights are verified when they are read, and nothing is written."""
    package = tmp_path / "m.ortpackage"
    assert cli(*PACKAGE, classifier, "-o", package, "--folder").code == 0
    weights = max((file for file in package.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    for words in (("compare", package, classifier), ("convert", package, tmp_path / "out.onnx")):
        cli(*words).fails(7, weights.name)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.webgpu
def test_the_names_of_one_device_have_one_row(cli: Cli, add_one: Path) -> None:
    """`report`, `bench` and `package verify` show it once, by the first name that was given, and say so."""
    rows = {row["device"]: row["same_as"] for row in cli("report", add_one, "--json").document["devices"]}
    names = ("cpu", "gpu", "vulkan", "webgpu")
    assert [rows[name] for name in names] == [None, None, "gpu", "gpu"]
    printed = cli("report", add_one).out
    assert "other names of gpu: vulkan, webgpu" in printed
    assert [line for line in printed.splitlines() if line.strip().startswith(("vulkan", "webgpu"))] == []
    preferred = cli("report", add_one, "--prefer", "vulkan", "--json").document["devices"]
    assert [row["device"] for row in preferred if row["same_as"] is None and row["device"] in names] == [
        "cpu",
        "vulkan",
    ]
    outcome = cli("bench", add_one, "--device", "webgpu,gpu,cpu", "--runs", "1", "--json")
    assert sorted(row["device"] for row in outcome.document["devices"]) == ["cpu", "webgpu"]
    assert "gpu is the same device as webgpu" in outcome.err


@pytest.mark.webgpu
def test_a_calibration_counts_for_every_name_of_the_device(cli: Cli, add_one: Path) -> None:
    """What was measured as `webgpu` predicts for `gpu` and `vulkan`; both names together are measured once."""
    outcome = cli("calibrate", "--quick", "--device", "webgpu,vulkan", "--json")
    assert [row["device"] for row in outcome.document["devices"]] == ["webgpu"]
    for name in ("gpu", "vulkan", "webgpu"):
        [row] = cli("report", add_one, "--only", name, "--json").document["devices"]
        assert row["profile_source"].startswith("quick calibration of"), name


@pytest.mark.webgpu
def test_a_package_is_warmed_once_for_the_names_of_one_device(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """A second name of the device is not compiled for again, which would double time and disk."""
    package = tmp_path / "m.ortpackage"
    assert cli(*PACKAGE, add_one, "-o", package).code == 0
    outcome = cli("package", "warm", package, "--device", "gpu,webgpu", "--json")
    assert [row["device"] for row in outcome.document["devices"]] == ["gpu"]
    assert "webgpu is the same device as gpu" in outcome.err
    assert cli(*PACKAGE, add_one, "-o", package, "--precision", "webgpu:f16", "--force").code == 0
    rows = cli("package", "warm", package, "--device", "gpu,webgpu", "--json").document["devices"]
    assert [row["device"] for row in rows] == ["gpu", "webgpu"]  # one in f32, one in f16


def test_a_table_without_rows_is_not_printed(cli: Cli, add_one: Path) -> None:
    """`report --only cpu` has no device that is not here, so there is no table of them."""
    assert "why not" not in cli("report", add_one, "--only", "cpu").out


@pytest.mark.webgpu
def test_a_device_that_needs_help_leads_to_an_option_that_exists(cli: Cli, tmp_path: Path) -> None:
    """`bench` and `package` have no --assisted: the message names the node and how the CPU may help there."""
    onnx.save(parser.parse_model(DET), tmp_path / "det.onnx")
    package = tmp_path / "det.ortpackage"
    assert cli(*PACKAGE, tmp_path / "det.onnx", "-o", package).code == 0
    commands = [
        ("bench", tmp_path / "det.onnx", "--runs", "1"),
        ("package", "warm", package),
        ("package", "run", package),
    ]
    for command in commands:
        text = cli(*command, "--device", "webgpu").err
        assert "(Det)" in text
        assert "no --device in other commands" in text
        assert "CompileOptions" not in text


def test_a_file_of_weights_leads_to_an_option_that_exists(cli: Cli, tmp_path: Path) -> None:
    """`inspect` of safetensors names `--params` of `convert`, not functions of Python."""
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "w.safetensors")
    outcome = cli("inspect", tmp_path / "w.safetensors")
    assert outcome.code == 4
    assert "with --params of `convert`" in outcome.err
    assert "(" not in outcome.err.partition("holds weights")[2]


def test_a_hard_link_leads_to_what_a_command_can_do(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """A package with a second name is refused with what can be done in a shell: copy it."""
    package = tmp_path / "m.ortpackage"
    assert cli(*PACKAGE, add_one, "-o", package).code == 0
    os.link(package, tmp_path / "other.ortpackage")
    outcome = cli("package", "run", package)
    assert outcome.code == 7
    assert "hard links" in outcome.err
    assert "private" not in outcome.err


def test_a_damaged_copy_that_runs_from_the_cache_is_reported(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """`package run` has right outputs from the compile cache, and says that the package is damaged: exit code 7."""
    package = tmp_path / "m.ortpackage"
    assert cli(*PACKAGE, classifier, "-o", package, "--only", "cpu").code == 0
    assert cli("package", "warm", package, "--device", "cpu").code == 0
    copy = Path(shutil.copy(package, tmp_path / "copy.ortpackage"))
    assert "the compile cache" in cli("package", "run", copy).out
    with zipfile.ZipFile(copy) as archive:
        member = next(each for each in archive.infolist() if each.filename != "rlx.json")
    content = bytearray(copy.read_bytes())
    content[member.header_offset + 30 + len(member.filename) + len(member.extra) + member.file_size // 2] ^= 1
    copy.write_bytes(content)
    outcome = cli("package", "run", copy)
    assert outcome.code == 7
    assert "has changed since it was packed" in outcome.err
    assert cli("package", "run", package).code == 0


def test_inspect_names_the_operators(cli: Cli, add_one: Path) -> None:
    """As the file has them."""
    assert re.search(r"1\s+Add\b", cli("inspect", add_one).out)


def test_a_time_below_what_a_clock_sees_is_no_long_number() -> None:
    """Predictions add up parts of a nanosecond."""
    from rlx_ort.cli.show import duration

    assert [duration(ns) for ns in (5.12e-07, 0.0, 0.5, 1500.0)] == ["< 0.1 ns", "0 ns", "0.5 ns", "1.5 us"]


def test_a_package_of_a_package_says_what_it_leaves_behind(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The policy and the dims of the first are not taken over."""
    first, second = tmp_path / "first.ortpackage", tmp_path / "second.ortpackage"
    assert cli(*PACKAGE, add_one, "-o", first, "--dim", "rows=3", "--only", "cpu").code == 0
    outcome = cli(*PACKAGE, first, "-o", second)
    assert outcome.code == 0
    assert "give its settings and golden cases again" in outcome.err
    assert "any device" in cli("package", "inspect", second).out


def test_a_package_is_calibrated_at_its_own_sizes(
    cli: Cli, add_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dims that the package fixes count, and those of --dim come first."""
    used = []

    def calibrate(device: object, *, graph: object, dims: dict[str, int], quick: bool) -> object:
        used.append(dims)
        raise CalibrationError("not measured here")

    monkeypatch.setattr("rlx_ort.calibrate", calibrate)
    package = tmp_path / "m.ortpackage"
    assert cli(*PACKAGE, add_one, "-o", package, "--dim", "rows=3").code == 0
    cli("calibrate", package, "--device", "cpu")
    cli("calibrate", package, "--device", "cpu", "--dim", "rows=5")
    assert used == [{"rows": 3}, {"rows": 5}]
