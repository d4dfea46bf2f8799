"""`SessionRecipe`: what a provider module decides about a session, handed to the one function that opens it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.providers.engine.recorded import Recorder

__all__ = ["CPU_EP", "HOST_MEMORY", "Keeps", "Recording", "SessionRecipe", "names", "nothing_to_hold"]

CPU_EP = "CPUExecutionProvider"

HOST_MEMORY = ("cpu", 0)
"""ONNX Runtime's name and index of ordinary host memory."""


class Keeps(enum.Enum):
    """What of a session ONNX Runtime can write to the compile cache and open again."""

    NOTHING = "nothing"
    """Nothing; the provider may have a cache folder of its own."""
    OPTIMIZED = "optimized"
    """The optimised model and its weights."""
    PACKED = "packed"
    """The optimised model, and its weights in the layout of the kernels too."""
    CONTEXT = "context"
    """What the provider compiled, in the nodes of an EPContext model."""


def names(text: str) -> frozenset[str]:
    """Return the words of a text, for tables of option names."""
    return frozenset(text.split())


def nothing_to_hold() -> contextlib.AbstractContextManager[Any]:
    """Return a context that holds nothing, for providers whose sessions may run side by side."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Recording:
    """How a provider's sessions record the launches of their runs.

    Attributes:
        open: returns the driver for one session, or raises `NotRecordedError` with the reason.
        required: whether a run that cannot be recorded is an error.
    """

    open: Callable[[], Recorder]
    required: bool = False


@dataclass(frozen=True)
class SessionRecipe:
    """How to open a session on one execution provider.

    Attributes:
        ep_name: ONNX Runtime's name of the execution provider.
        options: provider option -> value.
        option_keys: the option keys the provider knows, or None when they are not listed here; others are refused,
            since most providers ignore an unknown key without a word.
        config: session config entries the provider needs.
        ep_devices: ONNX Runtime's device objects of a plugin provider; empty for one that is built in.
        helpers: built-in providers that come after the requested one, such as CUDA after TensorRT.
        mem_pattern: whether memory patterns may be planned; DirectML refuses sessions that do.
        run_lock: gives what each run, and the opening and closing of a session, must hold.
        before_run: raises when a run in this process would hang or crash.
        memory: ONNX Runtime's name and index of the memory that tensors stay in between runs; host memory where the
            provider's own cannot be bound.
        keeps: what of it the compile cache can hold.
        cache_options: takes a folder and returns the provider options that make the provider keep there what it
            compiles; None when it has none. The folder belongs to one model with its weights on one device.
        spelled: takes all provider options and returns them as the provider reads them; None where that is the same.
        rewritten: takes the bytes of a model and returns those to open; None where the model is taken as it is.
        device_graph: whether the provider itself records launches once and replays them, over one binding with static
            shapes.
        recording: how this library records launches; None where it does not.
        pinned: makes an array like another one in host memory that the device copies to by itself; None where there is
            no such memory, and where buffers that are bound on the device are as cheap.
        run_config: RunOptions entries for a run within a recording, which must not wait for the device.
        stream_options: provider options that hold for one session in this process, so no part of a cache key.
    """

    ep_name: str
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    option_keys: frozenset[str] | None = None
    config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ep_devices: tuple[Any, ...] = ()
    helpers: tuple[tuple[str, Mapping[str, str]], ...] = ()
    mem_pattern: bool = True
    run_lock: Callable[[], contextlib.AbstractContextManager[Any]] = nothing_to_hold
    before_run: Callable[[], None] | None = None
    memory: tuple[str, int] = HOST_MEMORY
    device_graph: bool = False
    recording: Recording | None = None
    pinned: Callable[[Any], Any] | None = None
    run_config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    stream_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    keeps: Keeps = Keeps.NOTHING
    cache_options: Callable[[str], Mapping[str, str]] | None = None
    rewritten: Callable[[bytes], bytes] | None = None
    spelled: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether ONNX Runtime's own CPU kernels run it, in the process's memory and threads."""
        return self.ep_name == CPU_EP

    def provider_options(self, options: CompileOptions) -> dict[str, str]:
        """Return the provider's options with the caller's on top, all as text."""
        merged = {**self.options, **options.provider_options}
        text = {str(key): str(value) for key, value in merged.items()}
        return text if self.spelled is None else dict(self.spelled(text))
