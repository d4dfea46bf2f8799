"""The one place that imports ONNX Runtime and opens sessions.

Import happens on first use, with telemetry off unless `RLX_ALLOW_ORT_TELEMETRY` is set: since 1.29 the Linux wheels
send it. Sessions are opened with fallback off, and what ONNX Runtime says it opened is compared with what was asked,
because it goes on with the CPU in silence where it can.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlx_ort import environment
from rlx_ort.errors import DeviceUnavailableError, EngineError
from rlx_ort.execution.options import CompileOptions, OptimizationLevel, WeightSharing
from rlx_ort.providers.base import EngineSession, SessionRequest
from rlx_ort.providers.config_keys import check_config, check_provider_options
from rlx_ort.providers.exceptions import PLAIN_EXCEPTIONS, opening_error
from rlx_ort.providers.forks import forbid_in_forks
from rlx_ort.providers.heap import release_free_heap
from rlx_ort.providers.injection import prepare_weights
from rlx_ort.providers.installation import (
    MINIMUM_VERSION,
    PLUGIN_VERSION,
    Problem,
    find_problem,
    install_command,
    parse_version,
    reinstall_command,
    runtime_packages,
)
from rlx_ort.providers.prepacked import CPU_EP, prepacked_model
from rlx_ort.providers.recipe import SessionRecipe
from rlx_ort.providers.session import OrtEngineSession
from rlx_ort.providers.threads import budget

__all__ = [
    "available_eps",
    "bindings",
    "describe_runtime",
    "engine_exceptions",
    "onnxruntime",
    "open_session",
    "runtime_problem",
    "runtime_version",
    "telemetry_allowed",
]

_LEVELS = {
    OptimizationLevel.OFF: "ORT_DISABLE_ALL",
    OptimizationLevel.BASIC: "ORT_ENABLE_BASIC",
    OptimizationLevel.EXTENDED: "ORT_ENABLE_EXTENDED",
    OptimizationLevel.LAYOUT: "ORT_ENABLE_LAYOUT",
    OptimizationLevel.ALL: "ORT_ENABLE_ALL",
}
_LARGE_BYTES = 1 << 20  # below this a model's weights are no reason to touch the heap
_FATAL = 4  # every failure is an exception already; ONNX Runtime's copy on stderr would be noise

_lock = threading.Lock()
_loaded: list[Any] = []


def onnxruntime() -> Any:
    """Return the module `onnxruntime`, imported on the first call; that takes about 50 ms.

    Raises:
        EngineError: it is absent, broken or too old; the message holds the command that repairs it.
    """
    with _lock:
        if not _loaded:
            problem = find_problem() or _load()
            if problem is not None:
                raise EngineError(f"{problem.reason}\n  {problem.remedy}")
        return _loaded[0]


def runtime_problem() -> Problem | None:
    """Return why ONNX Runtime cannot be used here, or None. Imports it when nothing speaks against that."""
    with _lock:
        return None if _loaded else find_problem() or _load()


def runtime_version() -> tuple[int, ...] | None:
    """Return the version of ONNX Runtime, or None when it cannot be used."""
    return None if runtime_problem() is not None else parse_version(str(onnxruntime().__version__))


def describe_runtime() -> str:
    """Return the package and version people know ONNX Runtime by, such as `onnxruntime-gpu 1.31.1`."""
    engine = onnxruntime()
    return f"{getattr(engine, 'package_name', None) or 'onnxruntime'} {engine.__version__}"


def bindings() -> Any:
    """Return ONNX Runtime's C++ bindings, where the kernel registry and the exceptions are."""
    onnxruntime()
    return importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")


def available_eps() -> tuple[str, ...]:
    """Return the execution providers that are compiled in or registered; it does not mean that they can load."""
    return tuple(onnxruntime().get_available_providers())


