"""`convert`: between formats, precisions and opsets, verified, without losing the model or a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Cli


def _answer(cli: Cli, model: Path, tmp_path: Path) -> np.ndarray:
    """Return what a model answers to made-up inputs, which are the same for the same model."""
    target = tmp_path / f"{model.stem}-answer.npz"
    outcome = cli("run", model, "--device", "cpu", "--dim", "batch=2", "--dim", "tokens=5", "--outputs", target)
    assert outcome.code == 0, outcome.err
    with np.load(target, allow_pickle=False) as archive:
        [name] = archive.files
        return np.asarray(archive[name])


def test_a_model_survives_json_and_back(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """ONNX to JSON to ONNX answers the same, and each file is of its kind."""
    as_json, again = tmp_path / "model.json", tmp_path / "again.onnx"
    assert cli("convert", classifier, as_json).code == 0
    assert cli("convert", as_json, again).code == 0
    json.loads(as_json.read_text(encoding="utf-8"))
    onnx.checker.check_model(onnx.load(again), full_check=True)
    expected = _answer(cli, classifier, tmp_path)
    np.testing.assert_allclose(_answer(cli, as_json, tmp_path), expected, rtol=1e-6)
    np.testing.assert_allclose(_answer(cli, again, tmp_path), expected, rtol=1e-6)


def test_convert_keeps_the_weights_of_another_model(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """A tensor file that stands where the JSON's would go is not replaced without --force either."""
    (tmp_path / "target.safetensors").write_text("mine", encoding="utf-8")
    outcome = cli("convert", classifier, tmp_path / "target.json")
    assert outcome.code == 4
    assert (tmp_path / "target.safetensors").read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "target.json").exists()


@pytest.mark.parametrize("suffix", [".onnx", ".json"])
def test_convert_replaces_a_target_with_force_only(cli: Cli, add_one: Path, tmp_path: Path, suffix: str) -> None:
    """Without it an existing target is kept as it is, and the message says how to replace it."""
    target = tmp_path / f"target{suffix}"
    target.write_text("mine", encoding="utf-8")
    cli("convert", add_one, target).fails(4, "--force")
    assert target.read_text(encoding="utf-8") == "mine"
    assert cli("convert", add_one, target, "--force").code == 0
    assert cli("inspect", target).code == 0
