"""ONNX Runtime: which package is installed, its import in this one place, and the translation of its exceptions.

All packages of ONNX Runtime share one folder, so the one installed last wins, and removing any of them breaks the rest.

Import happens on first use, with telemetry off unless `RLX_ALLOW_ORT_TELEMETRY` is set: since 1.29 the Linux wheels
send it. A process that starts from a warmed package waits for this module, so it imports little itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.errors import (
    DeviceUnavailableError,
    EngineError,
    InputError,
    LegalizeError,
    MissingExtraError,
    RlxError,
    install_command,
)
from rlx_ort.faults import DEVICE_GONE, NOT_TAKEN
from rlx_ort.providers.engine.stopping import check_stopped

# https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/python/onnxruntime_pybind_exceptions.cc
# name -> (error while a session is opened, error while it runs). These types share no base class but `Exception`.
_Errors: TypeAlias = tuple[type[RlxError], type[RlxError]]
_FAILED: _Errors = (EngineError, EngineError)
ENGINE_EXCEPTIONS: dict[str, _Errors] = {
    "DeviceReset": (DeviceUnavailableError, EngineError),
    "InvalidArgument": (EngineError, InputError),
    "NotImplemented": (LegalizeError, EngineError),
    **dict.fromkeys(("EPFail", "EngineError", "Fail", "InvalidGraph", "InvalidProtobuf", "ModelLoadCanceled"), _FAILED),
    **dict.fromkeys(("ModelLoaded", "ModelRequiresCompilation", "NoModel", "NoSuchFile", "NotFound"), _FAILED),
    "RuntimeException": _FAILED,
}
PLAIN_EXCEPTIONS: dict[type[Exception], _Errors] = {
    UnicodeDecodeError: _FAILED,  # the message itself is not UTF-8
    RuntimeError: _FAILED,
    ValueError: (EngineError, InputError),
    TypeError: (EngineError, InputError),
}

# InvalidArgument also comes out of kernels, for data that no check of the inputs could have caught.
_ABOUT_INPUTS = (
    r"Invalid input name|Invalid output name|Got invalid dimensions|Unexpected input data type|Invalid rank for input"
    r"|Missing Input|Invalid Feed|Required inputs|Input name cannot|do not match expected type|Unable to handle object"
)
_TOO_NEW = re.compile(
    r"Opset (?P<opset>\d+) is under development.* domain (?P<domain>\S+) is till opset (?P<most>\d+)"
    r"|Unsupported model IR version: (?P<ir>\d+), max supported IR version: (?P<most_ir>\d+)",
    re.DOTALL,
)
_NOISE = r"^\[ONNXRuntimeError\] : \d+ : \w+ : "
_POSITION = r"/\S+?\.(?:cc|h|cpp):\d+ .*?\)(?:::<lambda\(\)>)? (?=\S)"  # source position and C++ signature

_WARNINGS, _ERRORS = 2, 3  # OrtLoggingLevel
_lock = threading.Lock()
_loaded: list[Any] = []

MINIMUM_VERSION = (1, 24)
"""The oldest ONNX Runtime with assignment records and with OrtValues of any element type."""
PLUGIN_VERSION = (1, 31)
"""The oldest one for plugins: 1.24 to 1.30 do not record the nodes that a plugin runs, so a fallback goes unseen."""

# A mutex compiled by Visual Studio 17.10 or newer dereferences null in an older library
# (https://github.com/microsoft/STL/wiki/Changelog#vs-2022-1710).
_OLDEST_MSVCP = (14, 40)

_FLAVOURS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml")


def onnxruntime() -> Any:
    """Return the module `onnxruntime`, imported on the first call; that takes about 50 ms.

    Raises:
        EngineError: it is absent, broken or too old; the message holds the command that repairs it.
    """
    problem = runtime_problem()
    if problem is not None:
        raise EngineError(f"{problem.reason}\n  {problem.remedy}")
    return _loaded[0]


def runtime_problem() -> Problem | None:
    """Return why ONNX Runtime cannot be used here, or None; imports it."""
    with _lock:
        return None if _loaded else _load()


def runtime_version() -> tuple[int, ...] | None:
    """Return the version of ONNX Runtime, or None when it cannot be used."""
    return None if runtime_problem() is not None else parse_version(str(onnxruntime().__version__))


def describe_runtime() -> str:
    """Return package and version of ONNX Runtime, such as `onnxruntime-gpu 1.31.1`."""
    engine = onnxruntime()
    return f"{getattr(engine, 'package_name', None) or 'onnxruntime'} {engine.__version__}"


def bindings() -> Any:
    """Return ONNX Runtime's C++ bindings, where the kernel registry and the exceptions are."""
    onnxruntime()
    return importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")


