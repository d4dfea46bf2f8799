"""The examples do what they say, on each device that is here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import convnet
import decoder_block
import encoder_block
import make_text_classifier
import numpy as np
import onnx
import pytest
from reference_check import relative_error

from rlx_ort import CompileOptions, Device, PlacementRule, Session, from_onnx

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("example", [encoder_block, decoder_block, convnet], ids=lambda module: module.__name__)
def test_a_built_graph_agrees_with_its_reference(example: ModuleType, device: Device) -> None:
    """Each example's graph, wholly on the device, is within 1e-4 of its float64 reference."""
    weights, inputs = example.make_weights(), example.sample_inputs()
    [output] = Session(device).compile(example.build(weights)).run(inputs)
    assert relative_error(output, example.reference(weights, inputs)) < 1e-4


def test_the_imported_classifier_agrees_with_its_reference(device: Device) -> None:
    """The imported ONNX classifier is within 1e-4 of its float64 reference, the CPU helping with integers at most."""
    weights, inputs = make_text_classifier.make_weights(), make_text_classifier.sample_inputs()
    graph = from_onnx(make_text_classifier.make_model(weights))
    compiled = Session(device, CompileOptions(placement=PlacementRule.ASSISTED)).compile(graph)
    [output] = compiled.run(inputs)
    assert compiled.placement.requested_share > 0.95
    assert relative_error(output, make_text_classifier.reference(weights, inputs)) < 1e-4


def test_named_dims_take_another_size_in_the_next_run() -> None:
    """One compiled encoder block answers for two sequence lengths."""
    weights = encoder_block.make_weights()
    compiled = Session("cpu").compile(encoder_block.build(weights))
    for tokens in (3, 7):
        inputs = encoder_block.sample_inputs(1, tokens)
        [output] = compiled.run(inputs)
        assert relative_error(output, encoder_block.reference(weights, inputs)) < 1e-4


def test_the_relative_error_sees_one_wrong_element() -> None:
    """The measure that the examples rely on is the largest difference over the largest expected value."""
    expected = np.array([[1.0, -4.0], [2.0, 0.5]])
    got = expected + np.array([[0.0, 0.0], [0.0, 0.2]])
    assert relative_error(got, expected) == pytest.approx(0.05)


@pytest.mark.parametrize("name", ["encoder_block", "decoder_block", "convnet"])
def test_an_example_runs_as_a_script(name: str, tmp_path: Path) -> None:
    """Started by itself with a device name, an example prints that device's error, which is small."""
    result = _run_script(f"{name}.py", "cpu", cwd=tmp_path)
    assert f"{name} on cpu: error " in result
    assert float(result.rsplit(maxsplit=1)[-1]) < 1e-4


def test_the_model_script_writes_a_valid_file(tmp_path: Path) -> None:
    """The script writes a model that ONNX's own checker accepts, with its two named dims."""
    _run_script("make_text_classifier.py", "model.onnx", cwd=tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param for dim in dims] == ["batch", "tokens"]


def _run_script(name: str, argument: str, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), argument]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"
    }  # imports its neighbour
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
