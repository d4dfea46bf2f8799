"""WebGPU: any GPU through Dawn, on Vulkan, Direct3D 12 or Metal; a plugin package brings it.

`gpu` and `webgpu` let the plugin choose the graphics API, `vulkan` insists on Vulkan. It picks the GPU itself and runs
one session at a time.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError
from rlx_ort.ir.dtype import DType
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.options.variant import Variant, variants_of
from rlx_ort.providers.base import PRIVATE_MEMORY, Availability, CostProfile, MemoryReading, SessionMemory
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.opening import SPAWN_REMEDY
from rlx_ort.providers.engine.recipe import Keeps, SessionRecipe, names
from rlx_ort.providers.engine.runtime import Problem
from rlx_ort.providers.engine.stopping import Turns
from rlx_ort.providers.hardware import loads, private_bytes
from rlx_ort.providers.kernel_limits import (
    INDEX_LIMITS,
    POOL_LIMITS,
    KernelLimit,
    constant,
    element,
    has_no_axes,
    input_dims,
    is_empty,
    is_empty_beside,
    is_empty_first,
    limits_of,
    rank,
    reduces_nothing,
    sums_nothing,
)
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.plugins import described, plugin_devices

# Two sessions that run in two threads crash the process, on SwiftShader and on an NVIDIA GPU alike, so runs take
# turns. Reentrant, because callers may hold it around several runs.
_run_lock = Turns()
_owner: list[int] = []  # the process that opened the first session

_DEFAULT_EPSILON = 1e-5
_ENDS = "a dim of 0 ends the process"
_LAST_AXIS_END = 2**31 - 1

_LOADER = "libvulkan.so.1"
_SOFTWARE_DRIVERS = ("swiftshader", "lvp_icd", "lavapipe")
_DRIVER_REMEDY = "install the GPU's Vulkan driver (NVIDIA's driver package, or mesa-vulkan-drivers for AMD and Intel)"


def _gathers_at_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    return is_empty_first(node, given) or (input_dims(node, 1) or (1,))[-1] == 0


def _scatters_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether nothing is written to, at places without coordinates, or at places without values."""
    places = input_dims(node, 1) or (1,)
    return is_empty_first(node, given) or places[-1] == 0 or (is_empty(node, given, (2,)) and 0 not in places)


def _gathers_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether elements of a tensor without elements are read."""
    return is_empty(node, given, (0,)) and not is_empty(node, given, (1,))


def _starts_inside(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether a `Slice` may run backwards from another element than the last."""
    if len(node.inputs) < 5 or node.inputs[4] is None:
        return False
    starts, axes, steps = (constant(given, place) for place in (1, 3, 4))
    if steps is None:
        return True
    if not (steps < 0).any():
        return False
    dims = input_dims(node, 0)
    if starts is None:
        return True
    inside = [place for place, start in enumerate(starts) if steps[place] < 0 and -1 != start < _LAST_AXIS_END]
    if not inside or dims is None or (axes is None and node.inputs[3] is not None):
        return bool(inside)
    sizes = [dims[place if axes is None else axes[place]] for place in inside]
    return not all(
        isinstance(size, int) and starts[place] >= size - 1 for place, size in zip(inside, sizes, strict=True)
    )


