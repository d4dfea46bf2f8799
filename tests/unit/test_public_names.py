"""The package loads its names when they are first used; tests/packaging pins which names there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rlx_ort


def test_public_names_are_listed_before_they_are_loaded() -> None:
    """Completion sees every name, used or not."""
    assert dir(rlx_ort) == sorted(rlx_ort.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as in any module."""
    with pytest.raises(AttributeError, match="rlx_ort"):
        _ = rlx_ort.Grpah


@pytest.mark.parametrize("names", ["Graph, Device, CompileOptions", "GraphDevices, Session, load"])
def test_importing_names_loads_no_engine(names: str, tmp_path: Path) -> None:
    """Data types and runners load neither ONNX Runtime nor ONNX nor rich before they are put to work."""
    heavy = ["onnxruntime", "onnx", "onnx_ir", "rich"]
    program = f"from rlx_ort import {names}\nimport sys\nprint(*(name for name in {heavy!r} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=True
    )
    assert result.stdout.strip() == ""
