"""Which GPU is behind a CUDA ordinal, asked of the driver's library without a CUDA context.

`nvidia-smi` counts all GPUs in the order of the bus; CUDA counts the visible ones, fastest first unless
CUDA_DEVICE_ORDER says otherwise. Only the PCI address tells which is which.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from dataclasses import dataclass

__all__ = ["LIBRARY", "CudaGpu", "cuda_gpus", "same_bus"]

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_BUS_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class CudaGpu:
    """A GPU as CUDA counts it: its PCI address and UUID."""

    bus_id: str
    uuid: str


@functools.cache
def cuda_gpus() -> tuple[CudaGpu, ...]:
    """Return the GPUs in the order of CUDA's ordinals, empty where the driver is missing or does not answer."""
    try:
        library = ctypes.CDLL(LIBRARY)
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


def _gpu(library: ctypes.CDLL, ordinal: int) -> CudaGpu:
    text = ctypes.create_string_buffer(_BUS_ID_BYTES)
    bus_id = "" if library.cuDeviceGetPCIBusId(text, _BUS_ID_BYTES, ordinal) else text.value.decode("ascii")
    raw = (ctypes.c_ubyte * 16)()
    if library.cuDeviceGetUuid(raw, ordinal):
        return CudaGpu(bus_id.lower(), "")
    digits = bytes(raw).hex()
    cuts = (0, 8, 12, 16, 20, 32)
    uuid = "-".join(digits[start:end] for start, end in itertools.pairwise(cuts))
    return CudaGpu(bus_id.lower(), f"GPU-{uuid}")


def _address(text: str) -> tuple[int, ...]:
    pieces = text.lower().replace(".", ":").split(":")
    try:
        numbers = tuple(int(piece, 16) for piece in pieces)
    except ValueError:
        return ()
    return numbers if len(numbers) == 4 else (0, *numbers) if len(numbers) == 3 else ()
