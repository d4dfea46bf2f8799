"""Shared libraries a provider needs: which of them this machine cannot load, all of them by name."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["engine_library", "loads", "missing_libraries"]

_NOT_FOUND = re.compile(r"^\s*(\S+)\s+=>\s+not found", re.MULTILINE)
_LOADER = re.compile(r"(\S+\.so[\d.]*): cannot open shared object file")


def engine_library(name: str) -> Path | None:
    """Return a provider library of the installed ONNX Runtime, such as `onnxruntime_providers_cuda`, or None."""
    import importlib.util

    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    file = {"win32": f"{name}.dll", "darwin": f"lib{name}.dylib"}.get(sys.platform, f"lib{name}.so")
    path = Path(spec.origin).parent / "capi" / file
    return path if path.is_file() else None


def missing_libraries(library: Path, dlls: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of the libraries that `library` needs and the loader does not find.

    On Linux the loader itself is asked for all of them. Windows tells none, so the names in `dlls` are tried.
    """
    if sys.platform == "win32":
        return tuple(name for name in dlls if not loads(name))
    ldd = shutil.which("ldd")
    if sys.platform.startswith("linux") and ldd is not None:
        try:
            done = subprocess.run([ldd, str(library)], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - our own library
        except (OSError, subprocess.SubprocessError):
            return _first_missing(library)
        # A library that Python already loaded, from a wheel of its vendor, need not be on the loader's path.
        return tuple(dict.fromkeys(name for name in _NOT_FOUND.findall(done.stdout) if not loads(name)))
    return _first_missing(library)


def loads(name: str) -> bool:
    """Return whether the loader finds and loads a library by name; it stays loaded."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _first_missing(library: Path) -> tuple[str, ...]:
    try:
        ctypes.CDLL(str(library))
    except OSError as err:
        return tuple(_LOADER.findall(str(err))) or (str(err),)
    return ()
