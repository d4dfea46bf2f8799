"""Every command on models as users export them: text, images, lines of varying width, a recurrent net, a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import Cli
from model_corpus import UserModel, user_model

NAMES = (
    "bert-dynamo-20",
    "crnn-torchscript-17",
    "lstm-torchscript-17",
    "sklearn_classifier-skl2onnx-17",
    "unet-torchscript-17",
)


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> UserModel:
    return user_model(request.param)


@pytest.fixture
def path(model: UserModel, tmp_path: Path) -> Path:
    """Return the model as a file."""
    file = tmp_path / "model.onnx"
    file.write_bytes(model.model())
    return file


@pytest.fixture
def inputs(model: UserModel, tmp_path: Path) -> Path:
    """Return inputs of the second case as an npz file."""
    file = tmp_path / "inputs.npz"
    feeds = model.feeds(model.cases[1])
    np.savez(file, **{name: array.astype(str) if array.dtype == object else array for name, array in feeds.items()})
    return file


def check(model: UserModel, outputs: Path, bound: float = 1e-4) -> None:
    """Compare written outputs with the framework's."""
    with np.load(outputs, allow_pickle=False) as found:
        for name, expected in zip(found.files, model.expected(1), strict=True):
            assert expected.error(found[name]) < bound, name


def test_report_names_the_device_that_takes_the_model(cli: Cli, path: Path) -> None:
    """The CPU takes each, with a predicted time."""
    devices = {row["device"]: row for row in cli("report", path, "--only", "cpu", "--json").document["devices"]}
    assert devices["cpu"]["supports_graph"] is True
    assert devices["cpu"]["predicted_ns"] > 0


def test_run_writes_what_the_framework_gives(cli: Cli, model: UserModel, path: Path, inputs: Path) -> None:
    """From a file of inputs to a file of outputs."""
    outputs = path.with_name("outputs.npz")
    outcome = cli("run", path, "--device", "cpu", "--inputs", inputs, "--outputs", outputs)
    assert outcome.code == 0, outcome.err
    check(model, outputs)


def test_bench_times_made_up_inputs(cli: Cli, path: Path) -> None:
    """No sizes or values are given; the command makes up ones that the model takes."""
    outcome = cli("bench", path, "--device", "cpu", "--runs", 3, "--json")
    assert outcome.code == 0, outcome.err
    [row] = outcome.document["devices"]
    assert row["p50_ns"] > 0


def test_bench_times_the_inputs_of_a_file(cli: Cli, path: Path, inputs: Path) -> None:
    """Some models take no random ones; the file has the sizes, so that none is assumed."""
    outcome = cli("bench", path, "--device", "cpu", "--runs", 3, "--inputs", inputs, "--json")
    assert outcome.code == 0
    assert outcome.document["devices"][0]["p50_ns"] > 0
    assert "give sizes with --dim" not in outcome.err
    assert cli("bench", path, "--inputs", inputs, "--dim", "batch=2").code == 2


def test_a_model_in_f16_is_near_the_framework(cli: Cli, model: UserModel, path: Path, inputs: Path) -> None:
    """`convert` writes it, `compare` finds it equal within f16, and its outputs are the framework's within 1 %."""
    half, outputs = path.with_name("half.onnx"), path.with_name("outputs.npz")
    outcome = cli("convert", path, half, "--precision", "f16")
    assert outcome.code == 0, outcome.err
    outcome = cli("compare", path, half, "--inputs", inputs)
    assert outcome.code == 0, outcome.err
    outcome = cli("run", half, "--device", "cpu", "--inputs", inputs, "--outputs", outputs)
    assert outcome.code == 0, outcome.err
    check(model, outputs, 1e-2)


def test_a_package_runs_as_the_model(cli: Cli, model: UserModel, path: Path, inputs: Path) -> None:
    """`package create` keeps golden outputs, but for inputs of text, and `run` opens the package."""
    package, outputs = path.with_name("model.rlxp"), path.with_name("outputs.npz")
    golden = [] if any(each.kind == "text" for each in model.inputs) else ["--golden", inputs]
    outcome = cli("package", "create", path, "--output", package, *golden)
    assert outcome.code == 0, outcome.err
    outcome = cli("run", package, "--device", "cpu", "--inputs", inputs, "--outputs", outputs)
    assert outcome.code == 0, outcome.err
    check(model, outputs)
