"""Imports of optional packages, with the command that installs a missing one."""

from __future__ import annotations

import importlib
from typing import Any

from rlx_ort.errors import ConversionError

__all__ = ["optional_module"]


def optional_module(name: str, extra: str, purpose: str) -> Any:
    """Return a module of an optional package.

    Args:
        name: the module, `torch`.
        extra: the extra of this package that brings it.
        purpose: what it is needed for, the subject of the message: "reading GGUF files".

    Raises:
        ConversionError: the package is not installed, or is and cannot be imported; the message has the remedy.
    """
    command = f'pip install "rlx_ort[{extra}]"'
    try:
        return importlib.import_module(name)
    except Exception as err:  # a package with native parts fails in many ways
        package = name.partition(".")[0]
        if isinstance(err, ModuleNotFoundError) and err.name == package:
            raise ConversionError(f"{purpose} needs {package}, which is not installed; run: {command}") from err
        raise ConversionError(
            f"{purpose} needs {package}, which is installed and cannot be imported: {type(err).__name__}: {err}; "
            f"reinstall it: {command} --force-reinstall"
        ) from err