@functools.cache
def engine_exceptions() -> tuple[type[Exception], ...]:
    """Return every exception type that comes out of ONNX Runtime."""
    module = bindings()
    own = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, *PLAIN_EXCEPTIONS)


def telemetry_allowed() -> bool:
    """Return whether the user allowed ONNX Runtime's telemetry with `RLX_ALLOW_ORT_TELEMETRY=1`."""
    return environment.flag("ALLOW_ORT_TELEMETRY")


def open_session(recipe: SessionRecipe, request: SessionRequest) -> EngineSession:
    """Open a session on one execution provider and prove that it is the one that was asked for.

    Weights are borrowed, not copied, where ONNX Runtime can; the session keeps them alive.

    Raises:
        DeviceUnavailableError: ONNX Runtime or the provider cannot be used here, or fell back to another one.
        LegalizeError: a node has no kernel.
        ParamError: a parameter has no value.
        EngineError: the model was refused, or an option is unknown; ONNX Runtime's exception is the cause.
    """
    problem = runtime_problem()
    if problem is not None:
        raise DeviceUnavailableError(request.device, problem.reason, problem.remedy)
    check_config(request.options.session_config)
    check_provider_options(recipe.ep_name, request.options.provider_options, recipe.option_keys)
    if not recipe.ep_devices and recipe.ep_name not in available_eps():
        reason = f"this ONNX Runtime ({describe_runtime()}) has no {recipe.ep_name}"
        raise DeviceUnavailableError(request.device, reason)
    engine = onnxruntime()
    version = parse_version(str(engine.__version__))
    if recipe.ep_devices and version[:2] < PLUGIN_VERSION:
        reason = f"{describe_runtime()} does not tell which nodes a plugin provider runs; 1.31 or newer does"
        raise DeviceUnavailableError(request.device, reason, "pip install --upgrade onnxruntime")
    options = _session_options(engine, recipe, request.options)
    model: bytes | str
    private = request.options.sharing is WeightSharing.PRIVATE
    model, memory = prepare_weights(options, request.model, request.weights, version, repacked=private)
    if request.options.sharing is WeightSharing.PREPACKED and recipe.ep_name == CPU_EP:
        # Other providers copy weights to their own memory, where nothing is shared between processes.
        model, memory = _prepacked(engine, recipe, request, (model, memory, options)), []
        options = _session_options(engine, recipe, request.options.with_(optimization=OptimizationLevel.OFF))
    if any(tensor.nbytes >= _LARGE_BYTES for tensor in request.weights.values()):
        release_free_heap()
    on_cpu = recipe.ep_name == CPU_EP
    budget().apply(options, request.options, request.model, on_cpu=on_cpu)
    session = _create(engine, recipe, request, model, options)
    budget().hold(session, request.options, request.model, on_cpu=on_cpu)
    if not on_cpu and recipe.before_run is None:
        recipe = replace(recipe, before_run=forbid_in_forks(request.device))
    declared = (request.model.input_types, request.model.output_types)
    return OrtEngineSession(engine, session, memory, request.device, recipe, engine_exceptions(), declared)


def _create(engine: Any, recipe: SessionRecipe, request: SessionRequest, model: bytes | str, options: Any) -> Any:
    """Open ONNX Runtime's session and compare its providers with the one that was asked for."""
    providers = None
    try:
        if recipe.ep_devices:
            options.add_provider_for_devices(list(recipe.ep_devices), recipe.provider_options(request.options))
        else:
            wanted = (recipe.ep_name, recipe.provider_options(request.options))
            providers = [wanted, *((name, dict(given)) for name, given in recipe.helpers)]
        session = engine.InferenceSession(model, options, providers=providers, enable_fallback=0)
    except engine_exceptions() as err:
        raise opening_error(err, request.device) from err
    opened = list(session.get_providers())
    if recipe.ep_name not in opened:
        raise DeviceUnavailableError(
            request.device,
            f"ONNX Runtime opened {', '.join(opened)} in place of {recipe.ep_name}, which cannot be loaded",
            "rlx-ort doctor names what is missing",
        )
    return session


