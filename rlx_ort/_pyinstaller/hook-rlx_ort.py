# ruff: noqa: N999  # PyInstaller finds hooks by this name
"""Imports of rlx_ort that PyInstaller cannot see, and modules that a frozen program does not need.

Modules are imported by name when they are first used, so all are collected but the command line. At run time `rlx_ort`
reads the metadata of installed packages to find ONNX Runtime and its plugins, so the metadata of these packages is
collected too, with each plugin's module and library.
"""

from __future__ import annotations

import importlib.metadata
import re

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules, copy_metadata

_ENGINE = re.compile(r"onnxruntime(?:[-_.].+)?|ort[-_.]nightly.*", re.IGNORECASE)


def _wanted(name: str) -> bool:
    return not name.startswith(("rlx_ort.cli", "rlx_ort.report", "rlx_ort._pyinstaller"))


hiddenimports = [*collect_submodules("rlx_ort", filter=_wanted), "onnxruntime.capi.onnxruntime_pybind11_state"]
tables = ["providers/cores/*.toml", "providers/kernel_lists/*.txt", "serving/status.html"]
datas = collect_data_files("rlx_ort", includes=["**/*.json", "**/py.typed", "__init__.pyi", *tables])
datas += copy_metadata("rlx_ort")
binaries = []

for found in importlib.metadata.distributions():
    name = found.metadata["Name"] or ""
    if not _ENGINE.fullmatch(name):
        continue
    datas += copy_metadata(name)
    top = (found.read_text("top_level.txt") or name.replace("-", "_")).split()[0]
    if top != "onnxruntime":  # a plugin: a small module beside a library
        hiddenimports.append(top)
        binaries += collect_dynamic_libs(top)
        datas += collect_data_files(top)

excludedimports = ["matplotlib", "onnx_ir", "safetensors"]  # tools of the command line and of converters
