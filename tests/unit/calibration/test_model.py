"""Prices between the rows of a profile, beyond them, and without them; expected times are computed by hand."""

from __future__ import annotations

import pytest

from rlx_ort.calibration.features import Kernel
from rlx_ort.calibration.model import ERRORS, Grid, MeasuredCostModel
from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
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


def test_a_measured_size_has_its_measured_time() -> None:
    """Nothing is smoothed away."""
    assert model().price(Kernel("MatMul", (64, 64, 64))).ns == pytest.approx(4000.0)


def test_between_sizes_the_time_is_a_power_of_the_size() -> None:
    """Half way between the logarithms of 200 and 20,000 is 2,000."""
    assert model().price(add(10_000)).ns == pytest.approx(2000.0)


def test_a_weight_of_any_shape_is_priced_by_its_elements() -> None:
    """(128, 512) has as many as (256, 256)."""
    assert model().price(Kernel("MatMul", (1, 128, 512))).ns == pytest.approx(16_000.0)


def test_beyond_the_largest_size_the_addition_grows_with_its_elements() -> None:
    """Ten times the elements take ten times as long, since the grid grows like that already."""
    assert model().price(add(1_000_000)).ns == pytest.approx(200_000.0)


def test_an_operator_beyond_its_sizes_goes_as_the_addition_does() -> None:
    """It was measured once, at 1,000 elements, three times as slow as the addition."""
    price = model(Row("Exp", (1000,), 600.0)).price(Kernel("Exp", (100_000,)))
    assert price.ns == pytest.approx(60_000.0)
    assert price.how == "extrapolated"


def test_nothing_takes_less_than_most_of_a_launch() -> None:
    """A tiny tensor is launched as a large one is."""
    assert model().price(add(1)).ns == pytest.approx(80.0)


def test_a_kernel_that_was_measured_to_need_no_launch_takes_its_own_time() -> None:
    """Views of memory cost next to nothing."""
    assert model(Row("Reshape", (1024,), 20.0)).price(Kernel("View")).ns == pytest.approx(20.0)


def test_what_the_table_lacks_is_assumed_by_the_roofline() -> None:
    """10,000 elements are a tenth of the bytes of the largest addition, whose launch apart; the error is wide."""
    price = model().price(Kernel("Novel-1", (10_000,), "f32", 10_000.0, 120_000.0))
    assert price.ns == pytest.approx((20_000.0 - 100.0) / 10)
    assert price.how == "assumed"
    assert ERRORS["assumed"] >= 2.0


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


def test_rows_that_are_all_launch_say_nothing_about_the_rates() -> None:
    """Those that are shipped for the device stand; 12 KB in 4 us would be 3 bytes per ns."""
    assert few(*TINY).memory_bw() == 1000.0


def test_a_row_that_saturates_the_device_replaces_the_shipped_rate() -> None:
    """16 M elements in 104 us, of which a launch takes 4."""
    assert few(*TINY, Row("Add", (1 << 24,), 104_000.0)).memory_bw() == pytest.approx(12 * (1 << 24) / 100_000)


def test_a_small_product_that_is_slow_says_nothing_about_the_rates() -> None:
    """50 us for 4 MFLOP: its 64 columns leave most of a GPU idle."""
    model = few(*TINY, Row("MatMul", (512, 64 * 64), 50_000.0))
    large = model.price(Kernel("Attention-1", (1,), flops=1e10, nbytes=1e6)).ns
    assert large == pytest.approx(1e10 / 10_000)


def test_a_rate_that_a_row_shows_to_be_possible_is_never_priced_below() -> None:
    """1 M elements in 8 us are more than the shipped rate, with the launch included."""
    assert few(*TINY, Row("Add", (1 << 20,), 8000.0)).memory_bw() == pytest.approx(12 * (1 << 20) / 8000)


def test_a_large_kernel_beyond_rows_that_are_all_launch_is_priced_by_the_known_rates() -> None:
    """A product of 2 * 512 * 2048 * 2048 flops takes 430 us at 10,000 a ns, and 16 M elements 201 us."""
    price = few(*TINY).price(Kernel("MatMul", (512, 2048, 2048), "f32", 2.0 * 512 * 2048**2, 4.0 * 2048**2)).ns
    assert price == pytest.approx(4500 + 2 * 512 * 2048**2 / 10_000, rel=0.01)
    assert few(*TINY).price(add(1 << 24)).ns == pytest.approx(4200 + 12 * (1 << 24) / 1000, rel=0.01)


def test_what_was_measured_on_demand_comes_before_the_assumption() -> None:
    """The row is of the graph's own size."""
    price = model(Row("?Novel-1", (10_000,), 77_000.0)).price(Kernel("Novel-1", (10_000,), "f32", 1e4, 12e4))
    assert price == (77_000.0, "measured")


def test_a_size_far_from_what_was_measured_on_demand_is_an_extrapolation() -> None:
    """A hundred times the elements were never seen."""
    assert model(Row("?Novel-1", (10_000,), 77_000.0)).price(Kernel("Novel-1", (1_000_000,))).how == "extrapolated"


def test_a_loop_s_body_counts_as_often_as_it_runs() -> None:
    """Eight times, where nothing is known."""
    assert model().price(add(1000)._replace(times=8)).ns == pytest.approx(1600.0)


def test_a_round_trip_is_what_is_left_of_a_run() -> None:
    """Without its node, its input and its output."""
    assert model().roundtrip_overhead_ns() == pytest.approx(10_000.0 - 100.0 - 1000.0 - 2000.0)


def test_an_upload_takes_its_latency_and_its_bytes() -> None:
    """A small input's time, and what its bytes take beyond."""
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
