"""Opens sessions with fallback off and borrowed weights, and checks which providers they have.

ONNX Runtime falls back to the CPU silently where it can, so the providers of an open session are read back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, EngineError
from rlx_ort.options.compile_options import CacheUse, CompileOptions, OptimizationLevel, WeightSharing
from rlx_ort.providers.base import EngineSession, SessionRequest
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.compiled.models import open_cached, use_for
from rlx_ort.providers.engine.injection import prepare_weights
from rlx_ort.providers.engine.optimizer_faults import KEY, disabled_optimizers
from rlx_ort.providers.engine.process import budget, refuse_at_the_end
from rlx_ort.providers.engine.recipe import SessionRecipe, check_config, check_provider_options
from rlx_ort.providers.engine.recordable import is_control_flow, unrecordable
from rlx_ort.providers.engine.replays import NotRecordedError, Recorder
from rlx_ort.providers.engine.runtime import PLUGIN_VERSION, opening_error
from rlx_ort.providers.engine.session import OrtEngineSession
from rlx_ort.providers.engine.stopping import stoppable
from rlx_ort.providers.hardware import release_free_heap

_log = logging.getLogger(__name__)
SPAWN_REMEDY = "start workers with multiprocessing.get_context('spawn')"
"""The remedy for forking a process that has used a device: driver state does not survive a fork."""

_GROWTH = "arena_extend_strategy"
_LARGE_BYTES = 1 << 20  # of weights; opening a smaller model does not trim the heap
_FATAL = 4  # every failure is an exception already; ONNX Runtime's copy on stderr would be noise


def open_session(recipe: SessionRecipe, request: SessionRequest) -> EngineSession:
    """Open a session on one execution provider and prove that it is the one that was asked for.

    The provider knows that ONNX Runtime can be used and has it (`OrtProvider.missing`). Weights are borrowed, not
    copied, where ONNX Runtime can; the session keeps them alive.

    Raises:
        DeviceUnavailableError: ONNX Runtime fell back to another provider, or is too old for this one.
        LegalizeError: a node has no kernel.
        ParamError: a parameter has no value.
        EngineError: the model was refused, or an option is unknown; ONNX Runtime's exception is the cause.
    """
    refuse_at_the_end()
    check_config(request.options.session_config)
    check_provider_options(recipe.ep_name, request.options.provider_options, recipe.option_keys)
    version = runtime.runtime_version() or ()
    if recipe.ep_devices and version[:2] < PLUGIN_VERSION:
        reason = f"{runtime.describe_runtime()} does not report which nodes a plugin provider runs; 1.31 or newer does"
        raise DeviceUnavailableError(request.device, reason, "pip install --upgrade onnxruntime")
    recorder, reason = _recorder(recipe, request)
    if recorder is not None:
        recipe = replace(recipe, stream_options=recorder.options)
    try:
        cached = use_for(recipe, request.options) is not CacheUse.OFF
        opened = open_cached(recipe, request, runtime.describe_runtime(), _open) if cached else None
        session, memory = opened or _open(recipe, request)
    except BaseException:
        if recorder is not None:
            recorder.close()
        raise
    if not recipe.on_cpu and recipe.before_run is None:
        recipe = replace(recipe, before_run=forbid_in_forks(request.device))
    if recorder is not None:
        recipe = replace(recipe, before_run=_in_order(recipe.before_run, recorder.enter))
    return OrtEngineSession(session, memory, recipe, request, recorder, reason)


def _recorder(recipe: SessionRecipe, request: SessionRequest) -> tuple[Recorder | None, str]:
    """Return the stream of a session, or None, and the reason why launches on it are not recorded."""
    model = request.model
    # Checked before opening, since a session on a stream of its own runs one thread at a time.
    reason = unrecordable(model.nodes, {**model.input_types, **model.output_types})
    handed_on = [name for name in model.output_types if name in model.input_types or name in model.params]
    if handed_on and not reason:
        reason = f"output {handed_on[0]!r} is an input or a weight itself, which no launch writes"
    try:
        if recipe.ordered is not None and any(map(is_control_flow, model.nodes)):
            return recipe.ordered(), reason
    except NotRecordedError as err:
        raise EngineError(f"loops and branches on {request.device.display} need a stream of their own: {err}") from err
    if recipe.recording is None or reason:
        return None, reason if recipe.recording is not None else ""
    try:
        return recipe.recording.open(), ""
    except NotRecordedError as err:
        return None, str(err)


def _in_order(first: Callable[[], object] | None, then: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        if first is not None:
            first()
        then()

    return both


def _open(
    recipe: SessionRecipe,
    request: SessionRequest,
    *,
    saved: Path | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> tuple[Any, list[Any]]:
    """Open ONNX Runtime's session on the request's model, or on a saved one as it is, after `prepare`."""
    engine = runtime.onnxruntime()
    options = _session_options(engine, recipe, request.options)
    model: bytes | str
    if saved is None:
        repacked = request.options.sharing is WeightSharing.PRIVATE
        version = runtime.runtime_version() or ()
        model, memory = prepare_weights(options, request.model, request.weights, version, repacked=repacked)
        if recipe.rewritten is not None:
            model = recipe.rewritten(model)
        if request.options.optimization is not OptimizationLevel.OFF:
            left_out = [*recipe.leaves_out, *disabled_optimizers(model, version, on_cpu=recipe.on_cpu)]
            if left_out:
                given = request.options.session_config.get(KEY)  # those that the user disabled
                options.add_session_config_entry(KEY, ";".join([*([str(given)] if given else []), *left_out]))
    else:
        model, memory = str(saved), []
    if prepare is not None:
        prepare(options)
    large = any(tensor.nbytes >= _LARGE_BYTES for tensor in request.weights.values())
    if large:
        # Exporting a model leaves megabytes of freed protobuf memory in the heap, which ONNX Runtime does not reuse.
        release_free_heap()
    create = partial(_create, engine, recipe, request, model, options)
    session = budget().opened(options, request.options, request.model, create, on_cpu=recipe.on_cpu)
    if large:  # the same for weights that the optimisers have replaced
        release_free_heap()
    return session, memory


def _create(engine: Any, recipe: SessionRecipe, request: SessionRequest, model: bytes | str, options: Any) -> Any:
    """Open ONNX Runtime's session and compare its providers with the one that was asked for."""
    providers = None
    given = {**recipe.provider_options(request.options), **recipe.stream_options}
    _log.debug("opening on %s with %r, provider options %s", request.device.label, request.options, given)
    if request.budgeted and _GROWTH in (recipe.option_keys or ()):
        given.setdefault(_GROWTH, "kSameAsRequested")  # by default an arena doubles, and keeps its first block for good
    try:
        if recipe.ep_devices:
            options.add_provider_for_devices(list(recipe.ep_devices), given)
        else:
            wanted = (recipe.ep_name, given)
            providers = [wanted, *((name, dict(options_of)) for name, options_of in recipe.helpers)]
        # Opening computes on the device too: weights are uploaded and packed.
        with recipe.run_lock(), recipe.apart(), stoppable(lambda: options.set_load_cancellation_flag(True)):
            session = engine.InferenceSession(model, options, providers=providers, enable_fallback=0)
    except runtime.engine_exceptions() as err:
        raise opening_error(err, request.device) from err
    opened = list(session.get_providers())
    if recipe.ep_name not in opened:
        raise DeviceUnavailableError(
            request.device,
            f"ONNX Runtime opened {', '.join(opened)} instead of {recipe.ep_name}, which cannot be loaded",
            "rlx-ort doctor names the missing part",
        )
    return session