def _has_single_channel_groups(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether groups of a `ConvTranspose` may have several input channels and one output channel."""
    groups, weight = int(given.get("group", 1)), input_dims(node, 1)
    if groups == 1 or weight is None:
        return groups > 1
    return (weight[1] == 1 or not isinstance(weight[1], int)) and weight[0] != groups


def _reads_three_channels(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether a `Conv` may read channels in threes and write them in fours."""
    weight = input_dims(node, 1)
    if int(given.get("group", 1)) != 1 or rank(node) == 5:
        return False
    if weight is None:
        return True
    out, into = weight[:2]
    reads = not isinstance(into, int) or (into > 3 and into % 3 == 0 and into % 4 != 0)
    return reads and (not isinstance(out, int) or out % 4 == 0) and any(dim != 1 for dim in weight[2:])


def _spreads_last_axis(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether one of two inputs of several elements is repeated along the last axis."""
    left, right = input_dims(node, 0), input_dims(node, 1)
    if not left or not right or all(dim == 1 for dim in left) or all(dim == 1 for dim in right):
        return False
    return left[-1] != right[-1] and 1 in (left[-1], right[-1])


class WebGpuProvider(OrtProvider):
    """GPUs through WebGPU."""

    name: ClassVar[str] = "webgpu"
    kinds: ClassVar[tuple[str, ...]] = ("gpu", "webgpu", "vulkan")
    ep_name: ClassVar[str] = "WebGpuExecutionProvider"
    genai_name: ClassVar[str] = "WebGPU"
    title: ClassVar[str] = "WebGPU"
    extra: ClassVar[str] = "webgpu"
    plugin: ClassVar[bool] = True
    exclusive: ClassVar[bool] = True
    doubtful_dtypes: ClassVar[frozenset[DType]] = frozenset({DType.F16})
    # Plugin 0.4.0 on SwiftShader: from 32 queries on, where the kernel takes its flash form, results are off by 15 to
    # 20 percent, with a causal mask and with none. The lowerings of the others have
    # another form for cases that their kernels compute wrongly.
    distrusted_kernels: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {
            ("com.microsoft", "MultiHeadAttention"),
            *(("", op_type) for op_type in ("And", "Conv", "InstanceNormalization", "PRelu", "Pow", "Slice", "TopK")),
        }
    )
    # https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/providers/webgpu/webgpu_provider_options.h
    option_keys: ClassVar[frozenset[str] | None] = names(
        """
        deviceId powerPreference dawnBackendType preferredLayout enableGraphCapture enableInt64 enableRobustness
        enablePIXCapture forceCpuNodeNames storageBufferCacheMode uniformBufferCacheMode queryResolveBufferCacheMode
        defaultBufferCacheMode validationMode maxStorageBufferBindingSize maxNumPendingDispatches
        sessionBufferPoolGenerations preserveDevice kvCacheQuantizationBits multiRotaryCacheConcatOffset
        """
    )
    keeps: ClassVar[Keeps] = Keeps.OPTIMIZED

    def variants(self, device: Device, options: CompileOptions) -> Sequence[Variant]:
        """Return the other layout of convolutions, and launches that are recorded."""
        return (
            *variants_of("provider_options.preferredLayout", ["NHWC", "NCHW"], ["Conv"]),
            *variants_of("device_graph", [True]),
            *variants_of("kernel_dispatch", ["force-common"]),
        )

    def missing_libraries(self, device: Device) -> Problem | None:
        """Return the reason WebGPU cannot run here: missing Vulkan libraries, or a forked process."""
        if (problem := _fork_problem()) is not None:
            return problem
        if device.index:
            return Problem("the WebGPU provider chooses the GPU itself and has one device", f"use {device.kind!r}")
        if device.kind == "vulkan" and sys.platform == "darwin":
            return Problem("macOS has no Vulkan", "use 'gpu', which runs on Metal")
        return vulkan_problem() if sys.platform.startswith("linux") else None

    def facts(self, device: Device) -> Availability:
        """Return that the adapter is software, else the ids of the plugin's GPU."""
        if is_software():
            return Availability(False, hardware="software adapter", remedy=self.no_hardware_remedy())
        devices = plugin_devices(runtime.onnxruntime(), self.ep_name)
        hardware, identity = described(devices[0].device) if devices else ("", "")
        return Availability(False, hardware=hardware, remedy=self.no_hardware_remedy(), identity=identity)

    def memory(self, device: Device) -> MemoryReading | None:
        """Return the process's private memory for an adapter in software; that of a GPU cannot be read."""
        return MemoryReading(private_bytes(), whole=False, source=PRIVATE_MEMORY) if is_software() else None

    def no_hardware_remedy(self) -> str:
        """Return the remedy that brings an adapter that WebGPU supports."""
        if not sys.platform.startswith("linux"):
            return "update the graphics driver"
        return (
            f"{_DRIVER_REMEDY}; for tests without a GPU, scripts/software_gpu.py brings a software adapter that needs "
            "VK_DRIVER_FILES and ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1"
        )

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe on the plugin's one device, unless the process was forked; see `OrtProvider.recipe`."""
        _refuse_after_fork(device)
        recipe = super().recipe(device, options)
        _owner[:] = _owner or [os.getpid()]
        return replace(
            recipe,
            run_lock=self.run_lock,
            before_run=lambda: _refuse_after_fork(device),
            memory=("webgpu", 0),
            device_graph=options.device_graph is True,
        )

    def chosen(self, device: Device, options: CompileOptions) -> dict[str, str]:
        """Return the graphics API where the device insists on one, and whether launches are captured."""
        chosen = {"dawnBackendType": "Vulkan"} if device.kind == "vulkan" else {}
        if options.device_graph is True:  # "auto" does not capture: a capture needs static shapes
            chosen["enableGraphCapture"] = "1"
        return chosen

    # The plugin hands out buffers of its own, without ONNX Runtime's arena; the number that it keeps is not measured.
    session_memory: ClassVar[SessionMemory] = SessionMemory(arena=False)

    def run_lock(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock all WebGPU sessions of the process share."""
        return _run_lock

    # Each was assigned and failed in the run with this message, by the plugin 0.4.0.
    limits: ClassVar[Sequence[KernelLimit]] = (
        KernelLimit("Resize", lambda node, given: bool(given.get("antialias")), "antialias is NOT implemented"),
        KernelLimit(
            "ConvTranspose", lambda node, given: rank(node) not in (None, 3, 4), "only Conv2d or Conv1d are supported"
        ),
        KernelLimit(
            "Conv",
            lambda node, given: rank(node) == 5 and int(given.get("group", 1)) > 1,
            "Conv3D does not support grouped convolution",
        ),
        KernelLimit(
            "MaxPool",
            lambda node, given: (
                bool(given.get("storage_order")) or (len(node.outputs) > 1 and node.outputs[1] is not None)
            ),
            "the Indices output and column-major storage_order are not supported yet",
        ),
        KernelLimit(
            "BatchNormalization",
            lambda node, given: bool(given.get("training_mode")),
            "trainingMode is not supported yet",
        ),
        # Wrong or fatal with the plugin 0.4.0 and ONNX Runtime 1.31.1 on SwiftShader; tests/backend/providers/
        # test_webgpu_faults.py reproduces each and fails when it is repaired.
        KernelLimit("Slice", _starts_inside, "backwards from another element than the last, its results are wrong"),
        KernelLimit(
            "ConvTranspose",
            _has_single_channel_groups,
            "its results are wrong for groups of several input channels and one output channel",
        ),
        # https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/providers/webgpu/nn/conv2d_mm.cc
        # (a component size of 3)
        KernelLimit(
            "Conv",
            _reads_three_channels,
            "its results are wrong if input channels are a multiple of 3 and not of 4, and output channels one of 4",
        ),
        # The key of compiled shaders, which sessions of a process share, lacks epsilon; one value alone is right.
        KernelLimit(
            "InstanceNormalization",
            lambda node, given: abs(float(given.get("epsilon", _DEFAULT_EPSILON)) / _DEFAULT_EPSILON - 1) > 1e-6,
            "it computes with the epsilon of an earlier node; 1e-5 alone is safe",
        ),
        *limits_of("Pow PRelu", _spreads_last_axis, "it does not broadcast along the last axis"),
        KernelLimit("Tile", lambda node, given: rank(node) == 0, "it does not take a scalar"),
        KernelLimit(
            "ReduceMean",
            lambda node, given: (dtype := element(node.inputs)) is not None and not dtype.is_float,
            "its sum of integers overflows",
        ),
        KernelLimit("ReduceMean", reduces_nothing, "the mean of no elements is not NaN", empty=True),
        KernelLimit(
            "LayerNormalization",
            lambda node, given: is_empty_first(node, given) and len(node.output_names) > 1,
            "the mean of no elements is not NaN",
        ),
        KernelLimit("MatMul", sums_nothing, "an inner dim of 0 ends the process", empty=True),
        KernelLimit("Gather", _gathers_nothing, "reading from a tensor without elements ends the process", empty=True),
        KernelLimit("GatherND", _gathers_at_nothing, _ENDS, empty=True),
        *limits_of("GatherElements ScatterElements Softmax LogSoftmax", is_empty_first, _ENDS, empty=True),
        KernelLimit("ScatterND", _scatters_nothing, _ENDS, empty=True),
        KernelLimit("Squeeze", has_no_axes, "without axes it takes all of size 1"),
        *limits_of("Einsum GRU LSTM RNN RotaryEmbedding", is_empty, _ENDS, empty=True),
        KernelLimit("RotaryEmbedding", is_empty, _ENDS, "com.microsoft", empty=True),
        *limits_of("Conv DequantizeLinear Gemm", is_empty_beside, "a dim of 0 beside its first input ends the process"),
        KernelLimit("DFT", is_empty_first, "without elements it does not end", empty=True),
        *limits_of(
            "Conv ConvTranspose MaxPool AveragePool GlobalAveragePool GlobalMaxPool InstanceNormalization ReduceMax "
            "ReduceMin TopK",
            is_empty_first,
            "it does not take a dim of 0",
            empty=True,
        ),
        # Out of range, the kernels read 0 or memory that is not theirs.
        *INDEX_LIMITS,
        *POOL_LIMITS,
    )
    # f16 nodes are assigned even where the adapter has no shader-f16, and fail at the first run:
    # https://github.com/microsoft/onnxruntime/issues?q=webgpu+shader-f16. So questions about f16 are run.
    # Kernels are densest at opset 21; 22 loses pooling, LSTM and trigonometry, 25 Transpose and Shape.

    def default_profile(self, device: Device) -> CostProfile:
        """Return the profile of a middling GPU, or of a software adapter if that is the only one."""
        if is_software():
            return CostProfile.shipped(
                "SwiftShader on 2 cores, ONNX Runtime 1.31.1, plugin 0.4.0, 2026-10",
                gflops=(0.5, 0.3),
                bytes_per_ns=(0.2, 0.5),
                ns=(80_000, 120_000),
            )
        # Dispatch, round trip and transfers: H200 over Vulkan, ONNX Runtime 1.31.1, plugin 0.4.0, 2026-10 (a chain of
        # Sin; Identity of 4 floats; Negate of 256 MB host to host in 200 ms). Rates: a middling discrete GPU.
        return CostProfile.shipped(
            "middling GPU, transfers as on an H200 over Vulkan, ONNX Runtime 1.31.1, 2026-10",
            gflops=(2_500, 1_500),
            bytes_per_ns=(120, 2.6),
            ns=(5_400, 680_000),
        )


def is_software() -> bool:
    """Return whether WebGPU would run in software: the named Vulkan driver is one, or the plugin lists a CPU."""
    if any(word in driver.name.lower() for driver in _named_drivers() or () for word in _SOFTWARE_DRIVERS):
        return True
    if runtime.runtime_problem() is not None:
        return False
    devices = plugin_devices(runtime.onnxruntime(), WebGpuProvider.ep_name)
    return any(str(each.device.type).endswith("CPU") for each in devices)


def vulkan_problem() -> Problem | None:
    """Return the library that is missing before any Vulkan program can run on this Linux machine, or None."""
    if not loads(_LOADER):
        return Problem(f"the Vulkan loader {_LOADER} is not installed", "apt-get install libvulkan1")
    named = _named_drivers()
    missing = [str(path) for path in named or () if not path.is_file()]
    if missing:
        return Problem(f"VK_DRIVER_FILES names {', '.join(missing)}, which is not there", "correct or unset it")
    if not vulkan_drivers():
        return Problem("the Vulkan loader is installed but no Vulkan driver is", _DRIVER_REMEDY)
    return None


def vulkan_drivers() -> tuple[Path, ...]:
    """Return the Vulkan driver descriptions the loader would read on this Linux machine."""
    named = _named_drivers()
    if named is not None:
        return tuple(path for path in named if path.is_file())
    # https://github.com/KhronosGroup/Vulkan-Loader/blob/main/docs/LoaderDriverInterface.md (driver discovery)
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    roots = [Path("/usr/local/etc"), Path("/usr/local/share"), Path("/etc"), Path("/usr/share"), home]
    return tuple(path for root in roots for path in sorted((root / "vulkan" / "icd.d").glob("*.json")))


def _named_drivers() -> tuple[Path, ...] | None:
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        value = os.environ.get(variable)
        if value:
            return tuple(Path(piece) for piece in value.split(os.pathsep) if piece)
    return None


def _fork_problem() -> Problem | None:
    if not _owner or _owner[0] == os.getpid():
        return None
    return Problem("WebGPU hangs in a process that was forked after WebGPU was used", SPAWN_REMEDY)


def _refuse_after_fork(device: Device) -> None:
    if (problem := _fork_problem()) is not None:
        raise DeviceUnavailableError(device, problem.reason, problem.remedy)
