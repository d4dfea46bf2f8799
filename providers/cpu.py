"""CPU: ONNX Runtime's own kernels; always there, and the reference the others are compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.device import Device
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.options.variant import Variant, variants_of
from rlx_ort.providers.base import PRIVATE_MEMORY, Availability, CostProfile, MemoryReading, SessionMemory
from rlx_ort.providers.engine.recipe import Keeps, SessionRecipe, names
from rlx_ort.providers.engine.runtime import Problem, runtime_version
from rlx_ort.providers.hardware import core_share, cpu_name, memory_bytes, private_bytes, swap_bytes
from rlx_ort.providers.kernel_limits import (
    POOL_LIMITS,
    REDUCED_IN_F64,
    KernelLimit,
    has_no_axes,
    has_no_heads,
    has_no_number,
    input_dims,
    is_empty,
    is_empty_first,
    is_float_remainder,
    limits_of,
    rank,
    reads_i64,
    reads_integers,
    reduces_nothing,
    sums_no_codes,
    sums_nothing,
)
from rlx_ort.providers.ort_provider import OrtProvider

# Kept calibrations of two cores of an AMD EPYC and 16 of an Intel Xeon have 55 to 115 GFLOP/s a core in products and in
# convolutions, and 100 to 620 bytes per ns, since a node finds in the cache what the one before it wrote. A node of
# users' models takes longer the more threads have to be started and awaited. Of the figures tried, these choose best
# for the kept runs and for users' models together: NOTES.md of calibration.
_GFLOPS_PER_CORE = 60.0
_BYTES_PER_NS = (150.0, 1e9)  # inputs and outputs are handed over, not copied
_NODE_NS = (2_000.0, 250.0)  # of a chain on one thread, and more for each doubling of the threads
_RUN_NS = 4_000.0  # a graph of one node from numpy to numpy
_BLOCK = 16  # channels or columns that MLAS packs together, 8 channels without AVX-512
_NS = (1_200.0, 4_000.0)  # one node of a chain; a graph of one node from numpy to numpy

_CHECKED_CORE = (1, 31)  # 1.24.4 ends the process on more operators
_VOLUME_RANK = 5  # of a convolution in 3 dims
_PACKED = {"Conv": (1,), "GRU": (1, 2), "Gemm": (1,), "LSTM": (1, 2), "MatMul": (1,)}
_BLOCKED = {"Conv": (0, 1), "Gemm": (-1,), "MatMul": (-1,)}


def _sums_integers_alone(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether an `Einsum` sums integers along an index of one input, for which it takes ReduceSum."""
    terms, arrow, result = str(given.get("equation", "")).replace(" ", "").partition("->")
    operands = terms.split(",")
    letters = set(terms) - set(",.")
    kept = set(result) if arrow else {each for each in letters if terms.count(each) == 1}
    alone = {each for each in letters if sum(each in operand for operand in operands) == 1}
    return bool(alone - kept) and reads_integers(node, given)


def _averages_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether an imported node, for which no other form is written, may have means of no elements."""
    return node.pattern.imported and reduces_nothing(node, given)


def _leaves_rows(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether a product that sums nothing has other rows than its first operand, or one number for each."""
    left, right = input_dims(node, 0), input_dims(node, 1)
    if not (left and right and sums_nothing(node, given)):
        return False
    own, batch = left[:-2], right[:-2]
    fits = all(dim in (1, other) for dim, other in zip(batch[::-1], own[::-1], strict=False))
    return len(right) == 1 or not fits or any(dim != 1 for dim in batch[: -len(own) or None])


def _scales_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether a `Gemm` without an inner dim scales its third input."""
    inner = input_dims(node, 0)
    scaled = given.get("beta", 1.0) != 1.0 and len(node.inputs) > 2
    return scaled and inner is not None and inner[-2 if given.get("transA") else -1] == 0


def _has_no_window(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    return 0 in (input_dims(node, 1) or ())[2:]


def _spreads_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether a volume without elements is convolved."""
    return 0 in (input_dims(node, 0) or ())[2:] and rank(node) == _VOLUME_RANK


def _orders_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    return "axis" in given and is_empty_first(node, given)


