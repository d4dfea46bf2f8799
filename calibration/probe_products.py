"""Matrix products: squares over a fine grid, other shapes as what they take more, types, fusions, and cold weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from rlx_ort.calibration import graphs
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.series import Point, Series, computing
from rlx_ort.execution.options import CompileOptions, Precision
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph

__all__ = [
    "COLD_SIDE",
    "cold_weights",
    "conv_fusions",
    "other_types",
    "product_fusions",
    "skewed",
    "squares",
    "subtract",
]

COLD_SIDE = 1024
"""The side of the weights in `weights` rows: 4 MiB each, of f32."""

_FEW_BYTES = 1 << 24


def squares(
    side: int, rows: tuple[int, ...], dtype: DType = DType.F32, label: str = "f32", *, few: bool = False
) -> Series:
    """Return the series of (m, side) by (side, side); with `few`, in a chain that opens quickly, see `_few`."""
    options = CompileOptions(precision=Precision.TF32) if label == "tf32" else None
    series = _products(side, side, rows, dtype, label, options)
    return dataclasses.replace(series, links=_few(side)) if few else series


def skewed(k: int, n: int, rows: tuple[int, ...]) -> Series:
    """Return the series of (m, k) by (k, n) and back, whose row is the mean of both."""
    return _products(k, n, rows, DType.F32, "f32", None)


def _products(
    k: int, n: int, rows: tuple[int, ...], dtype: DType, label: str, options: CompileOptions | None
) -> Series:
    links = 16 if k * n <= 256 * 1024 else 8 if k * n <= 1024**2 else 4
    points = tuple(computing((m, k), (m, k, n), 2.0 * m * k * n) for m in rows)
    return Series("gemm", lambda count: graphs.gemm(k, n, count, dtype), points, links, dtype, label, options)


def _few(side: int) -> int:
    """Return the links of a chain whose weights take 16 MB in all.

    A CPU packs the weight anew for each link when the session opens, which took 90 ms for 4096 x 4096: as long as many
    runs of it.
    """
    return min(max(_FEW_BYTES // (4 * side * side), 1), 16)


def cold_weights(count: int) -> Series:
    """Return the series of a row times so many weights in turn: above the caches they come from memory each time."""
    side = COLD_SIDE
    point = computing((1, side), (count * side * side * 4,), 2.0 * side * side)
    links = count * max(1, 8 // count)
    return Series(
        "weights",
        lambda links: graphs.gemm(side, side, links, kept=count),
        (point,),
        links,
        stretched=False,
        shortened=False,
    )


def other_types(side: int, rows: tuple[int, ...], *, tf32: bool) -> list[Series]:
    """Return the series of products in f16, and in tf32 where the device has it."""
    found = [squares(side, rows, DType.F16, "f16")]
    return [*found, squares(side, rows, DType.F32, "tf32")] if tf32 else found


_PRODUCT_FUSIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ()),
    ("bias", ("bias",)),
    ("gemm_act", ("bias", "act")),
)
_CONV_FUSIONS: tuple[tuple[str, tuple[str, ...]], ...] = (("conv", ()), ("conv_act", ("act",)), ("conv_add", ("add",)))


def product_fusions(rows: tuple[int, ...]) -> list[Series]:
    """Return chains of products with and without a bias and an activation; `subtract` makes rows of them."""
    points = tuple(Point((m, 64), (m * 64,), m * 64.0) for m in rows)
    return [Series(f"fused:{probe}", _fused_gemm(extra), points, 16) for probe, extra in _PRODUCT_FUSIONS]


def conv_fusions(pictures: tuple[tuple[int, int], ...]) -> list[Series]:
    """Return chains of convolutions with and without what may be fused; `subtract` makes rows of them.

    They are 1 x 1: what is fused takes a share of their time that stands out of the noise of a subtraction. With
    3 x 3 it was a twentieth, and drowned.
    """
    points = tuple(Point((b, 64, side, side), (b * side * side * 64,), b * side * side * 64.0) for b, side in pictures)
    return [Series(f"fused:{probe}", _fused_conv(extra), points, 6, trips=1) for probe, extra in _CONV_FUSIONS]


def subtract(prober: Prober) -> None:
    """Turn the times of whole links into what each fused node adds to the link without it.

    A link of no time is one that drowned in noise, and tells nothing.
    """
    before: Mapping[str, str] = {"bias": "", "gemm_act": "bias", "conv_act": "conv", "conv_add": "conv"}
    whole = {(row.probe[6:], row.size): row for row in prober.rows if row.probe.startswith("fused:")}
    prober.rows = [row for row in prober.rows if not row.probe.startswith("fused:")]
    for (probe, size), row in whole.items():
        bare = whole.get((before.get(probe, "-"), size))
        if bare is not None and min(row.ns, bare.ns) > 0:
            extra = max(row.ns - bare.ns, 0.0)
            spread = max(row.spread, bare.spread) * row.ns / max(extra, row.ns * 0.01)
            prober.rows.append(Sample(f"fused:{probe}", size, extra, row.dtype, round(spread, 4), row.repeats))


def _fused_gemm(extra: tuple[str, ...]) -> Callable[[int], Graph]:
    return lambda links: graphs.fused_gemm(64, links, extra)


def _fused_conv(extra: tuple[str, ...]) -> Callable[[int], Graph]:
    return lambda links: graphs.conv(64, 1, links, extra=extra)
