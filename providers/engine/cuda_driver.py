"""CUDA's driver library: which GPU is behind an ordinal, pinned memory, and recorded launches as CUDA graphs.

`nvidia-smi` counts all GPUs in the order of the bus; CUDA counts the visible ones, fastest first unless
CUDA_DEVICE_ORDER is set. Only the PCI address identifies a GPU in both.

Everything that ONNX Runtime launches on the stream during a capture becomes one graph, with the copies around it.
ONNX Runtime may have reused its host memory by the time of a replay. Its pinned memory holds what the host computed
before the run's end, such as the lengths of cuDNN's sequences, and cannot depend on the device, for which a capture
never waits: the graph copies from our copy of it. A graph is refused if it copies from other host memory or to it, or
calls a host function, whose arguments are gone by then.
https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.providers.engine.replays import Copy, LaterError, NotRecordedError, Recorder
from rlx_ort.providers.hardware import nvml
from rlx_ort.providers.workers import Workers

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_BUS_ID_BYTES = 32
_ORDERED, _NON_BLOCKING = 0, 1  # whether the default stream waits for a stream, and the stream for it
_RELAXED = 2  # ONNX Runtime may allocate during a capture
_KERNEL, _MEMCPY, _MEMSET, _EMPTY, _ALLOCATE, _FREE = 0, 1, 2, 5, 10, 11
_NODE_NAMES = {3: "a host function", 4: "a child graph", 6: "an event wait", 7: "an event"}
_ALLOCATE_WORDS, _ALLOCATE_SIZE, _ALLOCATE_ADDRESS = 32, 13, 14  # CUDA_MEM_ALLOC_NODE_PARAMS in words of 8 bytes
_HOST, _DEVICE, _UNIFIED = 1, 2, 4
_POINTER_MEMORY_TYPE = 2
_LONGEST_CAPTURE_S = 1.0
# cuDNN compiles some kernels for a plan, such as `conv2d_c1_k1_nchw_hw_packed` of depthwise convolutions, and unloads
# them with it: replays after that ended in CUDA errors 700 and 715 (H200). Their sources, in its library
# `engines_runtime_compiled` (9.28), give them names of C. Kernels of libraries, which stay, have names of C++, or those
# of NVIDIA's generators, such as `sm80_xmma_fprop_implicit_gemm_..._execute_kernel__5x_cudnn`.
_STAYS = re.compile(r"_Z|nvjet_|(maxwell|volta|turing|ampere)_|sm\d+_xmma_.*__5x_(cudnn|cublas)$")
MOST_LENT_BYTES = 512 << 20  # of pinned memory for the outputs of recorded runs, for each GPU

_P, _N, _U = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_ARGUMENTS: dict[str, list[Any]] = {
    "cuInit": [_U],
    "cuDevicePrimaryCtxRetain": [_P, ctypes.c_int],
    "cuCtxSetCurrent": [_P],
    "cuCtxPushCurrent_v2": [_P],
    "cuCtxPopCurrent_v2": [_P],
    "cuCtxSynchronize": [],
    "cuStreamCreate": [_P, _U],
    "cuStreamDestroy_v2": [_P],
    "cuStreamSynchronize": [_P],
    "cuStreamBeginCapture_v2": [_P, _U],
    "cuStreamEndCapture": [_P, _P],
    "cuGraphInstantiateWithFlags": [_P, _P, ctypes.c_ulonglong],
    "cuGraphGetNodes": [_P, _P, _P],
    "cuGraphNodeGetType": [_P, _P],
    "cuGraphMemcpyNodeGetParams": [_P, _P],
    "cuGraphMemcpyNodeSetParams": [_P, _P],
    "cuGraphMemAllocNodeGetParams": [_P, _P],
    "cuGraphMemFreeNodeGetParams": [_P, _P],
    "cuGraphLaunch": [_P, _P],
    "cuGraphExecDestroy": [_P],
    "cuGraphDestroy": [_P],
    "cuMemcpyHtoDAsync_v2": [_P, _P, _N, _P],
    "cuMemcpyDtoHAsync_v2": [_P, _P, _N, _P],
    "cuMemcpyAsync": [_P, _P, _N, _P],
    "cuMemHostAlloc": [_P, _N, _U],
    "cuMemFreeHost": [_P],
    "cuMemGetInfo_v2": [_P, _P],
    "cuPointerGetAttribute": [_P, ctypes.c_int, _P],
}


_NAMING = ("cuGraphKernelNodeGetParams_v2", "cuFuncGetName", "cuKernelGetName")  # CUDA 12.3 has them all


class _Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = [
        *((name, _N) for name in ("src_x", "src_y", "src_z", "src_lod")),
        ("src_type", ctypes.c_int),
        *((name, _P) for name in ("src_host", "src_device", "src_array", "reserved_0")),
        *((name, _N) for name in ("src_pitch", "src_height", "dst_x", "dst_y", "dst_z", "dst_lod")),
        ("dst_type", ctypes.c_int),
        *((name, _P) for name in ("dst_host", "dst_device", "dst_array", "reserved_1")),
        *((name, _N) for name in ("dst_pitch", "dst_height", "width", "height", "depth")),
    ]


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = [
        ("function", _P),
        ("sizes", _U * 7),
        *((name, _P) for name in ("arguments", "extra", "kernel", "context")),
    ]


@dataclass(frozen=True, slots=True)
class CudaGpu:
    """A GPU as CUDA counts it: its PCI address and UUID."""

    bus_id: str
    uuid: str


@functools.cache
def cuda_gpus() -> tuple[CudaGpu, ...]:
    """Return the GPUs in the order of CUDA's ordinals, empty where the driver is missing or does not answer."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return ()
    count = ctypes.c_int()
    try:
        if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
            return ()
        return tuple(_gpu(library, ordinal) for ordinal in range(count.value))
    except AttributeError:  # a driver without these functions
        return ()


