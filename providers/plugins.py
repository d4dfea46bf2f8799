"""Execution providers that come as packages of their own and are registered with ONNX Runtime once a process.

A plugin is native code, so only libraries that belong to an installed distribution are loaded, never a path from a
model or a setting, and nothing from the current folder, which Python puts on its path in many ways of starting it.
Libraries are never unregistered: doing so under a live session crashes the process.

Windows ML shares providers between the programs of a Windows 11 machine, as signed packages of its store that Windows
updates. They are found by `windowsml`, which is no dependency (`pip install windowsml`). What is there already is used
like a plugin of a wheel; nothing is downloaded unless `fetch_provider` is called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import re
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlx_ort.errors import EngineError
from rlx_ort.providers.engine.runtime import Problem, normal_name, readable
from rlx_ort.providers.hardware import cpu_name

# https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/packaging.html asks for these names.
_NAMING = re.compile(r"^onnxruntime-(?:ep-.+|qnn)$")
# Not every plugin follows it (`onnxruntime-ggml`, `nxrt-ep-cpu`). Others are recognised by a small package whose module
# names its library; looking into the files of every distribution would take seconds.
_LIKELY = re.compile(r"(?:^|-)(?:onnxruntime|ort|ep)(?:-|$)")
_OFFERS_LIBRARY = re.compile(r"^def (?:get_)?library_path\(", re.MULTILINE)
_OFFERS_NAME = re.compile(r"^(?:EP_NAME|REGISTRATION_NAME|def (?:get_)?ep_names?)\b", re.MULTILINE)

# The last one is a name to register the library under, which need not be that of its provider.
_NAMES_OF_PROVIDERS = ("get_ep_names", "get_ep_name", "ep_name", "EP_NAME", "REGISTRATION_NAME")

# Words of a refusal by a core that is too old.
_NEWER = ("api version", "ort_api_version", "getapi", "not supported by this", "newer")

_lock = threading.RLock()
_registered: dict[str, Problem | None] = {}

_log = logging.getLogger("rlx_ort.plugins")

_WINDOWS = "Windows ML"
_catalogs: list[Any] = []  # kept alive, as its providers need it


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed plugin package: the providers and the library it brings, or its problem."""

    distribution: str
    version: str
    ep_names: tuple[str, ...] = ()
    library: Path | None = None
    problem: str = ""


@functools.cache
def find_plugins() -> tuple[Plugin, ...]:
    """Return the plugin packages, those of Windows last; imports their small Python modules, not their libraries."""
    return (*(_plugin(dist, module) for dist, module in _distributions()), *catalog_providers())


def plugin_for(ep_name: str) -> Plugin | None:
    """Return the installed plugin that brings an execution provider, or None."""
    return next((plugin for plugin in find_plugins() if ep_name in plugin.ep_names), None)


def register_plugin(plugin: Plugin, engine: Any, errors: tuple[type[Exception], ...]) -> Problem | None:
    """Register a plugin's library with ONNX Runtime, once a process, and return the error."""
    # Windows keeps several under one name; onnxruntime-genai has an ONNX Runtime of its own.
    known = f"{getattr(engine, '__name__', '')} {plugin.distribution} {plugin.ep_names}"
    with _lock:
        if known not in _registered:
            _registered[known] = _register(plugin, engine, errors)
        return _registered[known]


def plugin_devices(engine: Any, ep_name: str) -> tuple[Any, ...]:
    """Return ONNX Runtime's device objects of a registered provider; being listed does not mean working."""
    return tuple(device for device in engine.get_ep_devices() if device.ep_name == ep_name)


def _register(plugin: Plugin, engine: Any, errors: tuple[type[Exception], ...]) -> Problem | None:
    reinstall = f"pip install --force-reinstall {plugin.distribution}"
    if plugin.distribution == _WINDOWS:
        reinstall = "update Windows, or pip install the provider's own package"
    if plugin.problem or plugin.library is None:
        return Problem(f"{plugin.distribution} {plugin.version}: {plugin.problem or 'no library'}", reinstall)
    try:
        engine.register_execution_provider_library(plugin.ep_names[0], str(plugin.library))
    except errors as err:
        text = readable(err)
        if "already registered" in text:
            return None
        lowered, name = text.lower(), f"{plugin.distribution} {plugin.version}"
        if any(word in lowered for word in _NEWER):
            reason = f"{name} needs a newer ONNX Runtime than {engine.__version__}: {text}"
            return Problem(reason, "pip install --upgrade onnxruntime")
        if "undefined symbol" in lowered or "createepfactories" in lowered:
            reason = f"{name} is too old for ONNX Runtime {engine.__version__}: {text}"
            return Problem(reason, f"pip install --upgrade {plugin.distribution}")
        if "cannot open shared object file" in lowered or "126" in lowered:
            return Problem(
                f"{name} does not load: {text}", "install the library it names; rlx-ort doctor lists all of them"
            )
        return Problem(f"{name} does not load: {text}", f"pip install --force-reinstall {plugin.distribution}")
    return None


def _distributions() -> Iterator[tuple[importlib.metadata.Distribution, str]]:
    seen = set()
    for dist in importlib.metadata.distributions(path=_installed_path()):
        folder = getattr(dist, "_path", None)  # NAME-VERSION.dist-info; parsing the metadata of all takes 0.1 s
        name = normal_name(dist.metadata["Name"] or "" if folder is None else folder.name.partition("-")[0])
        if name in seen or not _LIKELY.search(name):
            continue
        seen.add(name)
        top = (dist.read_text("top_level.txt") or "").split()
        module = top[0] if top else name.replace("-", "_")
        text = ""
        with contextlib.suppress(OSError):  # the module of a package that is named otherwise is read, not imported
            text = Path(str(dist.locate_file(f"{module}/__init__.py"))).read_text(encoding="utf-8", errors="replace")
        if _NAMING.match(name) or (_OFFERS_LIBRARY.search(text) and _OFFERS_NAME.search(text)):
            yield dist, module