def quantization() -> Any:
    """Return the module `onnxruntime.quantization`, MatMulNBits included; takes about 300 ms.

    Raises:
        EngineError: ONNX Runtime cannot be imported.
        MissingExtraError: a package that its quantisation needs cannot be imported.
    """
    import logging

    onnxruntime()
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    try:
        importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
        return importlib.import_module("onnxruntime.quantization")
    except ImportError as err:
        message = f"ONNX Runtime's quantisation cannot be imported: {err}\n  {install_command('convert')}"
        raise MissingExtraError(message) from err
    finally:  # importing it sets up logging for the whole process
        root.handlers[:] = handlers
        root.setLevel(level)


def genai_problem() -> Problem | None:
    """Return why onnxruntime-genai cannot be used here, or None; imports it, which takes about 0.1 s."""
    problem = runtime_problem()
    if problem is not None:
        return problem
    try:
        genai()
    except EngineError as err:
        reason, _, remedy = str(err).partition("\n  ")
        return Problem(reason, remedy)
    return None


@functools.cache
def genai() -> Any:
    """Return the module `onnxruntime_genai`, with telemetry off unless it is allowed.

    On Linux it loads a library of ONNX Runtime of its own beside the one that sessions of this package run in: sessions
    of the two share no weights, and plugins are registered with each.

    Raises:
        MissingExtraError: it is not installed, or does not load.
    """
    onnxruntime()  # first, as it reads the settings of the environment
    try:
        module = importlib.import_module("onnxruntime_genai")
    except ImportError as err:
        absent = isinstance(err, ModuleNotFoundError) and err.name == "onnxruntime_genai"
        problem = "onnxruntime-genai is not installed" if absent else f"onnxruntime-genai does not load: {err}"
        raise MissingExtraError(f"{problem}\n  {install_command('genai')}") from err
    if not telemetry_allowed():
        module.disable_telemetry_events()
    return module


def available_eps() -> tuple[str, ...]:
    """Return the execution providers that are compiled in or registered; they need not be able to load."""
    return tuple(onnxruntime().get_available_providers())


@functools.cache
def engine_exceptions() -> tuple[type[Exception], ...]:
    """Return every exception type that ONNX Runtime raises."""
    module = bindings()
    own = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, *PLAIN_EXCEPTIONS)


def telemetry_allowed() -> bool:
    """Return whether the user allowed ONNX Runtime's telemetry with `RLX_ALLOW_ORT_TELEMETRY=1`."""
    return environment.flag("ALLOW_ORT_TELEMETRY")


def _load() -> Problem | None:
    """Import ONNX Runtime and return its problem; the lock is held."""
    if not telemetry_allowed():
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    spec = importlib.util.find_spec("onnxruntime")
    problem = None if spec is not None and spec.origin is not None else find_problem()
    if problem is not None:
        return problem
    try:
        engine = importlib.import_module("onnxruntime")
    except (ImportError, OSError, AttributeError) as err:
        packages = runtime_packages()
        owners = ", ".join(f"{name} {version}" for name, version in packages.items())
        reason = f"ONNX Runtime is installed ({owners}) but does not load: {err}"
        if problem := _visual_cpp_problem():
            return Problem(f"{reason}; {problem.reason}", problem.remedy)
        return Problem(reason, reinstall_command(packages))
    if not hasattr(engine, "InferenceSession") or not hasattr(engine, "__version__"):
        return Problem("the onnxruntime folder is incomplete", reinstall_command(runtime_packages()))
    if parse_version(str(engine.__version__))[:2] < MINIMUM_VERSION:
        wanted = ".".join(map(str, MINIMUM_VERSION))
        return Problem(
            f"ONNX Runtime {engine.__version__} is too old, {wanted} or newer is needed", install_command("cpu")
        )
    if not telemetry_allowed():
        engine.disable_telemetry_events()
    if environment.get("ENGINE_WARNINGS") is not None:
        engine.set_default_logger_severity(_WARNINGS if environment.flag("ENGINE_WARNINGS") else _ERRORS)
    if environment.flag("SHARED_POOL"):
        from rlx_ort.providers.engine.process import budget

        # Registering a plugin or opening a session starts ONNX Runtime's environment, with the pool or without.
        state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
        budget().make_pool(state, (state.Fail, RuntimeError))
    _loaded.append(engine)
    return None


def _visual_cpp_problem() -> Problem | None:
    """Return whether a library of the Visual C++ runtime is missing or too old; Python itself brings a part only."""
    from rlx_ort.providers.hardware import file_version, loads  # after failures only

    if sys.platform != "win32":
        return None
    remedy = "install https://aka.ms/vs/17/release/vc_redist.x64.exe"
    names = ("msvcp140.dll", "vcruntime140.dll", "vcruntime140_1.dll")
    if missing := [name for name in names if not loads(name)]:
        return Problem(f"the Visual C++ runtime lacks {', '.join(missing)}", remedy)
    version = file_version(names[0])
    if version is not None and version < _OLDEST_MSVCP:
        here, wanted = (".".join(map(str, each)) for each in (version, _OLDEST_MSVCP))
        return Problem(f"the Visual C++ runtime is {here}, {wanted} or newer is needed", remedy)
    return None