def _session_options(engine: Any, recipe: SessionRecipe, options: CompileOptions) -> Any:
    made = engine.SessionOptions()
    levels, level = engine.GraphOptimizationLevel, options.optimization
    name = "ORT_DISABLE_ALL" if level is OptimizationLevel.OFF else f"ORT_ENABLE_{level.name}"
    made.graph_optimization_level = getattr(levels, name, levels.ORT_ENABLE_ALL)
    made.execution_mode = engine.ExecutionMode.ORT_SEQUENTIAL
    made.intra_op_num_threads = 1  # the budget decides when the session is opened
    made.enable_mem_pattern = recipe.mem_pattern
    made.log_severity_level = _FATAL
    for library in options.custom_op_libraries:
        _register_custom_ops(made, library)
    if options.profile_prefix is not None:
        made.enable_profiling = True
        made.profile_file_prefix = options.profile_prefix
    entries = {**recipe.config}
    if options.spinning is not None:
        entries["session.intra_op.allow_spinning"] = str(int(options.spinning))
    if options.low_memory:
        # By default all casts of weights come first, since they wait for nothing (ONNX Runtime 1.31).
        made.execution_order = engine.ExecutionOrder.PRIORITY_BASED
    if options.low_memory or options.sharing is WeightSharing.RAW:
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
    except runtime.engine_exceptions() as err:
        raise EngineError(f"custom-op library {library} cannot be loaded: {err}") from err


def forbid_in_forks(device: Device) -> Callable[[], None]:
    """Return a check that refuses the device in every process but this one."""
    owner = os.getpid()

    def check() -> None:
        if os.getpid() != owner:
            reason = f"this process was forked from one that had {device.display} in use"
            raise DeviceUnavailableError(device, reason, SPAWN_REMEDY)

    return check
