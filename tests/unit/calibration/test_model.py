"""Prices between the rows of a profile, beyond them, and without them; expected times are computed by hand."""

from __future__ import annotations

import pytest

from rlx_ort import CalibrationError, Device
from rlx_ort.calibration.features import Kernel
from rlx_ort.calibration.model import ERRORS, Grid, MeasuredCostModel
from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
from rlx_ort.providers.base import CostProfile

ROWS = (
    Row("run", (), 10_000.0),
    Row("launch", (), 100.0),
    Row("input", (), 1000.0),
    Row("output", (), 2000.0),
    Row("MatMul", (1, 64 * 64), 1000.0),
    Row("MatMul", (1, 256 * 256), 16_000.0),
    Row("MatMul", (64, 64 * 64), 4000.0),
    Row("MatMul", (64, 256 * 256), 64_000.0),
    Row("Add", (1000,), 200.0),
    Row("Add", (100_000,), 20_000.0),
    Row("upload", (1000,), 100.0),
    Row("upload", (1_000_000,), 100_000.0),
)


def model(*more: Row, recorded: bool = False) -> MeasuredCostModel:
    """Return the model of the rows above and more."""
    profile = CalibrationProfile(ProfileKey("cpu", "CPUExecutionProvider", "Fake 1"), (*ROWS, *more))
    return MeasuredCostModel(Device.CPU, profile, recorded=recorded)


def add(elements: int, nbytes: float = 0.0) -> Kernel:
    """Return an addition."""
    return Kernel("Add", (elements,), "f32", float(elements), nbytes or 12.0 * elements)


ON_DEMAND = Row("?Novel-1", (10_000,), 77_000.0)
NOVEL = Kernel("Novel-1", (10_000,), "f32", 10_000.0, 120_000.0)
PRICES: dict[str, tuple[tuple[Row, ...], Kernel, float, str]] = {
    "a measured size has its measured time": ((), Kernel("MatMul", (64, 64, 64)), 4000.0, "interpolated"),
    "between sizes the time is a power of the size": ((), add(10_000), 2000.0, "interpolated"),
    "a weight of any shape goes by its elements": ((), Kernel("MatMul", (1, 128, 512)), 16_000.0, "interpolated"),
    "beyond its largest size an addition grows with its elements": ((), add(1_000_000), 200_000.0, "extrapolated"),
    "another operator grows there as the addition does": (
        (Row("Exp", (1000,), 600.0),),
        Kernel("Exp", (100_000,)),
        60_000.0,
        "extrapolated",
    ),
    "below its smallest size it gets quicker as the addition does": (
        (Row("Exp", (100_000,), 8000.0),),
        Kernel("Exp", (1000,)),
        80.0,
        "extrapolated",
    ),
    "below two sizes, all of an operator but its work stays": (
        (Row("LSTM", (1, 1, 10), 5000.0), Row("LSTM", (1, 1, 20), 8000.0)),
        Kernel("LSTM", (1, 1, 5, 5, 1)),
        4250.0,
        "interpolated",
    ),
    "nothing takes less than most of a launch": ((), add(1), 80.0, "extrapolated"),
    "but views, which need none": ((Row("Reshape", (1024,), 20.0),), Kernel("View"), 20.0, "interpolated"),
    "what the table lacks goes by its bytes": ((), NOVEL, (20_000.0 - 100.0) / 10, "assumed"),
    "and takes as long for them as the median operator does": (
        (Row("Exp", (10_000,), 8_100.0), Row("Tanh", (10_000,), 16_100.0), Row("Erf", (10_000,), 32_100.0)),
        NOVEL,
        24_000.0,
        "assumed",
    ),
    "what was measured on demand comes first": ((ON_DEMAND,), NOVEL, 77_000.0, "measured"),
    "a body counts eight times where nothing is known": ((), add(1000)._replace(times=8), 1600.0, "interpolated"),
}


@pytest.mark.parametrize(("rows", "kernel", "ns", "how"), PRICES.values(), ids=PRICES)
def test_a_kernel_has_a_price(rows: tuple[Row, ...], kernel: Kernel, ns: float, how: str) -> None:
    """From rows of its size, from those beside it, or from what was measured of other operators."""
    price = model(*rows).price(kernel)
    assert (price.ns, price.how) == (pytest.approx(ns), how)


def test_a_size_far_from_what_was_measured_on_demand_is_an_extrapolation() -> None:
    """A hundred times the elements were never seen."""
    assert model(ON_DEMAND).price(Kernel("Novel-1", (1_000_000,))).how == "extrapolated"


SHIPPED = CostProfile(
    gemm_gflops=10_000.0,
    conv_gflops=5_000.0,
    memory_bytes_per_ns=1000.0,
    dispatch_ns=5000.0,
    roundtrip_ns=30_000.0,
    upload_bytes_per_ns=10.0,
    readback_bytes_per_ns=10.0,
)
"""A large GPU."""


def few(*rows: Row) -> MeasuredCostModel:
    """Return the model of such a device after a calibration that had time for little: a launch takes 4 us."""
    known = (Row("run", (), 30_000.0), Row("launch", (), 4000.0))
    profile = CalibrationProfile(ProfileKey("cuda", "CUDAExecutionProvider", "Fake 1"), (*known, *rows), quick=True)
    return MeasuredCostModel(Device.CUDA, profile, shipped=SHIPPED)


TINY = (Row("MatMul", (1, 64 * 64), 4500.0), Row("Add", (1024,), 4200.0))
"""Rows whose time is all launch."""