def _installed_path() -> list[str]:
    """Return Python's path without the current folder, unless packages are installed in it."""
    return [entry for entry in sys.path if not _is_current_folder(entry)]


def _is_current_folder(folder: str | Path) -> bool:
    try:
        here = Path.cwd().resolve()
        if Path(folder).resolve() != here:
            return False
    except (OSError, RuntimeError):  # the current folder was removed, or a loop of links
        return not str(folder)
    homes = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
    return not any(os.path.realpath(home) == str(here) for home in homes)


def _import(name: str) -> ModuleType:
    """Return a top-level module from where distributions are installed, imported if it is not yet.

    Raises:
        ImportError: there is none, it does not import, or the program has imported one from the current folder.
    """
    if name not in sys.modules:
        path, pathfinder = _installed_path(), importlib.machinery.PathFinder
        specs = (finder.find_spec(name, path if finder is pathfinder else None) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"no installed module {name!r}", name=name)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
    module = sys.modules[name]
    file = getattr(module, "__file__", None)
    if file and _is_current_folder(Path(file).parents[1 if hasattr(module, "__path__") else 0]):
        raise ImportError(f"{file} lies in the current folder; install the package with pip to have it loaded")
    return module


def _plugin(dist: importlib.metadata.Distribution, module_name: str) -> Plugin:
    plugin = functools.partial(Plugin, dist.metadata["Name"], dist.version)
    try:
        module = _import(module_name)
    except (ImportError, OSError) as err:
        return plugin(problem=f"its module {module_name} does not import: {err}")
    path = getattr(module, "get_library_path", None) or getattr(module, "library_path", None)
    names = next(filter(None, (getattr(module, name, None) for name in _NAMES_OF_PROVIDERS)), None)
    if not callable(path) or names is None:
        return plugin(problem=f"its module {module_name} has no get_library_path and get_ep_names")
    try:
        named = names() if callable(names) else names
        eps = (named,) if isinstance(named, str) else tuple(named)  # pyright: ignore[reportArgumentType]  # checked by `except`
        library = Path(path())  # pyright: ignore[reportArgumentType]
    except (RuntimeError, OSError, ValueError, TypeError) as err:
        return plugin(problem=f"it does not name its library: {err}")
    if not eps:
        return plugin(problem="it names no execution provider")
    if not library.is_absolute() or not _belongs_to(library, dist, module):
        return plugin(ep_names=eps, problem=f"its library {library} is not part of the installed package")
    if not library.is_file():
        return plugin(ep_names=eps, problem=f"its library {library} is missing")
    return plugin(ep_names=eps, library=library)


def _belongs_to(library: Path, dist: importlib.metadata.Distribution, module: Any) -> bool:
    """Whether the library lies in the package's own folder or among the files the installer recorded."""
    home = Path(str(getattr(module, "__file__", "") or ".")).resolve().parent
    if home in library.resolve().parents:
        return True
    recorded = dist.files or []
    return any(Path(str(dist.locate_file(file))).resolve() == library.resolve() for file in recorded)


def hardware_type(ep_device: Any) -> str:
    """Return CPU, GPU or NPU: the hardware of one of ONNX Runtime's device objects."""
    return str(ep_device.device.type).rpartition(".")[2]


def described(hardware: Any) -> tuple[str, str]:
    """Return name and identity of one of ONNX Runtime's hardware devices, from its vendor and PCI ids."""
    if str(hardware.type).endswith("CPU"):
        return cpu_name(), ""
    metadata = {str(key).lower(): str(value) for key, value in dict(hardware.metadata).items()}
    name = metadata.get("description") or f"{hardware.vendor} {hardware.vendor_id:04x}:{hardware.device_id:04x}".strip()
    identity = next((metadata[key] for key in ("pci_bus_id", "luid", "uuid") if metadata.get(key)), "")
    return name, identity


def catalog_providers() -> Iterator[Plugin]:
    """Yield the providers that Windows offers to all programs; those that it has not downloaded have no library."""
    for entry in _offered():
        name, library = str(entry.name), Path(str(entry.library_path or ""))
        problem = ""
        if not library.is_absolute() or not library.is_file():
            remedy = f"rlx_ort.providers.plugins.fetch_provider({name!r}) lets Windows download it"
            problem = f"Windows offers it and has not downloaded it; {remedy}"
        yield Plugin(_WINDOWS, str(entry.version), (name,), None if problem else library, problem)


def fetch_provider(name: str) -> None:
    """Let Windows download and prepare a provider, for processes started afterwards; may take minutes.

    Raises:
        EngineError: there is no catalog, it has no such provider, or Windows did not get it ready.
    """
    offered = {str(entry.name): entry for entry in _offered()}
    if name not in offered:
        known = ", ".join(sorted(offered)) or "none, or there is no `windowsml`"
        raise EngineError(f"Windows ML offers no provider {name!r}; it offers {known}")
    try:
        offered[name].ensure_ready()
    except Exception as err:  # windowsml's errors are its own, and those of ctypes
        raise EngineError(f"Windows could not prepare {name}: {err}") from err


def _offered() -> tuple[Any, ...]:
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
