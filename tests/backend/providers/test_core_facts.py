"""The facts about the installed ONNX Runtime are those of `providers/cores/`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rlx_ort.converters.to_onnx.opset import MAX_OPSET
from rlx_ort.providers.engine.cores import known_cores

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Load the script that writes the files."""
    spec = importlib.util.spec_from_file_location("core_facts", ROOT / "scripts" / "core_facts.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_installed_version_takes_what_its_file_says(script: ModuleType) -> None:
    """Its libraries hold no other config key, and it loads exactly the opsets and IR versions of the file."""
    assert list(script.check()) == []


def test_models_are_written_up_to_the_newest_opset_that_a_known_version_loads() -> None:
    """The exporter, which asks no engine, has the limit as a constant."""
    assert max(core.opset for core in known_cores()) == MAX_OPSET


def test_pieces_of_constants_are_no_keys(script: ModuleType) -> None:
    """Compilers cut long constants into pieces of 16 bytes; a Windows library has the constants whole."""
    piece, key, long_key = b"session.a_piece_", b"session.mode", b"session.sixteen_"
    linux = (False, [b"\0".join((b"", piece, key, long_key, b""))])
    windows = (True, [b"\0" + long_key + b"\0"])
    assert script.whole([linux, windows]) == {"session.mode", "session.sixteen_"}