def _is_empty_for_old_core(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether an input has no elements, and the core is one before 1.31, as DirectML's is."""
    return is_empty(node, given) and (runtime_version() or _CHECKED_CORE) < _CHECKED_CORE


def _averages_no_loss(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    return given.get("reduction", "mean") == "mean" and is_empty(node, given, (1,))


_NO_MEAN = "the mean of no elements is not NaN"
_OLD_STATES = "a dim of 0 ends the process or keeps old states"

# Forms without elements on which ONNX Runtime 1.31.1 and, but for Attention, 1.32.0 end the process, or answer
# otherwise than the reference evaluator of `onnx` 1.23.2, often with what the memory held. The cases are those of
# `emptied.py` of the tests.
_EMPTY = (
    *limits_of("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", _averages_no_loss, _NO_MEAN),
    *limits_of("GRU LSTM RNN", is_empty_first, _OLD_STATES, empty=True),
    KernelLimit("DynamicQuantizeLSTM", is_empty_first, _OLD_STATES, "com.microsoft", empty=True),
    KernelLimit("MatMul", _leaves_rows, "it leaves rows unwritten where the inner dim is 0"),
    *limits_of("MatMulInteger QLinearMatMul", sums_no_codes, "it leaves its result unwritten where the inner dim is 0"),
    KernelLimit("Gemm", _scales_nothing, "it ignores beta where the inner dim is 0"),
    KernelLimit("Attention", has_no_heads, "without heads it ends the process"),
    KernelLimit("Conv", _has_no_window, "with a window without elements it does not end"),
    KernelLimit("ConvTranspose", _spreads_nothing, "a volume without elements ends the process"),
    KernelLimit("NonMaxSuppression", has_no_number, "it reads a number that is not there"),
    KernelLimit("STFT", partial(is_empty, places=(2,)), "a window without elements ends the process"),
    KernelLimit("Squeeze", has_no_axes, "without axes it takes all of size 1"),
    KernelLimit("SplitToSequence", has_no_axes, "without sizes it takes 1"),
    *limits_of(
        "AffineGrid Col2Im DFT Einsum LRN LpNormalization TopK",
        _is_empty_for_old_core,
        "in this ONNX Runtime a dim of 0 ends the process, or is ignored",
    ),
    KernelLimit("Unique", _orders_nothing, "a dim of 0 ends the process"),
)


class CpuProvider(OrtProvider):
    """The CPU; index 0 only."""

    name: ClassVar[str] = "cpu"
    kinds: ClassVar[tuple[str, ...]] = ("cpu",)
    ep_name: ClassVar[str] = "CPUExecutionProvider"
    genai_name: ClassVar[str] = "cpu"
    title: ClassVar[str] = "CPU"
    extra: ClassVar[str] = "cpu"
    checks_indices: ClassVar[bool] = True
    option_keys: ClassVar[frozenset[str] | None] = frozenset()  # the session options have everything about the CPU
    keeps: ClassVar[Keeps] = Keeps.PACKED

    def missing_libraries(self, device: Device) -> Problem | None:
        """Refuse an index above 0: cores are shared by threads, not addressed."""
        if device.index:
            return Problem("the CPU has one device, cpu:0; intra_op_threads sets how many cores it uses", "use 'cpu'")
        return None

    def facts(self, device: Device) -> Availability:
        """Return the processor's name and the machine's memory."""
        return Availability(False, hardware=cpu_name(), memory_bytes=memory_bytes(), remedy=self.install_remedy())

    def memory(self, device: Device) -> MemoryReading:
        """Return the process's private memory, which has other data beside that of sessions."""
        return MemoryReading(private_bytes(), whole=False, source=PRIVATE_MEMORY)

    # 0.20 ms for 128 rows of 384 where Add and LayerNormalization take 0.024, and 0.032 where Add and
    # SimplifiedLayerNormalization take 0.015 (ONNX Runtime 1.31.1 and 1.32.0, docs/results/README.md,
    # cpu-2026-11-26-norms). ONNX Runtime makes them itself where all sizes are known, which cost MiniLM 12 %.
    slow_kernels: ClassVar[Mapping[tuple[str, str], Sequence[str]]] = {
        ("com.microsoft", f"Skip{norm}"): ("Add", norm)
        for norm in ("LayerNormalization", "SimplifiedLayerNormalization")
    }

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe without the fusion whose kernels are slower than the nodes."""
        return replace(super().recipe(device, options), leaves_out=("SkipLayerNormFusion",))

    # Activations write over their input (`MayInplace` in onnxruntime/core/providers/cpu). The kernels of the others do
    # not; they stand for the fused nodes that they become a part of, such as LayerNormalization and Gelu.
    # Bytes of a session and a node: docs/results/README.md, cpu-2026-11-26-memory.
    session_memory: ClassVar[SessionMemory] = SessionMemory(
        on_host=True,
        in_place=names(
            """
            Abs Add Cast Ceil Clip Div Elu Erf Exp Floor HardSigmoid LeakyRelu Log LogSoftmax Max Min Mul Neg Not
            Reciprocal Relu Selu Sigmoid Softmax Softplus Softsign Sqrt Sub Sum Tanh
            """
        ),
        reorders=True,
        session_bytes=6 << 20,
        node_bytes=12 << 10,
    )

    def memory_limit(self, device: Device, options: CompileOptions, installed: int) -> int | None:
        """Return the machine's memory and its swap space."""
        swap = swap_bytes()
        return installed + swap if installed and swap is not None else None

    def packed_bytes(self, op_type: str, place: int, shape: Sequence[int], itemsize: int) -> int:
        """Return the bytes of a packed f32 weight: columns of products and channels of convolutions in blocks."""
        if itemsize != 4 or place not in _PACKED.get(op_type, ()) or (op_type == "Conv" and len(shape) != 4):
            return 0
        blocks = [*shape]
        for axis in _BLOCKED.get(op_type, ()):
            if shape[axis] >= _BLOCK or axis != 1 or op_type != "Conv":
                blocks[axis] = -(-shape[axis] // _BLOCK) * _BLOCK
        return math.prod(blocks) * itemsize

    def node_work_bytes(self, op_type: str, shapes: Sequence[Sequence[int]]) -> int:
        """Return the gates of all steps of a recurrent node, in each direction."""
        if op_type not in ("GRU", "LSTM", "RNN") or [len(shape) for shape in shapes[:3]] != [3, 3, 3]:
            return 0
        (steps, batch, width), (directions, gates, _), hidden = shapes[0], shapes[1], shapes[2][2]
        return steps * batch * directions * (gates + (directions > 1) * (width + hidden)) * 4

    # Sigmoid of f64 is 0 from -37 down; some i64 are misordered; sums and products of integers are computed in f64,
    # which stops at their limits; the mean of no elements is 0 (ONNX Runtime 1.31.1). `kernel_dtypes` and the lowerings
    # of `Activation` and `Reduce` have the other forms.
    distrusted_kernels: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        ("", op_type)
        for op_type in (
            *("Clip", "Max", "Min", "Sigmoid", "Sign", "ReduceMax", "ReduceMin"),
            *("ReduceSum", "ReduceProd", "ReduceMean"),
        )
    )
    limits: ClassVar[Sequence[KernelLimit]] = (
        KernelLimit("Mod", is_float_remainder, "its kernel computes floats with fmod=1 only before opset 28"),
        # Nodes of imported models that are no IR ops, as with axes that are an input. ONNX's reference implementation
        # wraps integers around and has NaN as the mean of no elements.
        *limits_of("ReduceSum ReduceProd ReduceL1 ReduceSumSquare", reads_integers, REDUCED_IN_F64),
        KernelLimit("Einsum", _sums_integers_alone, REDUCED_IN_F64),
        *limits_of("ReduceMax ReduceMin", reads_i64, "it takes the wrong one of two i64 whose upper 32 bits are equal"),
        KernelLimit("ReduceMean", _averages_nothing, _NO_MEAN),
        *_EMPTY,
        *POOL_LIMITS,
    )

    def variants(self, device: Device, options: CompileOptions) -> Sequence[Variant]:
        """Return fewer threads, threads that sleep, fewer rewrites of the graph, and fused attention."""
        threads = core_share().threads
        counts = sorted({1, max(threads // 2, 1)} - {threads})
        return (
            *variants_of("intra_op_threads", counts),
            *variants_of("spinning", [False, True]),
            *variants_of("optimization", ["extended"], ["Conv"]),  # without the blocked layout of convolutions
            *variants_of("fusion", [True], ["Softmax", "Attention"]),
            *variants_of("kernel_dispatch", ["force-common"]),
            *variants_of("session_config.session.set_denormal_as_zero", ["1"]),
        )

    # f16 nodes run through inserted f32 casts, bf16 ones mostly have no kernel; the registry has both facts.

    def default_profile(self, device: Device) -> CostProfile:
        """Return the profile of a common server core times the cores this process may use."""
        threads = core_share().threads
        return CostProfile.shipped(
            f"server cores x {threads}, ONNX Runtime 1.31.1, 2026-11",
            gflops=(_GFLOPS_PER_CORE * threads, _GFLOPS_PER_CORE * threads),
            bytes_per_ns=_BYTES_PER_NS,
            ns=(_NODE_NS[0] + _NODE_NS[1] * math.log2(threads), _RUN_NS),
        )