def same_bus(one: str, other: str) -> bool:
    """Return whether two PCI addresses are one; tools write the domain with four or eight digits."""
    return _address(one) == _address(other) != ()


@functools.cache
def _driver() -> ctypes.CDLL:
    """Return the driver's library, with the argument types of its functions."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, types in _ARGUMENTS.items():
            getattr(library, name).argtypes = types
        for name in _NAMING:
            if hasattr(library, name):
                getattr(library, name).argtypes = [_P, _P]
    except (OSError, AttributeError) as err:
        raise NotRecordedError(f"the CUDA driver's library {_LIBRARY} cannot be used: {err}") from err
    return library


@functools.cache
def _context(index: int) -> int:
    """Return the primary context of a GPU, which ONNX Runtime uses as well; it is kept until the process ends."""
    context = _P()
    _call("cuInit", 0)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
    return int(context.value or 0)


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise NotRecordedError(f"{name} failed with CUDA error {code}")


@contextlib.contextmanager
def _entered(context: int) -> Iterator[None]:
    """Make a context the thread's current one; the one before is put back, since this may happen between other calls.

    A finalizer, for example, runs in any thread at any time.
    """
    entered = not _driver().cuCtxPushCurrent_v2(context)  # calls fail themselves where it is not
    try:
        yield
    finally:
        if entered:
            _driver().cuCtxPopCurrent_v2(ctypes.byref(_P()))


def free_bytes(index: int) -> int:
    """Return the free memory of a GPU in bytes, or raise `NotRecordedError`."""
    free, total = _N(), _N()
    with _entered(_context(index)):
        _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def process_bytes(index: int) -> tuple[int, str] | None:
    """Return this process's use of a GPU's memory in bytes, and the source of the number; None without NVML.

    NVML lists it by process where it can: Windows drivers do not, and in a container the process ids differ. Then it is
    the use of all processes, less that at the first call, which is to come before this process uses the GPU.
    """
    try:
        library, handle, count = nvml(), _P(), _U(_MOST_PROCESSES)
        listed, whole = (_ProcessInfo * _MOST_PROCESSES)(), (ctypes.c_ulonglong * 3)()  # total, free, used
        bus_id = cuda_gpus()[index].bus_id.encode()
        if library.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle)):
            return None
        if library.nvmlDeviceGetMemoryInfo(handle, whole):
            return None
        before = _used_before.setdefault(index, whole[2])
        if not library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), listed):
            for each in listed[: count.value]:
                if each.pid == os.getpid() and each.used != _UNKNOWN_BYTES:
                    return int(each.used), "NVML, by process"
    except (OSError, AttributeError, IndexError):  # no library, an old one, or no such GPU
        return None
    return max(0, whole[2] - before), "NVML, use of the GPU since this process first used it"


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = [("pid", _U), ("used", ctypes.c_ulonglong), ("gpu_instance", _U), ("compute_instance", _U)]


_MOST_PROCESSES, _UNKNOWN_BYTES = 256, 2**64 - 1
_used_before: dict[int, int] = {}


class _Apart:
    """Keeps recordings apart from calls of ONNX Runtime that wait for a whole GPU.

    Opening a session does (1.31.1), and closing one. While launches are recorded, such a wait is an error, or ends the
    recording, or the process: one in 70 seconds of threads that did nothing else (H200).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._recording = False
        self._others = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hold the others off; raises `LaterError` while there is one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._recording)
            if self._others:
                raise LaterError("a session of CUDA is being opened or closed")
            self._recording = True
        try:
            yield
        finally:
            with self._changed:
                self._recording = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def other(self) -> Iterator[None]:
        """Hold recordings off, after one that is in progress.

        That may be one of this thread, where garbage is collected in the middle of it: it is lost after a second.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._recording, _LONGEST_CAPTURE_S)
            self._others += 1
        try:
            yield
        finally:
            with self._changed:
                self._others -= 1


apart = _Apart()


def wait_for(index: int) -> None:
    """Wait for all that this process has launched on a GPU, if there is a driver; `apart.other` is held."""
    with contextlib.suppress(NotRecordedError), _entered(_context(index)):
        _driver().cuCtxSynchronize()


def pinned_like(index: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array like another one in pinned host memory, which is freed with its last view."""
    return _pinned(_context(index), like)


