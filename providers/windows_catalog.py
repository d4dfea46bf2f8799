"""Execution providers that Windows ML shares between the programs of a Windows 11 machine, found by `windowsml`.

Windows installs them as signed packages of its store and updates them. What is there already is used like a plugin of
a wheel; nothing is downloaded unless `fetch_provider` is called. `windowsml` is imported on Windows only, and is no
dependency: `pip install windowsml` beside any `onnxruntime` from 1.24 on.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx_ort.errors import EngineError

__all__ = ["catalog_providers", "fetch_provider"]

_log = logging.getLogger("rlx_ort.plugins")

_catalogs: list[Any] = []  # kept alive, as its providers need it


def catalog_providers() -> Iterator[tuple[str, str, Path | None, str]]:
    """Yield (provider, version, library, problem) for each provider that Windows offers; none without a catalog.

    The library is None while Windows has not downloaded the provider; the problem names the remedy.
    """
    for found in _found():
        name, version = str(found.name), str(found.version)
        library = Path(str(found.library_path or ""))
        if library.is_absolute() and library.is_file():
            yield name, version, library, ""
        else:
            remedy = f"rlx_ort.providers.windows_catalog.fetch_provider({name!r}) lets Windows download it"
            yield name, version, None, f"Windows offers it and has not downloaded it; {remedy}"


def fetch_provider(name: str) -> None:
    """Let Windows download and prepare a provider; may take minutes, and asks the network.

    Processes that are started afterwards find it.

    Raises:
        EngineError: there is no catalog, it has no such provider, or Windows did not get it ready.
    """
    offered = {str(found.name): found for found in _found()}
    if name not in offered:
        known = ", ".join(sorted(offered)) or "none, or there is no `windowsml`"
        raise EngineError(f"Windows ML offers no provider {name!r}; it offers {known}")
    try:
        offered[name].ensure_ready()
    except Exception as err:  # windowsml's errors are its own, and those of ctypes
        raise EngineError(f"Windows did not get {name} ready: {err}") from err


def _found() -> tuple[Any, ...]:
    if sys.platform != "win32":
        return ()
    try:
        module = importlib.import_module("windowsml")
    except ImportError:
        return ()
    try:
        if not _catalogs:
            _catalogs.append(module.EpCatalog())
        return tuple(_catalogs[0].find_all_providers())
    except Exception as err:  # windowsml's errors are its own, and those of ctypes
        _log.warning("the catalog of Windows ML cannot be read: %s", err)
        return ()
