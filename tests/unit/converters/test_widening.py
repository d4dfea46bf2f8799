"""The table of opset steps that only add, and what it answers."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlx_ort.converters.to_onnx.opset import NodeForm, obstacle, only_widens
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Shape, TensorType

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "opset_table.py"
X = TensorType(DType.F32, Shape([2, 3]))


def test_the_table_is_what_onnx_says() -> None:
    """A stale table would move nodes across a change of meaning."""
    assert subprocess.run([sys.executable, "-P", str(SCRIPT), "--check"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("op_type", "written", "target", "expected"),
    [
        ("Relu", 14, 21, True),
        ("Cast", 13, 21, True),  # 19 added saturate, which only float8 looks at
        ("Add", 6, 7, False),  # before 7 a node broadcast by an attribute
        ("Softmax", 11, 13, False),  # before 13 it flattened
        ("Squeeze", 11, 13, False),  # the axes became an input
        ("Relu", 21, 14, False),  # back is another question
        ("Swish", 21, 24, False),  # it did not exist
        ("NoSuchOp", 13, 21, False),
    ],
)
def test_only_steps_that_add_are_taken_unseen(op_type: str, written: int, target: int, expected: bool) -> None:
    """All else is compared schema by schema."""
    assert only_widens(op_type, written, target) is expected


def test_a_step_that_adds_is_no_obstacle() -> None:
    """The table and the comparison of schemas give one answer."""
    assert obstacle(NodeForm("Relu", {}, [X], [X]), 14, 21) == ""
    assert obstacle(NodeForm("Squeeze", {"axes": (0,)}, [X], [X]), 11, 13) != ""
