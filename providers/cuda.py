"""CUDA: NVIDIA GPUs through cuBLAS and cuDNN; the `onnxruntime-gpu` package brings it."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.device import Device
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.options.variant import Variant, variants_of
from rlx_ort.providers.base import (
    Availability,
    CostProfile,
    EngineSession,
    MemoryReading,
    SessionMemory,
    SessionRequest,
)
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.cuda_driver import (
    apart,
    cuda_gpus,
    open_recorder,
    pinned_like,
    process_bytes,
    same_bus,
    wait_for,
)
from rlx_ort.providers.engine.opening import open_session
from rlx_ort.providers.engine.recipe import Keeps, Recording, SessionRecipe, names
from rlx_ort.providers.engine.replays import NotRecordedError
from rlx_ort.providers.engine.runtime import Problem
from rlx_ort.providers.hardware import engine_library, missing_libraries, nvidia_gpus
from rlx_ort.providers.kernel_limits import (
    INDEX_LIMITS,
    POOL_LIMITS,
    REDUCED_IN_F64,
    KernelLimit,
    element,
    has_no_axes,
    has_no_heads,
    has_no_number,
    has_other_operands,
    input_dims,
    is_empty,
    is_empty_first,
    is_float_remainder,
    limits_of,
    reads_i64,
    reads_integers,
    reduces_nothing,
    sums_nothing,
)
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.plugins import plugin_devices

_STREAM_OPTIONS = names(
    """
    enable_cuda_graph has_user_compute_stream user_compute_stream do_copy_in_default_stream use_ep_level_unified_stream
    gpu_external_alloc gpu_external_free gpu_external_empty_cache
    """
)
_WINDOWS_DLLS = ("cublasLt64_13.dll", "cublas64_13.dll", "cufft64_12.dll", "cudart64_13.dll", "cudnn64_9.dll")
_SCATTERS = (DType.F32, DType.F16, DType.BF16)
_PACKED = (DType.I4, DType.U4)
_MATRIX_RANK = 2
_DRIVER = ("libcuda.so.1", "nvcuda.dll")
_NO_GPU_REMEDY = "check with nvidia-smi that the driver sees a GPU"
_SEARCH = "cudnn_conv_algo_search"
_MOST_PINNED_BYTES = 256 << 20


def _multiplies_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether a product sums nothing, or is one of many with a dim of 0; a matrix with no rows is none."""
    batches = [dims is not None and len(dims) > _MATRIX_RANK for dims in (input_dims(node, 0), input_dims(node, 1))]
    return sums_nothing(node, given) or (all(batches) and is_empty(node, given))


_NOT_TAKEN = "it does not take a dim of 0"

# Forms without elements on which kernels end the process, cost it the device, refuse, or answer otherwise than the
# reference evaluator of `onnx` 1.23.2, on an H200 with ONNX Runtime 1.31.1. The cases are those of `emptied.py` of the
# tests.
_EMPTY = (
    KernelLimit("Attention", has_no_heads, "without heads it ends the process"),
    *limits_of("GRU LSTM RNN RoiAlign", is_empty, "a dim of 0 ends the process", empty=True),
    *limits_of("MatMul MatMulInteger", _multiplies_nothing, "a dim of 0 ends the process"),
    *limits_of("Compress Max Min RotaryEmbedding Sum", is_empty, _NOT_TAKEN),
    KernelLimit("RotaryEmbedding", is_empty, _NOT_TAKEN, "com.microsoft"),
    *limits_of("BatchNormalization EyeLike LRN ReverseSequence Shrink Trilu", is_empty_first, _NOT_TAKEN),
    KernelLimit("Softmax", is_empty_first, "fused with a sum before it, it does not take a dim of 0"),
    KernelLimit("Conv", is_empty, "without elements it answers in the shape of an earlier run"),
    # The first time it is an error, but the kernel keeps the sizes and does not check them again (1.31.1, H100, H200).
    *limits_of(
        "Conv ConvTranspose", has_other_operands, "operands that do not fit end the process the second time", small=True
    ),
    KernelLimit("NonMaxSuppression", has_no_number, "it reads a number that is not there"),
    KernelLimit("Squeeze", has_no_axes, "without axes it takes all of size 1"),
    KernelLimit("ReduceMean", reduces_nothing, "the mean of no elements is not NaN"),
    *limits_of("ReduceLogSum ReduceLogSumExp", reduces_nothing, "the logarithm of no sum is not -inf"),
)


