"""`SessionRecipe`: a provider's decisions about a session, and the checks of its option keys."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlx_ort.errors import EngineError, InputError, near_names
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.cores import core_of, known_cores, unknown_core_note

if TYPE_CHECKING:
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.providers.engine.replays import Recorder

HOST_MEMORY = ("cpu", 0)
"""ONNX Runtime's name and index of ordinary host memory."""


class Keeps(enum.Enum):
    """The files that ONNX Runtime can write to the compile cache and open again."""

    NOTHING = "nothing"  # the provider may have a cache folder of its own
    OPTIMIZED = "optimized"  # the optimised model and its weights
    PACKED = "packed"  # its weights in the layout of the kernels too
    CONTEXT = "context"  # the provider's compiled code, in the nodes of an EPContext model


def names(text: str) -> frozenset[str]:
    """Return the words of a text, for tables of option names."""
    return frozenset(text.split())


def nothing_to_hold() -> contextlib.AbstractContextManager[Any]:
    """Return a context that holds nothing, for providers whose sessions may run concurrently."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Recording:
    """How a provider's sessions record the launches of their runs.

    `open` returns the driver for one session, or raises `NotRecordedError` with the reason. With `required`, a run that
    cannot be recorded is an error.
    """

    open: Callable[[], Recorder]
    required: bool = False


@dataclass(frozen=True)
class SessionRecipe:
    """How to open a session on one execution provider.

    Attributes:
        option_keys: the provider options that exist, None if they are not listed here; others are refused, since most
            providers silently ignore an unknown key.
        ep_devices: ONNX Runtime's device objects of a plugin provider; empty for one that is built in.
        helpers: built-in providers that come after the requested one, such as CUDA after TensorRT.
        mem_pattern: whether memory patterns may be planned; DirectML refuses sessions that do.
        run_lock: returns the lock that a run, and opening and closing a session, must hold.
        apart: returns the lock that opening and destroying a session must hold, so that nothing is recorded meanwhile.
        before_run: raises when a run in this process would hang or crash.
        memory: ONNX Runtime's name and index of the memory in which tensors stay between runs; host memory where the
            provider's own cannot be bound.
        device_graph: whether the provider itself records launches and replays them, over one binding of static shapes.
        replans: whether the session plans kernels anew when the sizes of its inputs change, and drops the plans before.
        recording: how this library records launches; None where it does not.
        ordered: opens a stream of which all of ONNX Runtime's copies wait, for a session with loops or branches, and
            records nothing on it; None where that is not needed.
        pinned: makes an array like another one in pinned host memory; None if there is no such memory, or if bound
            device buffers are as cheap.
        spoiled_by_errors: whether a run that failed may spoil the next one, which is then made in another session; runs
            must hold a lock.
        wait: waits for the work that runs have left on the device, before a session goes; None where they leave none.
        run_config: RunOptions entries for a run within a recording, which must not wait for the device.
        stream_options: provider options of one session in this process, which are no part of a cache key.
        cache_options: takes a folder, of one model with its weights on one device, and returns the provider options
            that make the provider cache its compiled kernels there.
        rewritten: takes the bytes of a model and returns those to open.
        config: entries of the session's configuration, below the caller's.
        leaves_out: the optimisers of ONNX Runtime that make its sessions slower, or move nodes to the CPU.
        spelled: takes all provider options and returns them in the provider's spelling.
    """

    ep_name: str
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    option_keys: frozenset[str] | None = None
    ep_devices: tuple[Any, ...] = ()
    helpers: tuple[tuple[str, Mapping[str, str]], ...] = ()
    mem_pattern: bool = True
    run_lock: Callable[[], contextlib.AbstractContextManager[Any]] = nothing_to_hold
    apart: Callable[[], contextlib.AbstractContextManager[Any]] = nothing_to_hold
    before_run: Callable[[], None] | None = None
    memory: tuple[str, int] = HOST_MEMORY
    device_graph: bool = False
    replans: bool = False
    recording: Recording | None = None
    ordered: Callable[[], Recorder] | None = None
    pinned: Callable[[Any], Any] | None = None
    spoiled_by_errors: bool = False
    wait: Callable[[], None] | None = None
    run_config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    stream_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    keeps: Keeps = Keeps.NOTHING
    cache_options: Callable[[str], Mapping[str, str]] | None = None
    rewritten: Callable[[bytes], bytes] | None = None
    config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    leaves_out: tuple[str, ...] = ()
    spelled: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether ONNX Runtime's own CPU kernels run it, in the process's memory and threads."""
        return self.ep_name == "CPUExecutionProvider"

    def provider_options(self, options: CompileOptions) -> dict[str, str]:
        """Return the provider's options with the caller's on top, all as text."""
        merged = {**self.options, **options.provider_options}
        text = {str(key): str(value) for key, value in merged.items()}
        return text if self.spelled is None else dict(self.spelled(text))


# From C, ONNX Runtime sets a field of the session options for these keys. Its Python binding passes config entries by
# that code, so they would have no effect (measured on 1.28 to 1.32).
_FIELDS = names(
    """
    session.enable_cpu_mem_arena session.enable_mem_pattern session.enable_profiling session.execution_mode
    session.graph_optimization_level session.inter_op_num_threads session.intra_op_num_threads session.log_id
    session.log_severity_level session.log_verbosity_level session.optimized_model_filepath
    session.use_deterministic_compute session.use_per_session_threads
    """
)
_OURS = {
    "session.compile_only": "such a session cannot run, and opening one can end the process",
    "session.use_external_initializer_file_buffers_directly": "rlx_ort decides how weights reach a session",
    "session.model_external_initializers_file_folder_path": "rlx_ort decides how weights reach a session",
}


def check_config(entries: Mapping[str, str]) -> None:
    """Refuse session config entries that ONNX Runtime would ignore or that `rlx_ort` sets itself.

    No other device would take them, so the error is the caller's.

    Raises:
        InputError: an entry is one of those; the message names the key that was probably meant.
    """
    if not entries:
        return
    version = runtime.runtime_version()
    core = core_of(version)
    for key in entries:
        if key in _OURS:
            raise InputError(f"session config {key!r} cannot be set: {_OURS[key]}")
        if key in _FIELDS:
            raise InputError(
                f"session config {key!r} has no effect from Python: use the field of CompileOptions, if there is one"
            )
        if key not in core.config_keys:
            since = next((known.name for known in known_cores() if key in known.config_keys), "")
            hint = f"known from {since} on" if since else near_names(key, core.config_keys - _FIELDS - _OURS.keys())
            raise InputError(
                f"session config {key!r} is unknown to ONNX Runtime {core.name}{unknown_core_note(version)}; {hint}"
            )


def check_provider_options(ep_name: str, given: Mapping[str, str], known: Collection[str] | None) -> None:
    """Refuse provider options that the provider would ignore; `known` is None when its options are not listed.

    Raises:
        EngineError: an option is none of them.
    """
    if known is not None and (reason := unknown_option(f"{ep_name} has no", given, known)):
        raise EngineError(reason)


def unknown_option(lead: str, given: Iterable[str], known: Collection[str]) -> str:
    """Return that there is no such option, after `lead`, with the nearest names; empty if all that are given exist."""
    unknown = next((key for key in given if key not in known), None)
    return "" if unknown is None else f"{lead} option {unknown!r}; {near_names(unknown, known)}"
