"""`MeasuredCostModel`: a cost model whose every figure was measured on the device it speaks for."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.calibration.tables import Curve, Grid
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
from rlx_ort.selection.workload import Work

__all__ = ["MeasuredCostModel"]

_REQUIRED = ("roundtrip", "dispatch", "gemm", "op:Add")
_BYTES = {"f16": 2, "bf16": 2, "f64": 8}


class MeasuredCostModel:
    """Prices work by interpolation in a calibration profile. Safe to use from several threads.

    Attributes:
        device: the device it speaks for.
        profile: what was measured.

    Raises:
        CalibrationError: the profile lacks a row without which nothing can be predicted.
    """

    def __init__(self, device: Device, profile: CalibrationProfile, threads: int = 1) -> None:
        self.device = device
        self.profile = profile
        self._threads = threads
        self._rows: dict[tuple[str, str], dict[tuple[int, ...], float]] = {}
        for row in profile.rows:
            self._rows.setdefault((row.probe, row.dtype), {})[row.size] = row.ns
        missing = [probe for probe in _REQUIRED if (probe, "f32") not in self._rows]
        if missing:
            raise CalibrationError(f"the profile of {device.display} has no row of {', '.join(missing)}")
        self._dispatch = self._single("dispatch")
        self._tensor_in = self._single("tensor_in")
        self._tensor_out = self._single("tensor_out")
        self._known: dict[Work, float] = {}
        self._curves: dict[str, Curve] = {}
        self._grids: dict[tuple[str, str], Grid] = {}
        self._formulas: dict[str, Callable[[Work], float]] = {
            "gemm": self._gemm,
            "bmm": self._bmm,
            "conv": lambda work: self._pixels("conv3x3", work),
            "pointwise": lambda work: self._pixels("conv1x1", work),
            "depthwise": lambda work: self._pixels("depthwise", work),
            "attention": self._attention,
            "rnn": self._recurrent,
            "fused": self._fused,
            "view": self._view,
        }

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return self.profile.source

    @property
    def error(self) -> float:
        """The error to expect of a prediction, as a share: more after a quick or noisy measurement."""
        noisy = len(self.profile.noisy_rows) / len(self.profile.rows)
        return 0.35 + 0.15 * self.profile.quick + 0.2 * noisy

    def work_ns(self, work: Work) -> float:
        """Return the time of one piece of work with its launch, in ns; asked twice, it looks it up."""
        known = self._known.get(work)
        if known is None:
            known = self._formulas.get(work.kind, self._operator)(work) * work.times
            self._known[work] = known
        return known

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return the measured rate of an f32 product of (m, k) and (k, n), in GFLOP/s."""
        return 2.0 * m * k * n / self._grid("gemm", "f32")(m, k, n)

    def conv_gflops(self) -> float:
        """Return the best rate of a 3 x 3 convolution that was measured, in GFLOP/s; products' when none was."""
        rows = self._rows.get(("conv3x3", "f32"), {})
        rates = [18.0 * pixels * channels**2 / ns for (pixels, channels), ns in rows.items() if ns > 0]
        return max(rates, default=self.sgemm_gflops(512, 512, 512))

    def memory_bw(self) -> float:
        """Return the bytes an addition of the largest tensors reads and writes, in bytes per ns."""
        elements = max(self._rows["op:Add", "f32"])[0]
        return 12.0 * elements / self._curve("op:Add")(elements)

    def dispatch_overhead_ns(self) -> float:
        """Return the measured time of one more tiny node, in ns."""
        return self._dispatch

    def roundtrip_overhead_ns(self) -> float:
        """Return the time of a run without nodes, inputs and outputs, in ns."""
        return max(self._single("roundtrip") - self._dispatch - self._tensor_in - self._tensor_out, 0.0)

    def upload_ns(self, nbytes: int) -> float:
        """Return the time to bring one value to the device, in ns."""
        return self._tensor_in + self._beyond_small("upload", nbytes)

    def readback_ns(self, nbytes: int) -> float:
        """Return the time to bring one value to the host, in ns."""
        return self._tensor_out + self._beyond_small("readback", nbytes)

    def num_threads(self) -> int:
        """Return the threads the device computes with."""
        return self._threads

    def _single(self, probe: str) -> float:
        return self._rows.get((probe, "f32"), {}).get((), 0.0)

    def _beyond_small(self, probe: str, nbytes: int) -> float:
        if (probe, "f32") not in self._rows or nbytes <= 0:
            return 0.0
        return self._curve(probe)(nbytes)

    def _curve(self, probe: str) -> Curve:
        curve = self._curves.get(probe)
        if curve is None:
            curve = Curve((float(size[0]), ns) for size, ns in self._rows[probe, "f32"].items())
            self._curves[probe] = curve
        return curve

    def _grid(self, probe: str, dtype: str) -> Grid:
        grid = self._grids.get((probe, dtype))
        if grid is None:
            rows = self._rows[probe, dtype]
            if probe == "gemm":  # a chain goes from k to n and back, so a row is the mean of both products
                rows = {(m, n, k): ns for (m, k, n), ns in rows.items()} | rows
            grid = self._grids[probe, dtype] = Grid(rows)
        return grid

    def _gemm(self, work: Work) -> float:
        m, k, n = work.size
        ns = self._grid("gemm", "f32")(m, k, n)
        return max(ns * self._dtype_factor(work.dtype, m, math.sqrt(k * n)), self._least)

    def _dtype_factor(self, dtype: str, m: float, side: float) -> float:
        """Return how a type's products compare with f32 ones of about the same shape."""
        if dtype == "bf16" and ("gemm", "bf16") not in self._rows:
            dtype = "f16"
        if dtype == "f32" or ("gemm", dtype) not in self._rows:
            return _BYTES.get(dtype, 4) / 4
        f32 = self._grid("gemm", "f32")
        measured = self._grid("gemm", dtype)
        return measured(m, side, side) / f32(m, side, side)

    def _bmm(self, work: Work) -> float:
        rows = self._rows.get(("bmm", "f32"))
        if not rows:
            batch, m, k, n = work.size
            return self._gemm(Work("gemm", "MatMul", (batch * m, k, n), dtype=work.dtype))
        curve = self._curves.get("bmm flops")
        if curve is None:
            curve = self._curves["bmm flops"] = Curve((2.0 * b * s * s * d, ns) for (b, s, d), ns in rows.items())
        batch, m, k, n = work.size
        ns = curve(work.flops)
        if work.flops > max(2.0 * b * s * s * d for b, s, d in rows):
            # Beyond what was measured, one large product tells more than a small batch that is stretched.
            ns = min(ns, 2 * self._grid("gemm", "f32")(batch * m, k, n))
        factor = self._dtype_factor(work.dtype, m, math.sqrt(k * n))
        return max(ns * factor, self._moving(work), self._least)

    def _pixels(self, probe: str, work: Work) -> float:
        if (probe, "f32") not in self._rows:
            probe = "conv3x3"
        if (probe, "f32") not in self._rows:
            pixels, channels = work.size
            return self._gemm(Work("gemm", "MatMul", (pixels, channels, channels), dtype=work.dtype)) * 1.5
        grid = self._grid(probe, "f32")
        return max(grid(*work.size) * self._dtype_factor(work.dtype, 512, 512), self._least)

    def _attention(self, work: Work) -> float:
        rows = self._rows.get(("attention", "f32"))
        heads, queries, keys, depth = work.size
        if not rows:
            first = Work("bmm", "MatMul", (heads, queries, depth, keys), work.flops / 2, work.nbytes, work.dtype)
            scores = Work("op", "Softmax", (heads * queries * keys,), 0.0, 0.0, work.dtype)
            return 2 * self._bmm(first) + self._operator(scores)
        curve = self._curves.get("attention flops")
        if curve is None:
            curve = self._curves["attention flops"] = Curve((4.0 * b * s * s * d, ns) for (b, s, d), ns in rows.items())
        return max(curve(work.flops) * self._dtype_factor(work.dtype, 512, 512), self._moving(work), self._least)

    def _recurrent(self, work: Work) -> float:
        steps, batch, width, hidden, directions = work.size
        if ("lstm", "f32") not in self._rows:
            step = Work("gemm", "MatMul", (batch, width + hidden, 4 * hidden), dtype=work.dtype)
            return steps * directions * (self._gemm(step) + 4 * self._dispatch)
        side = math.sqrt(hidden * (width + hidden) / 2)
        return max(self._grid("lstm", "f32")(steps, batch, side) * directions, self._least)

    def _fused(self, work: Work) -> float:
        """Return what a fused node adds to the one before it: at most what it would take by itself."""
        like = _UNFUSED.get(work.like)
        if like is None:
            return 0.0
        alone = self._operator(Work("op", like, work.size))
        if (f"fused:{work.like}", "f32") not in self._rows:
            return 0.0 if work.like == "bias" else alone / 2
        return min(self._curve(f"fused:{work.like}")(work.size[0]), alone)

    def _view(self, work: Work) -> float:
        if ("op:Reshape", "f32") not in self._rows:
            return 0.5 * self._dispatch
        return min(self._curve("op:Reshape")(1024), self._dispatch)

    def _operator(self, work: Work) -> float:
        for like in (work.like, _COARSER.get(work.like, "Add"), "Add"):
            if (f"op:{like}", "f32") in self._rows:
                return max(self._curve(f"op:{like}")(work.size[0]), self._least)
        raise CalibrationError("the profile has no operator to compare with")

    def _moving(self, work: Work) -> float:
        """Return the time an addition of as many bytes takes."""
        return self._curve("op:Add")(work.nbytes / 12)

    @property
    def _least(self) -> float:
        return self._dispatch * 0.8


_UNFUSED = {"bias": "AddRow", "gemm_act": "Relu", "conv_act": "Relu", "conv_add": "Add"}
_COARSER = {
    "AddRow": "Add",
    "Erf": "Tanh",
    "Exp": "Tanh",
    "Sigmoid": "Tanh",
    "Sin": "Tanh",
    "Pow": "Tanh",
    "Gelu": "Tanh",
    "Concat": "Gather",
    "Transpose": "Gather",
    "ReduceMean": "LayerNormalization",
}