class NvidiaProvider(OrtProvider):
    """The base of all providers for NVIDIA's GPUs: what is known of the hardware."""

    precisions: ClassVar[Sequence[Precision]] = (Precision.TF32, Precision.F16, Precision.BF16)

    def facts(self, device: Device) -> Availability:
        """Return the GPU's name, driver and memory by the driver's tool, and its PCI address and UUID."""
        process_bytes(device.index)  # the first call comes before any session
        gpus, identity = nvidia_gpus()[device.index :], ""
        if device.index < len(ordinals := cuda_gpus()):
            known = ordinals[device.index]
            gpus = tuple(gpu for gpu in nvidia_gpus() if same_bus(gpu.bus_id, known.bus_id))
            identity = ", ".join(filter(None, (known.bus_id, known.uuid)))
        if not gpus:
            return Availability(False, remedy=_NO_GPU_REMEDY, identity=identity)
        gpu = gpus[0]
        return Availability(False, "", _NO_GPU_REMEDY, gpu.name, gpu.driver, gpu.memory_bytes, identity)

    def memory(self, device: Device) -> MemoryReading | None:
        """Return all that this process uses of the GPU: its context and its loaded kernels are included."""
        used = process_bytes(device.index)
        return None if used is None else MemoryReading(used[0], whole=True, source=used[1])


