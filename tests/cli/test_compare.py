"""`compare`: exit codes, figures, and the node it names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Cli
from onnx import numpy_helper


@pytest.fixture
def changed(classifier: Path, tmp_path: Path) -> Path:
    """Return the classifier with one element of one weight changed."""
    model = onnx.load(classifier)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "class_w")
    array = numpy_helper.to_array(tensor).copy()
    array[0, 0] += 1
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    path = tmp_path / "changed.onnx"
    onnx.save(model, path)
    return path


def test_equal_models_are_exit_code_0(cli: Cli, classifier: Path) -> None:
    """The table has a row for each output, and the note says on what inputs."""
    outcome = cli("compare", classifier, classifier)
    assert outcome.code == 0, outcome.err
    assert "probabilities" in outcome.out
    assert "ok" in outcome.out
    assert "seed 0; assumed batch=2, tokens=8" in outcome.err


def test_models_that_differ_are_exit_code_8(cli: Cli, classifier: Path, changed: Path) -> None:
    """The figures are on stdout, the verdict on stderr; a tolerance that covers it is exit code 0."""
    outcome = cli("compare", classifier, changed)
    assert outcome.code == 8
    assert "DIFFERS" in outcome.out
    assert outcome.err.splitlines()[-1].startswith("Error: output 'probabilities'")
    assert cli("compare", classifier, changed, "--tolerance", "0.9").code == 0


def test_two_precisions_are_held_to_that_of_the_lower(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """A model and its f16 form are equal within 5e-3, and differ where 1e-5 is asked for."""
    half = tmp_path / "half.onnx"
    assert cli("convert", classifier, half, "--precision", "f16").code == 0
    assert cli("compare", classifier, half).code == 0
    assert cli("compare", classifier, half, "--tolerance", "1e-5").code == 8


def test_bisect_names_the_node_and_the_weight(cli: Cli, classifier: Path, changed: Path) -> None:
    """In words and as JSON."""
    outcome = cli("compare", classifier, changed, "--bisect")
    assert outcome.code == 8
    assert "first node that differs" in outcome.out
    assert "weight 'class_w' differs in 1 of" in outcome.out
    document = json.loads(cli("compare", classifier, changed, "--bisect", "--json").out)
    node = next(node for node in onnx.load(classifier).graph.node if "class_w" in node.input)
    assert document["bisect"]["node"] == node.name
    assert document["ok"] is False


def test_bisect_says_why_it_cannot_look_into_an_ort_file(
    cli: Cli, classifier: Path, changed: Path, tmp_path: Path
) -> None:
    """The figures are there all the same, and the exit code is that of a difference."""
    packed = tmp_path / "model.ort"
    assert cli("convert", classifier, packed).code == 0
    outcome = cli("compare", changed, packed, "--bisect")
    assert outcome.code == 8
    assert "DIFFERS" in outcome.out
    assert "model.ort is in ORT format, which shows no values inside" in outcome.err
    document = json.loads(cli("compare", changed, packed, "--bisect", "--json").out)
    assert (document["ok"], document["bisect"]) == (False, None)


def test_json_holds_every_figure(cli: Cli, classifier: Path) -> None:
    """One document, with what both were run on."""
    document = json.loads(cli("compare", classifier, classifier, "--dim", "tokens=5", "--json").out)
    assert document["ok"] is True
    assert document["inputs"] == {"ids": [2, 5], "mask": [2, 5]}
    assert document["outputs"][0]["max_abs"] == 0.0
    assert [side["device"] for side in document["devices"]] == ["cpu", "cpu"]


def test_given_inputs_are_used(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """And when they do not fit, the message names the input."""
    np.savez(tmp_path / "in.npz", x=np.ones((3, 2), np.float32))
    document = json.loads(cli("compare", add_one, add_one, "--inputs", tmp_path / "in.npz", "--json").out)
    assert (document["inputs"], document["seed"]) == ({"x": [3, 2]}, None)
    np.savez(tmp_path / "in.npz", x=np.ones((3, 7), np.float32))
    cli("compare", add_one, add_one, "--inputs", tmp_path / "in.npz").fails(5, "x")


@pytest.mark.webgpu
def test_one_model_on_two_devices(cli: Cli, add_one: Path) -> None:
    """The document says what ran where."""
    document = json.loads(cli("compare", add_one, "--device", "cpu", "--device", "webgpu", "--json").out)
    assert document["ok"] is True
    assert document["devices"][1] == {"device": "webgpu", "placement_share": 1.0}


def test_a_damaged_model_is_exit_code_4(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """On either side."""
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(add_one.read_bytes()[:40])
    assert cli("compare", add_one, broken).code == 4
    assert cli("compare", broken, add_one).code == 4
