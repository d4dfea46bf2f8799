"""Optional packages: what is said when one is missing, or is there and cannot be imported."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
from sample_models.source_files import small_graph, write_source

from rlx_ort.converters import from_torch as torch_files
from rlx_ort.converters.bundle import bundle_from_graph
from rlx_ort.converters.onnx_ir_bridge import bundle_to_ir, optional_module
from rlx_ort.converters.sources import from_torch, read_weights
from rlx_ort.errors import ConversionError


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the optional packages look as if they were not installed."""
    for name in ("torch", "gguf", "onnx_ir", "onnx_ir.serde"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without")
def test_without_torch_the_command_is_told() -> None:
    """That installs it."""
    with pytest.raises(ConversionError, match=r'(?s)needs torch, .*pip install "\.\[torch\]"'):
        from_torch(None)  # type: ignore[arg-type]  # it is not looked at


@pytest.mark.usefixtures("without")
def test_without_gguf_the_command_is_told(tmp_path: Path) -> None:
    """That installs it."""
    with pytest.raises(ConversionError, match=r'(?s)needs gguf, .*pip install "\.\[gguf\]"'):
        read_weights(write_source("gguf", tmp_path))


@pytest.mark.usefixtures("without")
def test_without_onnx_ir_the_command_is_told() -> None:
    """That installs it."""
    with pytest.raises(ConversionError, match=r'(?s)needs onnx_ir, .*pip install "\.\[convert\]"'):
        bundle_to_ir(bundle_from_graph(small_graph()))


def test_a_package_that_is_there_and_fails_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing it once more would not help; what it said does."""
    (tmp_path / "broken_package.py").write_text("raise OSError('libx.so: wrong ELF class')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConversionError, match=r"is installed and cannot be imported: OSError: libx\.so"):
        optional_module("broken_package", "torch", "this")


def test_sources_load_no_optional_package() -> None:
    """Until one is needed: a plain ONNX model converts without any."""
    code = (
        "import sys, rlx_ort.converters.sources, rlx_ort.converters.bundle;"
        "print([name for name in ('torch', 'gguf', 'onnx_ir', 'onnxscript', 'onnxruntime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_module_in_training_mode_is_exported_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dropout would change every result without a word."""
    part = types.SimpleNamespace(training=True)
    module = type("Net", (), {"modules": lambda self: [part]})
    torch = types.SimpleNamespace(
        nn=types.SimpleNamespace(Module=module), export=types.SimpleNamespace(ExportedProgram=dict)
    )
    monkeypatch.setattr(torch_files, "optional_module", lambda *_: torch)
    monkeypatch.setattr(torch_files, "export_program", lambda *_, **__: "exported")
    with pytest.warns(UserWarning, match=r"Net is in training mode.*module\.eval\(\)"):
        torch_files.bundle_from_torch(module())
    part.training = False
    assert torch_files.bundle_from_torch(module()) == "exported"  # warnings are errors here
