"""CPU: ONNX Runtime's own kernels; always there, and the reference the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.providers.base import (
    PRIVATE_MEMORY,
    Availability,
    CostProfile,
    KernelLimit,
    MemoryReading,
    is_float_remainder,
)
from rlx_ort.providers.engine.recipe import Keeps
from rlx_ort.providers.engine.runtime import Problem
from rlx_ort.providers.hardware import core_share, cpu_name, memory_bytes, private_bytes
from rlx_ort.providers.ort_provider import OrtProvider

# Per core of an AVX2 server at about 3 GHz: half of 2 FMA units x 8 lanes x 2 FLOP x 3 GHz, which MLAS reaches.
_GEMM_GFLOPS_PER_CORE = 50.0
_BYTES_PER_NS = (10.0, 1e9)  # inputs and outputs are handed over, not copied
_NS = (1_200.0, 4_000.0)  # one node of a chain; a graph of one node from numpy to numpy


class CpuProvider(OrtProvider):
    """The CPU; index 0 only."""

    name: ClassVar[str] = "cpu"
    kinds: ClassVar[tuple[str, ...]] = ("cpu",)
    ep_name: ClassVar[str] = "CPUExecutionProvider"
    genai_name: ClassVar[str] = "cpu"
    title: ClassVar[str] = "CPU"
    extra: ClassVar[str] = "cpu"
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

    limits: ClassVar[Sequence[KernelLimit]] = (
        KernelLimit("Mod", is_float_remainder, "its kernel computes floats with fmod=1 only before opset 28"),
    )
    # f16 nodes run through inserted f32 casts, bf16 ones mostly have no kernel; the registry has both facts.

    def default_profile(self, device: Device) -> CostProfile:
        """Return the profile of a common server core times the cores this process may use."""
        threads = core_share().threads
        return CostProfile.shipped(
            f"AVX2 server cores x {threads}, ONNX Runtime 1.31.1, 2026-10",
            gflops=(_GEMM_GFLOPS_PER_CORE * threads, 0.7 * _GEMM_GFLOPS_PER_CORE * threads),
            bytes_per_ns=_BYTES_PER_NS,
            ns=_NS,
        )
