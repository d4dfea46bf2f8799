"""Cost models: what a device needs for its part of a run. One unit set everywhere: ns, GFLOP/s, bytes per ns.

A prediction is the round trip of an empty run, plus moving the graph's inputs and outputs, plus what each node that is
exported takes. Nodes that the CPU takes for a device are priced on the CPU, and each value that crosses between the two
as a copy. `rlx_ort.selection.estimate` adds it up for every model here and for measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from rlx_ort.calibration.features import DEFAULT_DIM, Kernel
from rlx_ort.calibration.model import Price
from rlx_ort.device import Device
from rlx_ort.providers.base import CostProfile

__all__ = [
    "DEFAULT_DIM",
    "BackendCostModel",
    "BasicCostModel",
    "ProfileCostModel",
    "completed",
]


class BasicCostModel(Protocol):
    """The rates of a device: all that a cost model of your own must have.

    `device` may also be a method. A `BackendCostModel` is made of it where one is needed; see `completed`.
    """

    @property
    def device(self) -> Device:
        """The device of the figures."""

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return the sustained rate of an f32 product of (m, k) and (k, n), in GFLOP/s."""

    def memory_bw(self) -> float:
        """Return the device's memory bandwidth, in bytes per ns."""

    def dispatch_overhead_ns(self) -> float:
        """Return the time to start one kernel, in ns."""

    def roundtrip_overhead_ns(self) -> float:
        """Return the time of a run that computes nothing, in ns."""

    def num_threads(self) -> int:
        """Return the threads the device computes with; 1 for accelerators. Predictions do not use it."""


class BackendCostModel(BasicCostModel, Protocol):
    """What a device needs for its part of a run. Implementations may be asked from several threads."""

    @property
    def source(self) -> str:
        """Where its figures come from; `default` are shipped and not measured here."""

    def error_of(self, ns_by_how: Mapping[str, float]) -> float:
        """Return the error to expect of a prediction, as a share of it, from how its parts were found."""

    def price(self, kernel: Kernel) -> Price:
        """Return the time of one node with its launch, in ns, and how it was found."""

    def upload_ns(self, nbytes: int) -> float:
        """Return the time to bring one value from the host to the device, in ns."""

    def readback_ns(self, nbytes: int) -> float:
        """Return the time to bring one value from the device to the host, in ns."""


@dataclass(frozen=True, slots=True)
class ProfileCostModel:
    """A cost model made of one `CostProfile`, measured or shipped; its rates do not depend on the shape.

    Attributes:
        device: the device of the figures.
        profile: the figures.
        threads: the threads the device computes with.
    """

    device: Device
    profile: CostProfile
    threads: int = 1

    @property
    def source(self) -> str:
        """The profile's source."""
        return self.profile.source

    def error_of(self, ns_by_how: Mapping[str, float]) -> float:
        """Return one: figures of another machine are right to a factor of two at best."""
        return 1.0

    def price(self, kernel: Kernel) -> Price:
        """Return the launch and the longer of computing and moving memory; nothing for a view."""
        if kernel.name == "View":
            return Price(0.0, "assumed")
        if kernel.name == "MatMul":
            rate = self.sgemm_gflops(*kernel.size)
        elif kernel.name == "BatchedMatMul":
            batch, m, k, n = kernel.size
            rate = self.sgemm_gflops(batch * m, k, n)
        elif kernel.name in ("Conv3x3", "Conv1x1", "DepthwiseConv"):
            rate = self.profile.conv_gflops
        else:
            rate = self.sgemm_gflops(512, 512, 512)
        once_ns = max(_over(kernel.flops, rate), _over(kernel.nbytes, self.memory_bw()))
        return Price((once_ns + self.dispatch_overhead_ns()) * kernel.times, "assumed")

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return the profile's rate, whatever the shape."""
        return self.profile.gemm_gflops

    def memory_bw(self) -> float:
        """Return the profile's memory bandwidth."""
        return self.profile.memory_bytes_per_ns

    def dispatch_overhead_ns(self) -> float:
        """Return the profile's time to start a kernel."""
        return self.profile.dispatch_ns

    def roundtrip_overhead_ns(self) -> float:
        """Return the profile's time of an empty run."""
        return self.profile.roundtrip_ns

    def upload_ns(self, nbytes: int) -> float:
        """Return latency plus bytes over bandwidth."""
        return self.profile.upload_latency_ns + _over(nbytes, self.profile.upload_bytes_per_ns)

    def readback_ns(self, nbytes: int) -> float:
        """Return latency plus bytes over bandwidth."""
        return self.profile.readback_latency_ns + _over(nbytes, self.profile.readback_bytes_per_ns)

    def num_threads(self) -> int:
        """Return the thread count."""
        return self.threads


def completed(model: BasicCostModel) -> BackendCostModel:
    """Return a model with everything that predictions ask for; the rates alone make a profile.

    What the rates leave out is assumed: convolutions run at the rate of a product of size 512, transfers are free.
    """
    if hasattr(model, "price"):
        return cast(BackendCostModel, model)
    return _GivenCostModel(model)


class _GivenCostModel(ProfileCostModel):
    """A `ProfileCostModel` with the rates of a user's model, which may depend on the shape."""

    _model: BasicCostModel

    def __init__(self, model: BasicCostModel) -> None:
        device = model.device() if callable(model.device) else model.device
        conv, nothing = model.sgemm_gflops(512, 512, 512), 0.0
        rates = (model.memory_bw(), model.dispatch_overhead_ns(), model.roundtrip_overhead_ns())
        profile = CostProfile(conv, conv, *rates, nothing, nothing, source=f"given: {type(model).__name__}")
        super().__init__(device, profile, model.num_threads())
        object.__setattr__(self, "_model", model)

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return the model's rate of the product."""
        return self._model.sgemm_gflops(m, k, n)


def _over(amount: float, rate: float) -> float:
    """Return amount / rate; a rate of 0 stands for no such cost, as copies have none on the CPU."""
    return amount / rate if rate else 0.0
