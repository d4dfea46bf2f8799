"""Models and a runner that the command-line tests share."""

from __future__ import annotations

from pathlib import Path

import make_text_classifier
import onnx
import pytest
from click.testing import CliRunner
from command_line import Cli, Outcome
from onnx import parser

from rlx_ort.cli import main

ADD_ONE = """
<ir_version: 8, opset_import: ["": 18]>
add_one (float[rows, 2] x) => (float[rows, 2] y)
<float[2] one = {1.0, 1.0}> { y = Add (x, one) }
"""


@pytest.fixture
def cli() -> Cli:
    """Return a function that runs `rlx-ort` with some arguments; an unexpected exception fails the test."""

    def run(*arguments: object) -> Outcome:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def add_one(tmp_path: Path) -> Path:
    """Return an ONNX file that adds 1 to an input of shape (rows, 2)."""
    path = tmp_path / "add_one.onnx"
    onnx.save(parser.parse_model(ADD_ONE), path)
    return path


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """Return the ONNX file of the text classifier example."""
    path = tmp_path / "classifier.onnx"
    onnx.save(make_text_classifier.make_model(make_text_classifier.make_weights()), path)
    return path