def opening_error(err: Exception, device: Device) -> RlxError:
    """Return the error for an exception that stopped a session from being opened; raise it `from` the exception."""
    check_stopped()
    kind = _mapped(err)[0]
    text = readable(err)
    if too_new := _TOO_NEW.search(text):
        return _too_new(too_new)
    if "ort_version_supported" in text:  # a plugin that was built for a newer core registers, and fails here
        return DeviceUnavailableError(device, text, "pip install --upgrade onnxruntime")
    if kind is DeviceUnavailableError or re.search(DEVICE_GONE, str(err)):
        return DeviceUnavailableError(device, text)
    return kind(f"{NOT_TAKEN} for {device.display}: {text}")


def _too_new(match: re.Match[str]) -> LegalizeError:
    """Return the error for a model whose opset or IR version this ONNX Runtime does not load."""
    from rlx_ort.providers.engine.cores import known_cores

    if match["ir"]:
        what, asked, most = "IR version", int(match["ir"]), match["most_ir"]
        loads = [core.name for core in known_cores() if core.ir_version >= asked]
    else:
        what, asked, most = f"opset of {match['domain']}", int(match["opset"]), match["most"]
        loads = [core.name for core in known_cores() if core.opset >= asked and match["domain"] == "ai.onnx"]
    remedy = f"ONNX Runtime {loads[0]} and newer load it" if loads else "no known ONNX Runtime loads it"
    return LegalizeError(f"the model needs {what} {asked}, and {describe_runtime()} loads up to {most}; {remedy}")


def running_error(err: Exception, device: Device) -> RlxError:
    """Return the error for an exception out of a run; raise it `from` the exception."""
    check_stopped()
    kind = _mapped(err)[1]
    text = readable(err)
    if re.search(_ABOUT_INPUTS, text) or (kind is InputError and type(err).__name__ != "InvalidArgument"):
        return InputError(text)
    return EngineError(f"the run on {device.display} failed: {text}")


def readable(err: Exception) -> str:
    """Return the message of an exception without ONNX Runtime's prefix and source positions."""
    text = re.sub(_POSITION, "", re.sub(_NOISE, "", str(err))).strip()
    return text or type(err).__name__


def _mapped(err: Exception) -> tuple[type[RlxError], type[RlxError]]:
    for plain, kinds in PLAIN_EXCEPTIONS.items():
        if isinstance(err, plain):
            return kinds
    return ENGINE_EXCEPTIONS.get(type(err).__name__, _FAILED)


class Problem(NamedTuple):
    """Something that keeps ONNX Runtime from being used, and the command that repairs it."""

    reason: str
    remedy: str


def runtime_packages() -> dict[str, str]:
    """Return the packages that own the imported folder `onnxruntime`, with their versions; others are hidden."""
    import importlib.metadata  # takes 30 ms to load and is needed after failures only

    owners: dict[Path, dict[str, str]] = {}
    for dist in importlib.metadata.distributions():
        name = normal_name(dist.metadata["Name"] or "")
        if not name.startswith(("onnxruntime", "ort-nightly")):
            continue
        core, files = ("onnxruntime", "__init__.py"), dist.files
        if name in _FLAVOURS if files is None else any(file.parts[:2] == core for file in files):
            owners.setdefault(Path(str(dist.locate_file(""))).resolve(), {}).setdefault(name, dist.version)
    first = next(iter(owners.values()), {})  # distributions come in the order of the path
    return dict(sorted(first.items()))


def find_problem() -> Problem | None:
    """Return why `import onnxruntime` cannot work, found without importing it, or None."""
    spec = importlib.util.find_spec("onnxruntime")
    packages = runtime_packages()
    if spec is None and not packages:
        return Problem("ONNX Runtime is not installed", install_command("cpu"))
    if spec is None or spec.origin is None:
        # A folder without __init__.py imports as an empty namespace; uninstalling one of two leaves it.
        owners = ", ".join(f"{name} {version}" for name, version in packages.items()) or "no package"
        return Problem(
            f"the onnxruntime folder is incomplete ({owners} is installed); removing one ONNX Runtime package "
            "deletes files that another one needs",
            reinstall_command(packages),
        )
    return None


def reinstall_command(packages: dict[str, str]) -> str:
    """Return the command that writes the files of the installed ONNX Runtime packages again."""
    if not packages:
        return install_command("cpu")
    # With several installed, the one with an accelerator was probably meant.
    name = next((name for name in packages if name != "onnxruntime"), "onnxruntime")
    return f"pip uninstall -y {' '.join(packages)} && pip install --force-reinstall {name}=={packages[name]}"


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: `1.31.1` and `1.31.1.dev2` are both (1, 31, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def normal_name(name: str) -> str:
    """Return the name of a distribution as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