@pytest.mark.parametrize(
    ("rows", "rate"),
    [
        ((), 1000.0),
        ((Row("Add", (1 << 24,), 104_000.0),), 12 * (1 << 24) / 100_000),
        ((Row("Add", (1 << 20,), 8000.0),), 12 * (1 << 20) / 8000),
    ],
    ids=["rows of launches say nothing", "a row that saturates the device replaces it", "no row may be quicker"],
)
def test_the_memory_rate_is_what_rows_show(rows: tuple[Row, ...], rate: float) -> None:
    """Otherwise the one that is shipped for the device stands, in bytes per ns."""
    assert few(*TINY, *rows).memory_bw() == pytest.approx(rate)


def test_a_small_product_that_is_slow_says_nothing_about_the_rates() -> None:
    """50 us for 4 MFLOP: its 64 columns leave most of a GPU idle."""
    model = few(*TINY, Row("MatMul", (512, 64 * 64), 50_000.0))
    large = model.price(Kernel("Attention-1", (1,), flops=1e10, nbytes=1e6)).ns
    assert large == pytest.approx(1e10 / 10_000)


def test_a_large_kernel_beyond_rows_that_are_all_launch_is_priced_by_the_known_rates() -> None:
    """A product of 2 * 512 * 2048 * 2048 flops takes 430 us at 10,000 a ns, and 16 M elements 201 us."""
    price = few(*TINY).price(Kernel("MatMul", (512, 2048, 2048), "f32", 2.0 * 512 * 2048**2, 4.0 * 2048**2)).ns
    assert price == pytest.approx(4500 + 2 * 512 * 2048**2 / 10_000, rel=0.01)
    assert few(*TINY).price(add(1 << 24)).ns == pytest.approx(4200 + 12 * (1 << 24) / 1000, rel=0.01)


def test_transfers_and_round_trips_have_a_price() -> None:
    """A run without its node, input and output; a small input's time, and what its bytes take beyond."""
    assert model().roundtrip_overhead_ns() == pytest.approx(10_000.0 - 100.0 - 1000.0 - 2000.0)
    assert model().upload_ns(10_000) == pytest.approx(1000.0 + 1000.0)


def test_recorded_launches_have_rows_of_their_own() -> None:
    """The same profile prices plain runs and replayed ones."""
    found = model(Row("launch:recorded", (), 10.0), Row("Exp", (1000,), 12.0))
    kernel = Kernel("Exp", (1000,))
    assert found.price(kernel).ns == pytest.approx(80.0)  # most of a plain launch
    assert found.replayed.price(kernel).ns == pytest.approx(20.0)  # the least that counts as a time
    assert model().replayed.recorded is False


def test_a_type_that_was_not_measured_goes_by_products_of_it() -> None:
    """Products in f16 took half as long at every size."""
    half = [Row(row.kernel, row.size, row.ns / 2, "f16") for row in ROWS if row.kernel == "MatMul"]
    conv = Kernel("Conv3x3", (100, 64), "f16", 18.0 * 100 * 64 * 64, 1000.0)
    rows = (*half, Row("Conv3x3", (100, 64), 9000.0), Row("Conv3x3", (1000, 64), 90_000.0))
    assert model(*rows).price(conv).ns == pytest.approx(4500.0)


def test_the_error_is_that_of_the_parts_by_their_time() -> None:
    """Half interpolated, half assumed."""
    error = model().error_of({"interpolated": 100.0, "assumed": 100.0})
    assert error == pytest.approx((ERRORS["interpolated"] + ERRORS["assumed"]) / 2)


def test_a_profile_without_products_predicts_nothing() -> None:
    """The error names the row."""
    profile = CalibrationProfile(ProfileKey("cpu", "CPUExecutionProvider", "Fake 1"), ROWS[:2])
    with pytest.raises(CalibrationError, match="MatMul"):
        MeasuredCostModel(Device.CPU, profile)


def test_a_grid_fills_what_was_not_measured() -> None:
    """Between two measured neighbours along an axis lies their geometric mean."""
    grid = Grid({(1, 1): 100.0, (1, 100): 10_000.0, (10, 1): 100.0, (10, 100): 10_000.0, (100, 1): 100.0})
    assert grid((10, 10)) == pytest.approx(1000.0)
    assert grid((100, 1)) == pytest.approx(100.0)


def test_a_grid_covers_what_is_near_it() -> None:
    """Four times beyond is near; a hundred times is not."""
    grid = Grid({(100,): 1.0, (1000,): 2.0})
    assert grid.covers((4000,))
    assert not grid.covers((100_000,))


@pytest.mark.parametrize("disturbed", [1 << 10, 1 << 14, 1 << 18])
def test_a_stalled_measurement_is_bounded_by_its_neighbours(disturbed: int) -> None:
    """One stalled transfer of 1 KB priced 57 KB at 477 ms."""
    true = {(1 << at,): float(1 << at) for at in (10, 14, 18)}
    grid = Grid(true | {(disturbed,): 5e8})
    for size, ns in true.items():
        assert grid(size) <= 3.01 * 16 * ns
        assert grid(size) >= 0.99 * ns


def test_a_difference_below_the_noise_is_no_row() -> None:
    """A readback of 1 KB that came out at 0 ns leaves the price to the larger ones."""
    moved = (Row("readback", (1 << 10,), 0.0), Row("readback", (1 << 16,), 4e3), Row("readback", (1 << 18,), 16e3))
    assert model(*moved).readback_ns(1 << 15) == model(*moved[1:]).readback_ns(1 << 15) > 1000