class CudaProvider(NvidiaProvider):
    """NVIDIA GPUs; the index is CUDA's ordinal: visible GPUs only, fastest first unless CUDA_DEVICE_ORDER is set."""

    name: ClassVar[str] = "cuda"
    kinds: ClassVar[tuple[str, ...]] = ("cuda",)
    ep_name: ClassVar[str] = "CUDAExecutionProvider"
    genai_name: ClassVar[str] = "cuda"
    title: ClassVar[str] = "CUDA"
    extra: ClassVar[str] = "cuda"
    keeps: ClassVar[Keeps] = Keeps.OPTIMIZED
    # cuBLAS recommends 32 MiB of work space on Hopper, 4 MiB on earlier GPUs, for each handle
    # (https://docs.nvidia.com/cuda/cublas/#cublassetworkspace). Six models, two batches: 49 to 127 MiB beside what
    # is counted on an H200, 75 in the median (docs/results, h200-2026-11-27-fourth).
    work_space_bytes: ClassVar[int] = 80 << 20
    # After the first runs of six models 544 to 546 MiB stayed on an H200, and each weight took whole pages of 2 MiB
    # (docs/results, h200-2026-11-26). Of its kernels activations alone may write over their input (`MayInplace` in
    # onnxruntime/core/providers/cuda): ResNet-50 at batch 16 takes 172 MiB for its activations, 122 with sums in place.
    session_memory: ClassVar[SessionMemory] = SessionMemory(
        in_place=names("Elu HardSigmoid LeakyRelu Relu Selu Sigmoid Softplus Softsign Tanh"),
        process_bytes=545 << 20,
        page_bytes=2 << 20,
    )
    # https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#configuration-options
    option_keys: ClassVar[frozenset[str] | None] = names(
        """
        device_id gpu_mem_limit arena_extend_strategy cudnn_conv_algo_search cudnn_conv_use_max_workspace
        cudnn_conv1d_pad_to_nc1d do_copy_in_default_stream has_user_compute_stream user_compute_stream
        gpu_external_alloc gpu_external_free gpu_external_empty_cache enable_cuda_graph tunable_op_enable
        tunable_op_tuning_enable tunable_op_max_tuning_duration_ms enable_skip_layer_norm_strict_mode prefer_nhwc
        use_ep_level_unified_stream use_tf32 fuse_conv_bias sdpa_kernel external_data_loader_reading_threads
        """
    )

    def missing_libraries(self, device: Device) -> Problem | None:
        """Return the CUDA libraries that are not found, all of them, or an index beyond the GPUs there are."""
        problem = cuda_libraries_problem("onnxruntime_providers_cuda")
        count = len(cuda_gpus() or nvidia_gpus())
        if problem is None and count and device.index >= count:
            problem = Problem(f"the driver lists {count} GPUs, counted from 0", "rlx-ort devices lists them")
        return problem

    def memory_limit(self, device: Device, options: CompileOptions, installed: int) -> int | None:
        """Return the limit of the session's arena, else the GPU's memory; Windows' driver lends of the host's."""
        return options.device_memory_limit_bytes or (installed if installed and sys.platform != "win32" else None)

    def host_memory(self, device: Device, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return pinned memory up to 256 MB, which is taken from all processes."""
        with contextlib.suppress(NotRecordedError):
            if nbytes <= _MOST_PINNED_BYTES:
                return pinned_like(device.index, np.broadcast_to(np.uint8(0), (nbytes,)))
        return super().host_memory(device, nbytes)

    def devices(self) -> Sequence[Device]:
        """Return one device for each GPU CUDA counts, or index 0 when it counts none."""
        return tuple(Device("cuda", index) for index in range(max(1, len(cuda_gpus() or nvidia_gpus()))))

    def ep_devices(self, device: Device) -> tuple[Any, ...]:
        """Return the device objects of a build that carries CUDA as a plugin, empty for one that has it inside."""
        engine = runtime.onnxruntime()
        # Such a provider, named in `providers=`, would silently run on the CPU.
        if ", cuda-plugin-ep=" not in engine.get_build_info():
            return ()
        return plugin_devices(engine, self.ep_name)[device.index : device.index + 1]

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe on one GPU, with TF32 off unless asked for: its relative error is 6e-4."""
        chosen, config = cuda_options(device.index, options.precision), {}
        if options.device_memory_limit_bytes is None:
            # In the arena, which doubles, the weights of GPT-2 took 1,024 MiB for 475 (docs/results, h200-2026-11-26).
            config["session.use_device_allocator_for_initializers"] = "1"
        else:
            # By default the arena doubles its size, and would reach the limit with half of it unused.
            chosen["gpu_mem_limit"] = str(options.device_memory_limit_bytes)
            chosen["arena_extend_strategy"] = "kSameAsRequested"
        recipe = super().recipe(device, options)
        obstacle, recording = "", None
        if taken := sorted(_STREAM_OPTIONS.intersection(options.provider_options)):
            obstacle = f"the provider option {taken[0]!r} is set"
        elif recipe.ep_devices:
            obstacle = "this ONNX Runtime has CUDA as a plugin, whose streams are its own"
        if options.device_graph:
            why = obstacle
            if not why and options.profile_prefix is not None:
                why = "a profile is written"
            elif not why and options.session_config.get("session.use_env_allocators") == "1":
                why = "other sessions share its arena (session.use_env_allocators)"
            recording = Recording(partial(open_recorder, device.index, why), options.device_graph is True)
        return replace(
            recipe,
            options=chosen,
            memory=("cuda", device.index),
            recording=recording,
            # ONNX Runtime (1.31.1) runs the body of a branch on another stream, if the branch itself is on the CPU, and
            # waits for neither: results were read before they were there.
            ordered=None if obstacle else partial(open_recorder, device.index, ordered=True),
            pinned=None if obstacle else partial(pinned_like, device.index),
            # At the end of a run ONNX Runtime (1.31.1) frees pinned buffers, as of Split and of products that broadcast
            # batches, in a callback of the driver. If that outlives the session, it frees their arena too, which CUDA
            # does not permit there (cudaFreeHost: 800), and the process ends (H200).
            wait=partial(wait_for, device.index),
            apart=apart.other,
            # A wait would end the recording. Plain runs do wait: otherwise the session keeps pinned buffers, and
            # closing it may free their arena in a callback of the driver, which CUDA does not permit (cudaFreeHost:
            # 800) and which ends the process. See docs/results/h200-2026-11-22-slots.txt.
            run_config={} if obstacle else {"disable_synchronize_execution_providers": "1"},
            # Where all sizes are known, it makes a Gemm of each product with a bias, between two Reshapes, which leaves
            # no bias for BiasGelu and SkipLayerNormalization to take in: BERT at batch 16 took 19.4 ms, 10.8 without it
            # (H100, ONNX Runtime 1.31.1; docs/results/README.md, h100-2026-11-25-fifth).
            leaves_out=("MatMulAddFusion",),
            config=config,
        )

    def _open(self, request: SessionRequest) -> EngineSession:
        """Open a session; where input sizes are open, and in f16, convolutions are planned by cuDNN's heuristics.

        ONNX Runtime plans anew whenever the shape of a convolution's input differs from the last one's: a small network
        for text took 92 ms for each new width with its default, EXHAUSTIVE, and 17 ms with HEURISTIC (H100, ONNX
        Runtime 1.31.1; docs/results/h100-2026-11-25-second). The old plan goes, and with it the code of kernels that
        cuDNN has compiled for it: a replay of them ended in CUDA error 715.

        In f16 EXHAUSTIVE ends in kernels without tensor cores where none of cuDNN's first plans fits: DETR took 29 ms,
        and 14 with HEURISTIC. In f32 U-Net was 8 % slower with it (H200; docs/results/README.md,
        h200-2026-11-26-second).
        """
        recipe, model = self.recipe(request.device, request.options), request.model
        convolutions = [node for node in model.nodes if node.op_type in ("Conv", "ConvTranspose")]
        replans = bool(convolutions) and _has_open_sizes(model)
        if replans or any(element(node.inputs) is DType.F16 for node in convolutions):
            recipe = replace(recipe, options={_SEARCH: "HEURISTIC", **recipe.options}, replans=replans)
        return open_session(recipe, request)

    def variants(self, device: Device, options: CompileOptions) -> Sequence[Variant]:
        """Return other layouts, plans and fusions of convolutions, other attention kernels, and runs as they are.

        Plans by DEFAULT and cudnn_conv1d_pad_to_nc1d are not among them. In five tunings of U-Net, DETR and Whisper's
        encoder, runs with the first took 1.15 to 81 times as long, and one session took 55 s to open; the second
        won in none (H200, ONNX Runtime 1.31.1; docs/results/README.md, h200-2026-11-26-third).
        """
        attention = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
        norms = ("GroupNorm", "GroupNormalization", "InstanceNormalization")
        return (
            *variants_of("fusion", [True], ["Softmax", "Attention", *norms]),  # the largest gain where it fits
            *variants_of("provider_options.prefer_nhwc", ["1"], ["Conv"]),
            *variants_of("provider_options.cudnn_conv_algo_search", ["EXHAUSTIVE", "HEURISTIC"], ["Conv"]),
            # GroupNorm reads NHWC: between convolutions of another layout its transpositions may cost what it gains.
            Variant({"fusion": True, "provider_options": {"prefer_nhwc": "1"}}, frozenset(norms)),
            *variants_of("provider_options.fuse_conv_bias", ["1"], ["Conv"]),
            # Flash, memory-efficient, cuDNN's and plain products, as `AttentionBackend` in the source of ONNX Runtime.
            *variants_of("provider_options.sdpa_kernel", ["1", "2", "8", "16"], attention),
            *variants_of("kernel_dispatch", ["force-common"]),
            *variants_of("optimization", ["extended"]),
            *variants_of("device_graph", [False]),
        )

    # On an H100 with ONNX Runtime 1.31.1 reductions rounded i64 beyond 2^53, sums of i32 stopped at its limits, and
    # TopK, ArgMax and ArgMin gave places that are none where there are infinities; the lowerings have other forms.
    distrusted_kernels: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        ("", op_type) for op_type in ("ArgMax", "ArgMin", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "TopK")
    )
    # Each was assigned and failed in the run with this message, on an H200 with ONNX Runtime 1.31.1.
    limits: ClassVar[Sequence[KernelLimit]] = (
        # https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/providers/cuda/tensor/gather_impl.cu
        # (0 for an index out of range; the others clamp it, or assert in debug builds)
        *INDEX_LIMITS,
        *POOL_LIMITS,
        KernelLimit(
            "ScatterND",
            lambda node, given: given.get("reduction", "none") != "none" and element(node.inputs) not in _SCATTERS,
            "its reductions are not implemented for this element type",
        ),
        KernelLimit(
            "Attention",
            lambda node, given: bool(given.get("qk_matmul_output_mode")) and any(node.outputs[3:]),
            "only kNone and kQK output modes are supported",
        ),
        *limits_of("ReduceMax ReduceMin", reads_i64, "it computes i64 in f64, which is inexact beyond 2^53"),
        *limits_of("ReduceL1 ReduceProd ReduceSum", reads_integers, REDUCED_IN_F64),
        KernelLimit("Mod", is_float_remainder, "it computes floats with fmod=1 only before opset 28"),
        KernelLimit(
            "Cast",
            lambda node, given: element(node.outputs) is DType.F4E2M1 and element(node.inputs) is not DType.F32,
            "unimplemented 'to' argument value 23",
        ),
        KernelLimit(
            "DequantizeLinear",
            lambda node, given: bool(given.get("block_size")) and element(node.inputs) not in _PACKED,
            "blocks of this element type are an unsupported quantization type",
        ),
        KernelLimit(
            "QuantizeLinear",
            lambda node, given: bool(given.get("block_size")) and element(node.outputs) not in _PACKED,
            "blocks of this element type are an unsupported quantization type",
        ),
        *_EMPTY,
    )

    # Round trip and transfers: H200, ONNX Runtime 1.31.1, CUDA 13, 2026-10 (Identity of 4 floats; Negate of 256 MB
    # host to host in 46 ms). Dispatch: a node of users' models by default, most of them replayed from a recording, in
    # the median of 57 (2026-11; 4.3 us where it is launched). Rates: f32 without TF32 on a middling GPU.
    profile: ClassVar[CostProfile | None] = CostProfile.shipped(
        "middling GPU, launches and transfers as on an H200, ONNX Runtime 1.31.1, 2026-11",
        gflops=(12_000, 8_000),
        bytes_per_ns=(900, 11),
        ns=(2_500, 29_000),
    )


