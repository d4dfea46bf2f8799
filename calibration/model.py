"""`MeasuredCostModel`: a cost model whose every figure was measured on the device it speaks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rlx_ort.calibration.corrections import LEAST_ERROR, class_of, error_of
from rlx_ort.calibration.lone import LoneProducts
from rlx_ort.calibration.operators import OperatorTable
from rlx_ort.calibration.products import ProductTable
from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.calibration.row_lengths import RowLengths
from rlx_ort.calibration.tables import Curve, Grid
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
from rlx_ort.selection.work import OF_GIVEN
from rlx_ort.selection.workload import Work

__all__ = ["MeasuredCostModel"]

_REQUIRED = ("roundtrip", "dispatch", "gemm", "op:Add")
_MOST_KNOWN = 1 << 16  # prices that are remembered, of 300 bytes or so: a process may see any number of shapes
_MANY_ROWS = 64
"""Rows from which on their time tells what more of them take: 16 go to one core or two."""

_PAGE = 1024  # elements of a page of memory
_BY_STRIDE = frozenset({"MaxOfGiven", "SumOfGiven"})  # slower where rows are a multiple of a page apart
_COMPUTED = {given: computed for computed, given in OF_GIVEN.items()}
_BYTES = {"f16": 2, "bf16": 2, "f64": 8}
_TELLING = 1 << 14
"""Elements from which on an operator's time tells what larger tensors take. On 16 cores 1,024 elements took 1.3 us to
multiply and 0.5 us to add, a quarter of a million 24 us each."""


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
        self._spreads: dict[str, dict[float, float]] = {}  # of rows of one size in f32
        for row in profile.rows:
            self._rows.setdefault((row.probe, row.dtype), {})[row.size] = row.ns
            if len(row.size) == 1 and row.dtype == "f32":
                self._spreads.setdefault(row.probe, {})[float(row.size[0])] = row.spread
        missing = [probe for probe in _REQUIRED if (probe, "f32") not in self._rows]
        if missing:
            raise CalibrationError(f"the profile of {device.display} has no row of {', '.join(missing)}")
        self._dispatch = self._single("dispatch")
        self._tensor_in = self._single("tensor_in")
        self._tensor_out = self._single("tensor_out")
        self._factor_of = dict(profile.corrections)
        self._moved = self._factor_of.get("transfer", 1.0)
        self._first: dict[str, LoneProducts] = {}
        self._products: dict[str, ProductTable] = {}
        self._known: dict[Work, float] = {}
        self._curves: dict[str, Curve] = {}
        self._grids: dict[str, Grid] = {}
        self._operators: dict[str, OperatorTable] = {}
        self._lengths: dict[tuple[str, bool], RowLengths] = {}
        self._formulas: dict[str, Callable[[Work], float]] = {
            "gemm": self._gemm,
            "bmm": self._bmm,
            "conv": lambda work: self._pixels("conv3x3", work),
            "pointwise": lambda work: self._pixels("conv1x1", work),
            "depthwise": self._depthwise,
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
        """The error to expect where nothing was compared, as a share: more after a quick or noisy measurement."""
        noisy = len(self.profile.noisy_rows) / len(self.profile.rows)
        return 0.35 + 0.15 * self.profile.quick + 0.2 * noisy

    def error_of(self, terms: Mapping[str, float]) -> float:
        """Return the error to expect of a sum of terms, by kind: what whole graphs showed of each class of work."""
        sums: dict[str, float] = {}
        for kind, ns in terms.items():
            name = class_of(kind)
            sums[name] = sums.get(name, 0.0) + ns
        known = {**self.profile.errors, "overhead": LEAST_ERROR} if self.profile.errors else {}
        return error_of(sums, known, self.error)

    def work_ns(self, work: Work) -> float:
        """Return the time of one piece of work with its launch, in ns; asked twice, it looks it up."""
        known = self._known.get(work)
        if known is None:
            factor = self._factor_of.get(class_of(work.like if work.kind == "op" else work.kind), 1.0)
            known = self._formulas.get(work.kind, self._operator)(work) * work.times * factor
            if work.first:
                m, k, n = work.size
                known = self._first_product(work.first)(m, k, n, known)
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[work] = known
        return known

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return the measured rate of an f32 product of (m, k) and (k, n), in GFLOP/s."""
        return 2.0 * m * k * n / self._product("f32")(m, k, n)

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
        return self._tensor_in * self._moved + self._beyond_small("upload", nbytes)

    def readback_ns(self, nbytes: int) -> float:
        """Return the time to bring one value to the host, in ns."""
        return self._tensor_out * self._moved + self._beyond_small("readback", nbytes)

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
            rows = self._rows[probe, "f32"].items()
            curve = Curve(((float(size[0]), ns) for size, ns in rows), self._spreads.get(probe, {}))
            self._curves[probe] = curve
        return curve

    def _grid(self, probe: str) -> Grid:
        grid = self._grids.get(probe)
        if grid is None:
            grid = self._grids[probe] = Grid(self._rows[probe, "f32"], _POWERS.get(probe, ()))
        return grid

    def _product(self, dtype: str) -> ProductTable:
        table = self._products.get(dtype)
        if table is None:
            cold = self._rows.get(("weights", "f32"), {}) if dtype == "f32" else {}
            rows = {(m, k, n): ns for (m, k, n), ns in self._rows["gemm", dtype].items()}
            table = self._products[dtype] = ProductTable(rows, {size: ns for (size,), ns in cold.items()})
        return table

    def _first_product(self, reads: str) -> LoneProducts:
        """Return what the first product of a run takes, which reads an input or what another node has written."""
        table = self._first.get(reads)
        if table is None:
            rows = self._rows.get(("alone" if reads == "input" else "after", "f32"), {})
            chained = {size: self._product("f32")(*size) for size in rows}
            if reads == "node":  # waiting for other cores saves no time
                table = LoneProducts(rows, chained, launched=False, shares=(1.0, math.inf))
            elif self.device.kind == Device.CPU.kind:  # without a launch to wait for, it saves time or nothing
                table = LoneProducts(rows, chained, launched=False, shares=(0.0, 1.0))
            else:
                table = LoneProducts(rows, chained)
            self._first[reads] = table
        return table

    def _gemm(self, work: Work) -> float:
        m, k, n = work.size
        ns = self._product("f32")(m, k, n, work.resident)
        return max(ns * self._dtype_factor(work.dtype, m, math.sqrt(k * n)), self._least)

    def _dtype_factor(self, dtype: str, m: float, side: float) -> float:
        """Return how a type's products compare with f32 ones of about the same shape."""
        if dtype == "bf16" and ("gemm", "bf16") not in self._rows:
            dtype = "f16"
        if dtype == "f32" or ("gemm", dtype) not in self._rows:
            return _BYTES.get(dtype, 4) / 4
        return self._product(dtype)(m, side, side) / self._product("f32")(m, side, side)

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
            ns = min(ns, 2 * self._product("f32")(batch * m, k, n))
        factor = self._dtype_factor(work.dtype, m, math.sqrt(k * n))
        return max(ns * factor, self._moving(work), self._least)

    def _pixels(self, probe: str, work: Work) -> float:
        if (probe, "f32") not in self._rows:
            probe = "conv3x3"
        if (probe, "f32") not in self._rows:
            pixels, channels = work.size
            return self._gemm(Work("gemm", "MatMul", (pixels, channels, channels), dtype=work.dtype)) * 1.5
        grid = self._grid(probe)
        return max(grid(*work.size) * self._dtype_factor(work.dtype, 512, 512), self._least)

    def _depthwise(self, work: Work) -> float:
        """Return the time of a convolution of each channel by itself, which goes by the elements alone."""
        rows = self._rows.get(("depthwise", "f32"))
        if not rows:
            return self._pixels("conv3x3", work)
        curve = self._curves.get("depthwise elements")
        if curve is None:
            points = ((pixels * channels, ns) for (pixels, channels), ns in rows.items())
            curve = self._curves["depthwise elements"] = Curve(points)
        return max(curve(math.prod(work.size)) * self._dtype_factor(work.dtype, 512, 512), self._least)

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
        return max(self._grid("lstm")(steps, batch, side) * directions, self._least)

    def _fused(self, work: Work) -> float:
        """Return what a fused node adds to the one before it.

        On a CPU that may be more than it would take by itself: its values lie with other cores. On an accelerator it
        is not, whatever the difference of two chains says; nor is an activation with the bias before it, so that what
        the chain with a bias alone took too long, or was too quick, is not missing or counted twice.
        """
        like = work.like
        if like not in _UNFUSED:
            return 0.0
        elements = work.size[0]
        if like == "turned":
            return self._turned(elements, self._unfused(like, elements))
        if self.device.kind == Device.CPU.kind:
            return self._added(like, elements)
        chain = ("bias", like) if like == "gemm_act" and ("fused:bias", "f32") in self._rows else (like,)
        added = [self._added(each, elements) for each in chain]
        alone = [self._unfused(each, elements) for each in chain]
        return min(sum(added), sum(alone)) - min(sum(added[:-1]), sum(alone[:-1]))

    def _added(self, like: str, elements: int) -> float:
        """Return what the chains say; beyond the largest tensor it grows as the node by itself does."""
        alone, rows = self._unfused(like, elements), self._rows.get((f"fused:{like}", "f32"))
        if not rows:
            return 0.0 if like == "bias" else alone / 2
        curve, largest = self._curve(f"fused:{like}"), max(rows)[0]
        if elements <= largest:
            return curve(elements)
        return curve(largest) + alone - self._unfused(like, largest)

    def _unfused(self, like: str, elements: int) -> float:
        return self._operator(Work("op", _UNFUSED[like], (elements,)))

    def _turned(self, elements: int, alone_ns: float) -> float:
        """Return what a transpose adds to the product that reads it; engines fuse it on some devices."""
        rows = self._rows.get(("turned", "f32"))
        if not rows:
            return alone_ns / 2
        curve = self._curves.get("turned")
        if curve is None:  # half of a row's transposes are of (s, d), half of (s, s)
            curve = self._curves["turned"] = Curve((b * s * (s + d) / 2, ns) for (b, s, d), ns in rows.items())
        return min(curve(elements), alone_ns)

    def _view(self, work: Work) -> float:
        if ("op:Reshape", "f32") not in self._rows:
            return 0.5 * self._dispatch
        return min(self._curve("op:Reshape")(1024), self._dispatch)

    def _operator(self, work: Work) -> float:
        like, elements = work.like, work.size[0]
        if like in _COMPUTED and (f"op:{like}", "f32") not in self._rows:
            return self._operator(work._replace(like=_COMPUTED[like]))
        table = self._operators.get(like)
        if table is None:
            table = self._operators[like] = self._table(like)
        ns = table(elements)
        if len(work.size) > 1 and (f"op:{like}", "f32") in self._rows:
            ns *= self._lengths_of(like, work.size[1])(elements, work.size[1])
        return max(ns, self._least)

    def _table(self, like: str) -> OperatorTable:
        """Return the times of an operator, or of what stands for it where no tensor was measured that tells."""
        names = (like, _COARSER.get(like, "Add"))
        telling = (f"op:{name}" for name in names if self._largest(f"op:{name}") >= _TELLING)
        probe = next(telling, "op:Add")
        sizes = frozenset(size for (size,) in self._rows[probe, "f32"])
        additions = {size: ns for (size,), ns in self._rows["op:Add", "f32"].items()}
        kept = 0.5 if like in _IN_PLACE else 1.0
        return OperatorTable(self._curve(probe), sizes, additions, self._curve("op:Add"), kept)

    def _lengths_of(self, like: str, row: int) -> RowLengths:
        """Return how the length of a row tells on an operator's time."""
        measured = self._rows.get((f"rows:{like}", "f32"), {})
        by_stride = like in _BY_STRIDE and any(size[1] % _PAGE == 0 for size in measured)
        aligned = by_stride and row % _PAGE == 0
        known = self._lengths.get((like, aligned))
        if known is None:
            told = {length for elements, length in measured if elements >= max(_TELLING, _MANY_ROWS * length)}
            if by_stride:
                told = {length for length in told if (length % _PAGE == 0) == aligned}
            rows = {(size[0], size[1]): ns for size, ns in measured.items() if size[1] in told}
            usual = self._rows[f"op:{like}", "f32"]
            known = RowLengths(rows, {size[0]: ns for size, ns in usual.items()})
            self._lengths[like, aligned] = known
        return known

    def _largest(self, probe: str) -> int:
        """Return the elements of the largest tensor that an operator was measured with; 0 where it was not."""
        return max((size[0] for size in self._rows.get((probe, "f32"), ())), default=0)

    def _moving(self, work: Work) -> float:
        """Return the time an addition of as many bytes takes."""
        return self._curve("op:Add")(work.nbytes / 12)

    @property
    def _least(self) -> float:
        return self._dispatch * 0.8


_UNFUSED = {"bias": "AddRow", "gemm_act": "Relu", "conv_act": "Relu", "conv_add": "Add", "turned": "Transpose"}
_IN_PLACE = frozenset({"AddRow", "Relu", "Tanh", "Sigmoid", "Exp", "Erf", "Gelu", "Sin", "Sqrt"})
_POWERS = {"conv3x3": (1, 2), "conv1x1": (1, 2), "lstm": (1, 1, 2)}
_COARSER = {
    "AddRow": "Add",
    "TransposeRows": "Gather",
    "Erf": "Tanh",
    "Exp": "Tanh",
    "Sigmoid": "Tanh",
    "Sin": "Tanh",
    "Pow": "Tanh",
    "Gelu": "Tanh",
    "Concat": "Gather",
    "Transpose": "Gather",
    "ReduceMean": "LayerNormalization",
    "MaxColumns": "ReduceMean",
    "SumColumns": "ReduceMean",
}