def _pinned(context: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    at = _allocated(context, like.nbytes)
    return _array_at(at, like, _free_host, context, at)


def _allocated(context: int, nbytes: int) -> int:
    at = _P()
    with _entered(context):
        _call("cuMemHostAlloc", ctypes.byref(at), max(1, nbytes), 0)
    return int(at.value or 0)


def _array_at(at: int, like: npt.NDArray[Any], end: Callable[..., object], *arguments: Any) -> npt.NDArray[Any]:
    """Return an array like another one at an address; `end` is called when nothing refers to its memory any more."""
    raw = (ctypes.c_ubyte * max(1, like.nbytes)).from_address(at)
    weakref.finalize(raw, end, *arguments).atexit = False
    return np.frombuffer(memoryview(raw), like.dtype, like.size).reshape(like.shape)


class _Lender:
    """Pinned memory of one GPU for outputs that callers keep: memory of arrays that are gone is lent again, by size."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._idle: dict[int, list[int]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def lend(self, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array; of ordinary memory where `MOST_LENT_BYTES` are lent, or the system pins no more."""
        idle = self._idle.setdefault(like.nbytes, [])
        try:
            at = idle.pop()
        except IndexError:
            with self._lock:
                if self._nbytes + like.nbytes > MOST_LENT_BYTES:
                    self._free_idle()
                if self._nbytes + like.nbytes > MOST_LENT_BYTES:
                    return np.empty(like.shape, like.dtype)
                try:
                    at = _allocated(self._context, like.nbytes)
                except NotRecordedError:
                    return np.empty(like.shape, like.dtype)
                self._nbytes += like.nbytes
        return _array_at(at, like, idle.append, at)

    def free_idle(self) -> None:
        """Free memory that is not lent, unless a call that lends or frees is in progress.

        That may be one of this thread: garbage is collected in the middle of it, and with it a session that ends here.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._free_idle()
            finally:
                self._lock.release()

    def _free_idle(self) -> None:
        for nbytes, idle in list(self._idle.items()):
            with contextlib.suppress(IndexError):  # another thread may take the last one
                while True:
                    _free_host(self._context, idle.pop())
                    self._nbytes -= nbytes


_lender = functools.cache(_Lender)


def open_recorder(index: int, obstacle: str = "", *, ordered: bool = False) -> Recorder:
    """Return a recorder on a GPU; `obstacle` is why the caller's options or ONNX Runtime's build forbid one.

    With `ordered`, copies on the default stream wait for the launches, and nothing is to be recorded.
    """
    if obstacle:
        raise NotRecordedError(obstacle)
    return _CudaRecorder(index, _ORDERED if ordered else _NON_BLOCKING)


class _CudaRecorder:
    """Records the launches of one session on a stream of its own; see `Recorder` for the methods."""

    def __init__(self, index: int, flags: int) -> None:
        self._context = _context(index)
        stream = _P()
        with _entered(self._context):
            _call("cuStreamCreate", ctypes.byref(stream), flags)
        self.enter: Callable[[], object] = functools.partial(_driver().cuCtxSetCurrent, _P(self._context))
        self.worker = Workers(1, "rlx_ort-record")
        self._stream = int(stream.value or 0)
        self._kept: dict[int, list[npt.NDArray[Any]]] = {}  # copied to the device by recordings
        self._lasting: set[int] = set()  # recordings
        self.lend = _lender(self._context).lend
        self.options: Mapping[str, str] = {"has_user_compute_stream": "1", "user_compute_stream": str(self._stream)}

    def host_buffer(self, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return _pinned(self._context, like)

    def reads(self, array: npt.NDArray[Any]) -> bool:
        return _memory_type(array.ctypes.data) == _HOST

    def record(self, copies_in: Sequence[Copy], run: Callable[[], None], copies_out: Sequence[Copy]) -> int:
        """Return an executable graph of the copies and the run, if it holds nothing that must not be replayed."""
        stream, graph = self._stream, _P()
        _call("cuStreamSynchronize", stream)
        recorded = False
        with apart.recording():
            _call("cuStreamBeginCapture_v2", stream, _RELAXED)
            try:
                for device, host, size in copies_in:
                    _call("cuMemcpyHtoDAsync_v2", device, host, size, stream)
                run()
                for device, host, size in copies_out:
                    _call("cuMemcpyDtoHAsync_v2", host, device, size, stream)
                recorded = True
            finally:
                code = _driver().cuStreamEndCapture(stream, ctypes.byref(graph))
                if graph.value and (code or not recorded):
                    _driver().cuGraphDestroy(graph)
        if code:
            raise NotRecordedError(f"the run was not recorded to its end: CUDA error {code}")
        try:
            own = frozenset(host for _, host, _ in (*copies_in, *copies_out))
            nodes = _nodes(graph)
            kept = _check_nodes(nodes, own, self.host_buffer)
            lasts = all(stays_loaded(_kernel_name(node)) for node, kind in nodes if kind == _KERNEL)
            made = _P()
            _call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, 0)
        finally:
            _driver().cuGraphDestroy(graph)
        recording = int(made.value or 0)
        self._kept[recording] = kept
        if lasts:
            self._lasting.add(recording)
        return recording

    def lasts(self, recording: int) -> bool:
        return recording in self._lasting

    def player(self, recording: int) -> Callable[..., None]:
        driver, stream, graph = _driver(), _P(self._stream), _P(recording)
        launch, wait, copy = driver.cuGraphLaunch, driver.cuStreamSynchronize, driver.cuMemcpyAsync

        def play(before: Sequence[Copy] = (), after: Sequence[Copy] = ()) -> None:
            code = 0
            for to, source, size in before:
                code = code or copy(to, source, size, stream)
            code = code or launch(graph, stream)
            for to, source, size in after:
                code = code or copy(to, source, size, stream)
            code = code or wait(stream)
            if code:
                raise RuntimeError(f"the replay of a CUDA graph failed with CUDA error {code}")

        return play

    def move(self, copies: Sequence[Copy]) -> None:
        driver, code = _driver(), 0
        for to, source, size in copies:
            code = code or driver.cuMemcpyAsync(to, source, size, self._stream)
        code = code or driver.cuStreamSynchronize(self._stream)
        if code:
            raise RuntimeError(f"a copy on the GPU failed with CUDA error {code}")

    def drop(self, recording: int) -> None:
        with _entered(self._context):
            _driver().cuGraphExecDestroy(recording)
        self._kept.pop(recording, None)
        self._lasting.discard(recording)

    def wait(self) -> None:
        if self._stream:
            with _entered(self._context):
                _driver().cuStreamSynchronize(self._stream)

    def close(self) -> None:
        stream, self._stream = self._stream, 0
        self.worker.close()
        _lender(self._context).free_idle()
        if stream:
            with _entered(self._context):
                _driver().cuStreamDestroy_v2(stream)


def stays_loaded(kernel: str) -> bool:
    """Return whether a kernel of this name is surely a library's, and none that goes with a plan of cuDNN."""
    return _STAYS.match(kernel) is not None


def _kernel_name(node: Any) -> str:
    """Return the name of the kernel that a node of a graph launches; empty with drivers that have no such function."""
    params, name = _KernelNode(), ctypes.c_char_p()
    try:
        _call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        if params.function:
            _call("cuFuncGetName", ctypes.byref(name), params.function)
        else:
            _call("cuKernelGetName", ctypes.byref(name), params.kernel)
    except (AttributeError, NotRecordedError):
        return ""
    return (name.value or b"").decode("ascii", "replace")


def _nodes(graph: Any) -> list[tuple[Any, int]]:
    """Return the nodes of a graph and their types."""
    count = _N()
    _call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (_P * count.value)()
    _call("cuGraphGetNodes", graph, ctypes.byref(nodes), ctypes.byref(count))
    kinds: list[tuple[Any, int]] = []
    for node in nodes:
        kind = ctypes.c_int()
        _call("cuGraphNodeGetType", node, ctypes.byref(kind))
        kinds.append((node, kind.value))
    return kinds


def _check_nodes(
    nodes: Sequence[tuple[Any, int]], own: frozenset[int], host_buffer: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
) -> list[npt.NDArray[Any]]:
    """Refuse a graph that uses host memory outside of `own` that is not pinned, calls the host, or leaks allocations.

    Returns:
        What the graph copies from now on in place of pinned memory outside of `own`.
    """
    kept = []
    allocated: dict[int, int] = {}
    freed = set()
    for node, kind in nodes:
        if kind == _MEMCPY:
            copy = _Memcpy3D()
            _call("cuGraphMemcpyNodeGetParams", node, ctypes.byref(copy))
            source = copy.src_host if copy.src_type == _HOST else copy.src_device
            target = copy.dst_host if copy.dst_type == _HOST else copy.dst_device
            if target not in own and _on_host(copy.dst_type, target):
                raise NotRecordedError("a node copies to host memory during the run")
            if source not in own and _on_host(copy.src_type, source):
                if not _is_plain(copy) or _memory_type(source) != _HOST:
                    raise NotRecordedError("a node copies from host memory during the run")
                held = (ctypes.c_ubyte * copy.width).from_address(source)
                kept.append(host_buffer(np.frombuffer(held, np.uint8)))
                kept[-1][...] = held
                copy.src_type, copy.src_host, copy.src_device = _HOST, kept[-1].ctypes.data, None
                _call("cuGraphMemcpyNodeSetParams", node, ctypes.byref(copy))
        elif kind == _ALLOCATE:
            words = (ctypes.c_ulonglong * _ALLOCATE_WORDS)()
            _call("cuGraphMemAllocNodeGetParams", node, ctypes.byref(words))
            allocated[words[_ALLOCATE_ADDRESS]] = words[_ALLOCATE_SIZE]
        elif kind == _FREE:
            address = ctypes.c_ulonglong()
            _call("cuGraphMemFreeNodeGetParams", node, ctypes.byref(address))
            freed.add(address.value)
        elif kind not in (_KERNEL, _MEMSET, _EMPTY):
            raise NotRecordedError(f"the run launches {_NODE_NAMES.get(kind, f'a node of type {kind}')}")
    # cuBLAS allocates and frees its workspace within a graph.
    if allocated.keys() != freed:
        sizes = ", ".join(f"{size >> 10} KB" for at, size in allocated.items() if at not in freed) or "nothing"
        raise NotRecordedError(
            f"the run allocates {len(allocated)} times and frees {len(freed)} times within the graph; it keeps {sizes}"
        )
    return kept


def _is_plain(copy: _Memcpy3D) -> bool:
    """Return whether a copy is one of so many bytes in a row."""
    return copy.height <= 1 and copy.depth <= 1 and not (copy.src_x or copy.src_y or copy.src_z)


def _free_host(context: int, address: int) -> None:
    """Free pinned memory, in whatever thread the last view of it went."""
    with _entered(context):
        _driver().cuMemFreeHost(address)


def _on_host(type_: int, address: int | None) -> bool:
    return type_ == _HOST if type_ != _UNIFIED else _memory_type(address) != _DEVICE


def _memory_type(address: int | None) -> int:
    """Return of which type memory is, 0 for memory that the driver does not know: the host's, and not pinned."""
    kind = _U()
    code = _driver().cuPointerGetAttribute(ctypes.byref(kind), _POINTER_MEMORY_TYPE, address)
    return 0 if code else kind.value


def _gpu(library: ctypes.CDLL, ordinal: int) -> CudaGpu:
    text = ctypes.create_string_buffer(_BUS_ID_BYTES)
    bus_id = "" if library.cuDeviceGetPCIBusId(text, _BUS_ID_BYTES, ordinal) else text.value.decode("ascii")
    raw = (ctypes.c_ubyte * 16)()
    if library.cuDeviceGetUuid(raw, ordinal):
        return CudaGpu(bus_id.lower(), "")
    return CudaGpu(bus_id.lower(), f"GPU-{uuid.UUID(bytes=bytes(raw))}")


def _address(text: str) -> tuple[int, ...]:
    pieces = text.lower().replace(".", ":").split(":")
    try:
        numbers = tuple(int(piece, 16) for piece in pieces)
    except ValueError:
        return ()
    return numbers if len(numbers) == 4 else (0, *numbers) if len(numbers) == 3 else ()