def cuda_options(index: int, precision: Precision) -> dict[str, str]:
    """Return the options of the CUDA provider for a GPU and an arithmetic."""
    # ONNX Runtime (1.26 to 1.32) warns of each session that names its GPU that no plugin has it. It takes the first.
    named = {"device_id": str(index)} if index else {}
    return {**named, "use_tf32": "1" if precision is Precision.TF32 else "0"}


def cuda_libraries_problem(library_name: str) -> Problem | None:
    """Return which libraries a CUDA-based provider of the installed ONNX Runtime does not find, or None."""
    library = engine_library(library_name)
    if library is None:
        return None  # not a build with a separate library; opening a session shows the missing library
    missing = missing_libraries(library, _WINDOWS_DLLS)
    if missing:
        _preload_from_wheels()
        missing = missing_libraries(library, _WINDOWS_DLLS)
    if not missing:
        return None
    steps = []
    if any(name not in _DRIVER for name in missing):
        steps.append("pip install 'onnxruntime-gpu[cuda,cudnn]'")
    if any(name in _DRIVER for name in missing):
        steps.append("install the NVIDIA driver")
    return Problem(f"{library.name} needs {', '.join(missing)}, not found on this machine", "  # and ".join(steps))


@functools.cache
def _preload_from_wheels() -> None:
    """Load CUDA from the nvidia-* wheels, outside of the loader's path; ONNX Runtime only prints failures."""
    with contextlib.redirect_stdout(io.StringIO()):
        runtime.onnxruntime().preload_dlls()


def _has_open_sizes(model: ExportedModel) -> bool:
    kinds = [kind for kind in model.input_types.values() if isinstance(kind, TensorType)]
    return any(kind.shape is None or not kind.shape.is_static for kind in kinds)
