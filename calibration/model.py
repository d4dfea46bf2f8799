"""`MeasuredCostModel`: prices kernels by interpolation between the rows of a profile, the same way for every device."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from rlx_ort.calibration.features import BY_WIDTH, TABLE, Kernel
from rlx_ort.calibration.profile import REQUIRED, CalibrationProfile
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
from rlx_ort.providers.base import CostProfile

_MOST_KNOWN = 1 << 16  # prices that are remembered, of 300 bytes or so: a process may see any number of shapes
_FLOOR_NS = 20.0  # a time below this is noise of a subtraction
_BYTES = {"f16": 2, "bf16": 2, "f64": 8}
_DISTURBED = math.log(3.0)  # padding and caches explain smaller contradictions; disturbances only add time
_SATURATES = 8.0
"""Times a launch that a row takes at least if the work decides about its time."""

_NEAR = 4.0  # times the largest size measured, or a share of the smallest: beyond it a price is an extrapolation

AXES: Mapping[str, Callable[..., tuple[float, ...]]] = {
    "MatMul": lambda m, k, n: (m, k * n),
    "BatchedMatMul": lambda batch, m, k, n: (2.0 * batch * m * k * n,),
    "Attention": lambda heads, queries, keys, depth: (4.0 * heads * queries * keys * depth,),
    "LSTM": lambda steps, batch, width, hidden, directions: (
        steps, batch * directions, math.sqrt(hidden * (width + hidden) / 2),
    ),
}  # fmt: skip
"""Kernel -> the axes of its rows, from its sizes; the sizes themselves where nothing is said."""

POWERS: Mapping[str, tuple[float, ...]] = {
    "Conv3x3": (1, 2), "Conv1x1": (1, 2), "LSTM": (1, 1, 2), **dict.fromkeys(BY_WIDTH, (1, 0)),
}  # fmt: skip
"""Kernel -> how its work grows with each axis; in proportion where nothing is said."""

_RANKS: Mapping[str, int] = {
    **dict.fromkeys(
        (f"{name}{tail}" for name in ("run", "launch", "input", "output") for tail in ("", ":recorded")), 0
    ),
    "MatMul": 2,
    **{name: len(powers) for name, powers in POWERS.items()},
}
"""Kernel of the table -> how many sizes its rows have, 1 where nothing is said."""

ERRORS: Mapping[str, float] = {"measured": 0.2, "interpolated": 0.25, "extrapolated": 0.6, "assumed": 3.0}
"""How a price was found -> the error to expect of it, as a share; see NOTES.md for the kept runs."""


def axes_of(kernel: Kernel) -> tuple[float, ...]:
    """Return the sizes of a kernel as the rows of the table have them."""
    axes = AXES.get(kernel.name)
    return kernel.size if axes is None else axes(*kernel.size)


class Price(NamedTuple):
    """The time of a kernel in ns, and how it was found: a key of `ERRORS`."""

    ns: float
    how: str


class Grid:
    """Time over the sizes of a kernel: logarithms, linear along each axis.

    Above the grid the time grows half as between the two largest sizes and half with the work: a time held up by
    launches may be by its work there. Below, a part of it stays and the rest falls with the work, as between the two
    smallest.
    At points of the grid that were not measured, the time changes along an axis as on the nearest line where it was.
    A point was disturbed if it takes over three times as long as more of the same work, or as its share of less work.
    It then counts as three times that.

    `points` maps sizes to ns. The work grows with each size to the power in `powers`, by default 1.
    """

    __slots__ = ("_axes", "_powers", "_values", "least", "most")

    def __init__(self, points: Mapping[tuple[float, ...], float], powers: tuple[float, ...] = ()) -> None:
        known = {tuple(map(_log, size)): math.log(max(ns, _FLOOR_NS)) for size, ns in points.items()}
        rank = len(next(iter(known)))
        self.least, self.most = (math.exp(pick(known.values())) for pick in (min, max))
        self._powers = powers or (1.0,) * rank
        self._axes = [sorted({point[axis] for point in known}) for axis in range(rank)]
        self._values = {
            point: known[point] if point in known else _filled(point, known) for point in itertools.product(*self._axes)
        }
        for at, power in enumerate(self._powers):
            pairs = list(itertools.pairwise(self._axes[at])) if power else []
            down = [(high, low, 0.0) for low, high in reversed(pairs)]
            for trusted, other, more in (*down, *((low, high, power * (high - low)) for low, high in pairs)):
                for point in [point for point in self._values if point[at] == other]:
                    most = self._values[(*point[:at], trusted, *point[at + 1 :])] + more + _DISTURBED
                    self._values[point] = min(self._values[point], most)

    def __call__(self, size: tuple[float, ...]) -> float:
        """Return the time at a size, in ns."""
        return math.exp(self._at((), [_log(side) for side in size]))

    @property
    def reach(self) -> tuple[float, float]:
        """The least and the most that was measured along the first axis."""
        return math.exp(self._axes[0][0]), math.exp(self._axes[0][-1])

    def inside(self, size: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
        """Return the nearest size within the grid, and its work as a share of the work of the size."""
        sides = [(x, min(max(x, axis[0]), axis[-1])) for axis, x in zip(self._axes, map(_log, size), strict=True)]
        less = sum(power * (near - x) for power, (x, near) in zip(self._powers, sides, strict=True))
        return tuple(math.exp(near) for _, near in sides), math.exp(less)

    def covers(self, size: tuple[float, ...]) -> bool:
        """Return whether a size lies within the grid, or not far beyond it."""
        near = math.log(_NEAR)
        return all(axis[0] - near <= x <= axis[-1] + near for axis, x in zip(self._axes, map(_log, size), strict=True))

    def _at(self, fixed: tuple[float, ...], left: list[float]) -> float:
        """Interpolate along the axes that are left, the others being fixed at points of the grid."""
        if not left:
            return self._values[fixed]
        axis, x, rest = self._axes[len(fixed)], left[0], left[1:]
        power = self._powers[len(fixed)]
        if len(axis) == 1:
            return self._at((*fixed, axis[0]), rest) + (power if x > axis[0] else power / 2) * (x - axis[0])
        at = min(max(bisect.bisect_right(axis, x), 1), len(axis) - 1)
        low = self._at((*fixed, axis[at - 1]), rest)
        high = self._at((*fixed, axis[at]), rest)
        slope = (high - low) / (axis[at] - axis[at - 1])
        if x > axis[-1]:
            return high + (min(max(slope, 0.0), power) + power) / 2 * (x - axis[-1])
        if x < axis[0]:
            more, less = power * (axis[at] - axis[0]), power * (x - axis[0])
            share = min(max(math.expm1(high - low), 0.0) / math.expm1(more), 1.0) if more else 0.0  # the work's
            return low + math.log1p(share * math.expm1(less))
        return low + slope * (x - axis[at - 1])


class MeasuredCostModel:
    """Prices work by interpolation in a calibration profile. Safe to use from several threads.

    Its rates are those of rows that saturate the device. Where none does, they are the shipped ones, or what the best
    row shows to be possible: a profile with few rows corrects shipped figures of devices and never replaces them.

    With `recorded`, it prices runs whose launches are replayed from a recording. `shipped` has the provider's figures.

    Raises:
        CalibrationError: the profile lacks a row without which nothing can be predicted.
    """

    def __init__(
        self,
        device: Device,
        profile: CalibrationProfile,
        threads: int = 1,
        *,
        recorded: bool = False,
        shipped: CostProfile | None = None,
    ) -> None:
        self.device = device
        self.shipped = shipped
        self.profile = profile
        self.recorded = recorded
        self._threads = threads
        self._rows: dict[tuple[str, str], dict[tuple[float, ...], float]] = {}
        ranks: dict[str, int] = {}
        for row in profile.rows:
            known = None if row.kernel.startswith("?") else _RANKS.get(row.kernel, 1)
            wanted = ranks.setdefault(row.kernel, len(row.size) if known is None else known)
            if len(row.size) != wanted:
                row_text = f"a row of {row.kernel} with the sizes {row.size}, where {wanted} are expected"
                raise CalibrationError(f"the profile of {device.display} has {row_text}; calibrate again")
            if row.ns > 0 or not row.size:  # a difference of 0 was below the noise
                self._rows.setdefault((row.kernel, row.dtype), {})[row.size] = row.ns
        missing = [name for name in REQUIRED if (name, "f32") not in self._rows]
        if missing:
            raise CalibrationError(f"the profile of {device.display} has no row of {', '.join(missing)}")
        self._launch = self._single("launch")
        self._shortest_launch = self._rows.get(("launch:recorded", "f32"), {}).get((), self._launch)
        self._bytes_per_ns = self._rate("Add", lambda elements: 12.0 * elements, "memory_bytes_per_ns")
        self._flops_per_ns = self._rate("MatMul", lambda m, weight: 2.0 * m * weight, "gemm_gflops")
        self._operator_bytes_per_ns = self._operator_rate()
        self._grids: dict[tuple[str, str], Grid] = {}
        self._known: dict[Kernel, Price] = {}

    def __repr__(self) -> str:
        return f"<MeasuredCostModel of {self.device.label}, {len(self.profile.rows)} rows>"

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return self.profile.source

    def error_of(self, ns_by_how: Mapping[str, float]) -> float:
        """Return the error to expect of a prediction, as a share, from how its parts were found.

        A quick or a noisy measurement adds to it.
        """
        total = sum(ns_by_how.values())
        if total <= 0:
            return ERRORS["interpolated"]
        noisy = len(self.profile.noisy_rows) / len(self.profile.rows)
        usual = sum(ns * ERRORS[how] for how, ns in ns_by_how.items()) / total
        return usual + 0.15 * self.profile.quick + 0.2 * noisy

    def has(self, name: str) -> bool:
        """Return whether the table has rows of a kernel, measured by a calibration and not on demand."""
        return (name, "f32") in self._rows

    def price(self, kernel: Kernel) -> Price:
        """Return the time of a kernel with its launch, and how it was found; asked twice, it looks it up."""
        known = self._known.get(kernel)
        if known is None:
            price = self._price(kernel)
            known = Price(price.ns * kernel.times, price.how)
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[kernel] = known
        return known

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return the rate of an f32 product of (m, k) and (k, n), in GFLOP/s."""
        flops = 2.0 * m * k * n
        return flops / self.price(Kernel("MatMul", (m, k, n), flops=flops)).ns

    def memory_bw(self) -> float:
        """Return the bytes an addition of large tensors reads and writes, in bytes per ns."""
        return self._bytes_per_ns

    def dispatch_overhead_ns(self) -> float:
        """Return the measured time of one more tiny node, in ns."""
        return self._launch

    def roundtrip_overhead_ns(self) -> float:
        """Return the time of a run without nodes, inputs and outputs, in ns."""
        parts = self._launch + self._single("input") + self._single("output")
        return max(self._single("run") - parts, 0.0)

    def upload_ns(self, nbytes: int) -> float:
        """Return the time to bring one value to the device, in ns."""
        return self._single("input") + self._moved("upload", nbytes)

    def readback_ns(self, nbytes: int) -> float:
        """Return the time to bring one value to the host, in ns."""
        return self._single("output") + self._moved("readback", nbytes)

    def num_threads(self) -> int:
        """Return the threads the device computes with."""
        return self._threads

    def _single(self, name: str) -> float:
        rows = self._rows.get((f"{name}:recorded", "f32")) if self.recorded else None
        return (rows or self._rows.get((name, "f32"), {})).get((), 0.0)

    def _moved(self, name: str, nbytes: int) -> float:
        return self._grid(name)((nbytes,)) if nbytes > 0 and (name, "f32") in self._rows else 0.0

    def _rate(self, name: str, work_of: Callable[..., float], shipped: str) -> float:
        """Return the work per ns of the row that saturates the device most, or its substitute where none does."""
        rows = [(ns, work_of(*size)) for size, ns in self._rows[name, "f32"].items() if size]
        possible = max((work / ns for ns, work in rows), default=1.0)
        known = 0.0 if self.shipped is None else float(getattr(self.shipped, shipped))
        least_ns = _SATURATES * self._launch
        enough = known * least_ns  # work that takes so long at the shipped rate: less may be slow for other reasons
        saturated = [work / (ns - self._launch) for ns, work in rows if ns > least_ns and work >= enough]
        return max(saturated) if saturated else max(possible, known)

    def _operator_rate(self) -> float:
        """Return the bytes per ns of the median operator, each at its best row; of an addition where no other has rows.

        An addition streams; most operators do more for each element (80 published models: NOTES.md).
        """
        best = []
        for name in TABLE - {"Add"}:
            rows = self._rows.get((name, "f32"), {}).items()
            rates = [8.0 * size[0] / (ns - self._launch) for size, ns in rows if ns > _SATURATES * self._launch]
            best += [max(rates)] if rates else []
        return min(statistics.median(best), self._bytes_per_ns) if best else self._bytes_per_ns

    def _grid(self, name: str, dtype: str = "f32") -> Grid:
        grid = self._grids.get((name, dtype))
        if grid is None:
            grid = self._grids[name, dtype] = Grid(self._rows[name, dtype], POWERS.get(name, ()))
        return grid

    def _price(self, kernel: Kernel) -> Price:
        name, dtype, size = kernel.name, kernel.dtype, kernel.size
        if name == "View":
            least = self._grid("Reshape").least if ("Reshape", "f32") in self._rows else 0.5 * self._launch
            return Price(min(least, self._launch), "interpolated")
        axes = axes_of(kernel)
        asked = f"?{name}"
        points = self._rows.get((asked, dtype), {})
        # measured for a graph, at its own sizes
        if points and not self.has(name) and len(next(iter(points))) == len(axes):
            grid = self._grid(asked, dtype)
            near = grid.covers(axes)
            ns = grid(axes) if near or len(axes) > 1 else self._beyond(grid, axes)
            return Price(max(ns, self._floor(grid)), "measured" if near else "extrapolated")
        if name in _INSTEAD and (name, "f32") not in self._rows:
            name, axes = _INSTEAD[name], axes[:1]
        if (name, "f32") not in self._rows:
            return self._assumed(kernel)
        own = dtype if (name, dtype) in self._rows else "f32"
        grid = self._grid(name, own)
        ns = grid(axes)
        by_elements = (name not in AXES and name not in POWERS) or name in BY_WIDTH
        if by_elements and self._grid("Add").covers(axes[:1]):
            ns = self._beyond(grid, axes)
        elif not grid.covers(axes) and (above := self._above(grid, kernel, axes)) is not None:
            ns = above
        elif by_elements:
            ns = self._beyond(grid, axes)
        ns *= self._dtype_factor(dtype) if own != dtype and kernel.flops > 2 * math.prod(size) else 1.0
        return Price(max(ns, self._floor(grid)), "interpolated" if grid.covers(axes) else "extrapolated")

    def _beyond(self, grid: Grid, axes: tuple[float, ...]) -> float:
        """Return the time of an operator on so many elements, which above and below its sizes goes as the addition's.

        The addition is measured where a device begins to share a node among its cores, below which it takes less.
        """
        elements, add = axes[0], self._grid("Add")
        low, high = grid.reach
        inside = min(max(elements, low), high)
        if grid is add or inside == elements:
            return grid(axes)
        least, most = sorted((1.0, elements / inside))
        return grid((inside, *axes[1:])) * min(max(add((elements,)) / add((inside,)), least), most)

    def _above(self, grid: Grid, kernel: Kernel, axes: tuple[float, ...]) -> float | None:
        """Return the time beyond rows that do not saturate the device: theirs, and that of the work that they lack.

        None where the grid reaches far enough to be continued.
        """
        inside, share = grid.inside(axes)
        least_ns = _SATURATES * self._launch
        computes = self.shipped is not None and kernel.flops * share < self.shipped.gemm_gflops * least_ns
        if grid.most > least_ns and not (computes and share < 1.0):
            return None
        return grid(inside) + max(self._roofline(kernel) * (1.0 - share), 0.0)

    def _floor(self, grid: Grid) -> float:
        """Return the least that a kernel takes: most of a launch, unless it was measured to need none."""
        return 0.8 * self._launch if grid.least > 0.5 * self._shortest_launch else 0.0

    @cached_property
    def replayed(self) -> MeasuredCostModel:
        """The model of runs whose launches are replayed from a recording; this one where the device records none."""
        if self.recorded or ("launch:recorded", "f32") not in self._rows:
            return self
        return MeasuredCostModel(self.device, self.profile, self._threads, recorded=True, shipped=self.shipped)

    def _dtype_factor(self, dtype: str) -> float:
        """Return how products of a type compare with f32 ones of the same size."""
        dtype = "f16" if dtype == "bf16" else dtype
        if ("MatMul", dtype) not in self._rows:
            return _BYTES.get(dtype, 4) / 4
        middle = (512.0, 512.0 * 512)
        return self._grid("MatMul", dtype)(middle) / self._grid("MatMul")(middle)

    def _assumed(self, kernel: Kernel) -> Price:
        """Return the longest of computing, moving memory as most operators do, and a launch."""
        moving = kernel.nbytes / self._operator_bytes_per_ns
        return Price(max(kernel.flops / self._flops_per_ns, moving, self._launch), "assumed")

    def _roofline(self, kernel: Kernel) -> float:
        """Return the longer of computing and moving memory."""
        return max(kernel.flops / self._flops_per_ns, kernel.nbytes / self._bytes_per_ns)


_INSTEAD = {"AddRow": "Add", "TransposeRows": "Transpose"}


def _log(side: float) -> float:
    return math.log(max(side, 1.0))


def _filled(point: tuple[float, ...], known: Mapping[tuple[float, ...], float]) -> float:
    """Return the time at a point by the nearest line that was measured beside it, else the nearest time."""

    def distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
        return sum(abs(mine - its) for mine, its in zip(one, other, strict=True))

    beside = []
    for axis in range(len(point)):
        for on_line, ns in known.items():
            if [at for at, pair in enumerate(zip(point, on_line, strict=True)) if pair[0] != pair[1]] != [axis]:
                continue
            for other, other_ns in known.items():
                step = (*other[:axis], on_line[axis], *other[axis + 1 :])
                if other[axis] == point[axis] and step in known:
                    far = distance(point, on_line) + distance(point, other)
                    beside.append((far, ns + other_ns - known[step]))
    if beside:
        return min(beside)[1]
    return known[min(known, key=lambda other: (distance(point, other), other))]