def _prepacked(
    engine: Any, recipe: SessionRecipe, request: SessionRequest, prepared: tuple[bytes, list[Any], Any]
) -> str:
    """Return the path of the model with its weights packed; the first call for a model opens a session to make it."""
    model, memory, options = prepared

    def build(save: Callable[[Any], None]) -> None:
        save(options)
        _create(engine, recipe, request, model, options)

    traits = {
        "engine": describe_runtime(),
        "level": request.options.optimization.value,
        "config": repr(sorted(request.options.session_config.items())),
    }
    return str(prepacked_model(model, memory, traits, build))


def _session_options(engine: Any, recipe: SessionRecipe, options: CompileOptions) -> Any:
    made = engine.SessionOptions()
    made.graph_optimization_level = getattr(engine.GraphOptimizationLevel, _level_name(engine, options.optimization))
    made.execution_mode = engine.ExecutionMode.ORT_SEQUENTIAL
    made.intra_op_num_threads = 1  # the budget decides when the session is opened
    made.enable_mem_pattern = recipe.mem_pattern
    made.log_severity_level = _FATAL
    for library in options.custom_op_libraries:
        _register_custom_ops(made, library)
    if options.profile_prefix is not None:
        made.enable_profiling = True
        made.profile_file_prefix = options.profile_prefix
    entries = {"session.record_ep_graph_assignment_info": "1", **recipe.config}
    if options.spinning is not None:
        entries["session.intra_op.allow_spinning"] = str(int(options.spinning))
    if options.sharing is WeightSharing.RAW:
        entries["session.disable_prepacking"] = "1"
    entries.update({key: str(value) for key, value in options.session_config.items()})
    entries["session.record_ep_graph_assignment_info"] = "1"
    for key, value in entries.items():
        made.add_session_config_entry(key, value)
    return made


def _register_custom_ops(made: Any, library: str) -> None:
    """Load a custom-op library, by absolute path only: a bare name is looked for where others may write."""
    path = Path(library)
    if not path.is_absolute() or not path.is_file():
        raise EngineError(f"custom-op library {library!r} is not the absolute path of a file; pass its full path")
    try:
        made.register_custom_ops_library(str(path))
    except engine_exceptions() as err:
        raise EngineError(f"custom-op library {library} cannot be loaded: {err}") from err


def _level_name(engine: Any, level: OptimizationLevel) -> str:
    name = _LEVELS[level]
    return name if hasattr(engine.GraphOptimizationLevel, name) else "ORT_ENABLE_ALL"


def _load() -> Problem | None:
    """Import ONNX Runtime and say what is wrong with it; the lock is held."""
    if not telemetry_allowed():
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        engine = importlib.import_module("onnxruntime")
    except (ImportError, OSError, AttributeError) as err:
        packages = runtime_packages()
        owners = ", ".join(f"{name} {version}" for name, version in packages.items())
        return Problem(f"ONNX Runtime is installed ({owners}) but does not load: {err}", reinstall_command(packages))
    if not hasattr(engine, "InferenceSession") or not hasattr(engine, "__version__"):
        return Problem("the onnxruntime folder is incomplete", reinstall_command(runtime_packages()))
    if parse_version(str(engine.__version__))[:2] < MINIMUM_VERSION:
        wanted = ".".join(map(str, MINIMUM_VERSION))
        return Problem(
            f"ONNX Runtime {engine.__version__} is too old, {wanted} or newer is needed", install_command("cpu")
        )
    if not telemetry_allowed():
        engine.disable_telemetry_events()
    if environment.flag("SHARED_POOL"):
        # Registering a plugin or opening a session starts ONNX Runtime's environment, with the pool or without.
        state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
        budget().make_pool(state, (state.Fail, RuntimeError))
    _loaded.append(engine)
    return None
