"""Measured figures become predictions: what was measured comes back, and the rest by arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.profile import Sample
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
from rlx_ort.selection.workload import Work


def model_of(here: Any, *more: Sample, device: Device = Device.CUDA) -> MeasuredCostModel:
    """Return the model of the test's profile with more rows."""
    profile = here.profile()
    return MeasuredCostModel(device, here.profile(rows=(*profile.rows, *more)))


def test_a_measured_product_costs_what_was_measured(here: Any) -> None:
    """At a point of the grid nothing is interpolated."""
    assert model_of(here).work_ns(Work("gemm", "MatMul", (64, 64, 64))) == pytest.approx(8000.0)


def test_the_round_trip_leaves_out_what_is_counted_elsewhere(here: Any) -> None:
    """Its one node, one input and one output are priced by themselves."""
    assert model_of(here).roundtrip_overhead_ns() == pytest.approx(10_000 - 1000 - 500 - 300)


def test_an_operator_is_priced_between_its_measured_sizes(here: Any) -> None:
    """From 1 us at 2^10 to 100 us at 2^20, the middle is 10 us."""
    assert model_of(here).work_ns(Work("op", "Add", (1 << 15,))) == pytest.approx(10_000.0)


def test_an_operator_without_rows_is_priced_like_a_coarser_one(here: Any) -> None:
    """Without Erf the hyperbolic tangent stands for it, without that the addition."""
    work = Work("op", "Erf", (1 << 20,))
    assert model_of(here).work_ns(work) == pytest.approx(100_000.0)
    tanh = (Sample("op:Tanh", (1024,), 2000.0), Sample("op:Tanh", (1 << 20,), 300_000.0))
    assert model_of(here, *tanh).work_ns(work) == pytest.approx(300_000.0)


def test_what_is_fused_costs_what_was_measured_beyond_the_product(here: Any) -> None:
    """A bias that adds nothing measurable is next to free."""
    free = model_of(here, Sample("fused:bias", (512,), 0.0), Sample("fused:bias", (65536,), 0.0))
    assert free.work_ns(Work("fused", "bias", (4096,))) < 50.0
    paid = model_of(here, Sample("fused:bias", (512,), 2500.0), Sample("fused:bias", (65536,), 2500.0))
    assert paid.work_ns(Work("fused", "bias", (4096,))) == pytest.approx(2500.0)


def test_a_transfer_is_a_small_input_and_its_bytes(here: Any) -> None:
    """The rows are what a large tensor takes beyond a small one."""
    model = model_of(here, Sample("upload", (1024,), 100.0), Sample("upload", (1 << 20,), 90_000.0))
    assert model.upload_ns(1 << 20) == pytest.approx(500.0 + 90_000.0)
    assert model.readback_ns(1 << 20) == pytest.approx(300.0)


def test_half_precision_is_priced_by_its_own_rows(here: Any) -> None:
    """A product in f16 that was measured at twice the speed takes half the time."""
    model = model_of(here, Sample("gemm", (64, 64, 64), 4000.0, "f16"))
    assert model.work_ns(Work("gemm", "MatMul", (64, 64, 64), dtype="f16")) == pytest.approx(4000.0)


def test_work_in_a_loop_counts_as_often_as_it_runs(here: Any) -> None:
    """Eight times the same piece takes eight times as long."""
    once, often = (Work("gemm", "MatMul", (64, 64, 64), times=times) for times in (1, 8))
    model = model_of(here)
    assert model.work_ns(often) == pytest.approx(8 * model.work_ns(once))


def test_a_profile_without_the_needed_rows_is_refused(here: Any) -> None:
    """The message names what is missing."""
    with pytest.raises(CalibrationError, match="dispatch"):
        MeasuredCostModel(Device.CUDA, here.profile(rows=here.profile().rows[:1]))


def test_a_quick_or_noisy_profile_expects_a_larger_error(here: Any) -> None:
    """What was measured badly is leant on less."""
    sure = model_of(here).error
    noisy = model_of(here, Sample("gemm", (8, 64, 64), 3000.0, spread=0.9)).error
    quick = MeasuredCostModel(Device.CUDA, here.profile(quick=True)).error
    assert sure < noisy
    assert sure < quick


def test_a_product_and_its_turned_shape_share_a_row(here: Any) -> None:
    """A chain goes from 16 to 256 and back, so what was measured is the mean of both."""
    model = model_of(here, Sample("gemm", (8, 16, 256), 3000.0))
    sizes = ((8, 16, 256), (8, 256, 16))
    assert [model.work_ns(Work("gemm", "MatMul", size)) for size in sizes] == pytest.approx([3000.0, 3000.0])


def test_a_fused_node_grows_as_the_node_alone_beyond_what_was_measured(here: Any) -> None:
    """One noisy row is not stretched to sizes nobody measured."""
    model = model_of(here, Sample("fused:gemm_act", (512,), 18_000.0), device=Device.CPU)
    small, large = (model.work_ns(Work("op", "Relu", (count,))) for count in (512, 1 << 20))
    assert model.work_ns(Work("fused", "gemm_act", (1 << 20,))) == pytest.approx(18_000.0 + large - small)


def test_on_an_accelerator_a_fused_node_takes_no_longer_than_alone(here: Any) -> None:
    """Its values lie in one memory, so a longer time is noise of the subtraction of two chains."""
    row, fused = Sample("fused:gemm_act", (512,), 18_000.0), Work("fused", "gemm_act", (512,))
    assert model_of(here, row, device=Device.CPU).work_ns(fused) == pytest.approx(18_000.0)
    on_cuda = model_of(here, row)
    assert on_cuda.work_ns(fused) == pytest.approx(on_cuda.work_ns(Work("op", "Relu", (512,))))


@pytest.mark.parametrize(("bias_ns", "act_ns"), [(10_000.0, 20.0), (20.0, 10_000.0), (700.0, 1200.0)])
def test_on_an_accelerator_a_bias_and_an_activation_are_bounded_together(
    here: Any, bias_ns: float, act_ns: float
) -> None:
    """The chain with the bias alone may come out too slow or too quick; the one with both tells what both take."""
    model = model_of(here, Sample("fused:bias", (512,), bias_ns), Sample("fused:gemm_act", (512,), act_ns))
    alone = sum(model.work_ns(Work("op", like, (512,))) for like in ("AddRow", "Relu"))
    both = sum(model.work_ns(Work("fused", like, (512,))) for like in ("bias", "gemm_act"))
    assert both == pytest.approx(min(bias_ns + act_ns, alone))


@pytest.mark.parametrize(
    ("row", "ns"), [(2000, 200_000.0), (1900, 200_000.0), (2500, 200_000.0), (2048, 800_000.0), (4096, 800_000.0)]
)
def test_rows_a_page_apart_are_reduced_more_slowly(here: Any, row: int, ns: float) -> None:
    """They take each other's place in a cache, so their own measurement counts, and for no others."""
    count = 1 << 20
    model = model_of(
        here,
        *(Sample("op:MaxOfGiven", (size,), 100_000.0 * size / count) for size in (1 << 18, count)),
        *(Sample("rows:MaxOfGiven", (size, 2000), 200_000.0 * size / count) for size in (1 << 18, count)),
        *(Sample("rows:MaxOfGiven", (size, 2048), 800_000.0 * size / count) for size in (1 << 18, count)),
    )
    assert model.work_ns(Work("op", "MaxOfGiven", (count, row))) == pytest.approx(ns, rel=0.03)


ALONE = Work("gemm", "MatMul", (8, 64, 64), first="input")


def alone(here: Any, chained_ns: float, alone_ns: float) -> MeasuredCostModel:
    """Return a model of a device that takes so long for a product within a chain, and for one alone."""
    return model_of(here, Sample("gemm", (8, 64, 64), chained_ns), Sample("alone", (8, 64, 64), alone_ns))


def test_the_first_product_of_a_run_takes_what_one_alone_takes(here: Any) -> None:
    """On an accelerator it waits for its launch, and those after it do not."""
    model = alone(here, 5000.0, 15_000.0)
    assert model.work_ns(ALONE) == pytest.approx(15_000.0)
    assert model.work_ns(ALONE._replace(first="")) == pytest.approx(5000.0)


def test_a_launch_does_not_grow_with_the_product(here: Any) -> None:
    """A product of 512 times the rows waits for its launch as long as a small one."""
    model = alone(here, 5000.0, 15_000.0)
    large = ALONE._replace(size=(4096, 64, 64))
    assert model.work_ns(large) - model.work_ns(large._replace(first="")) == pytest.approx(10_000.0)


def test_a_little_longer_alone_is_no_launch(here: Any) -> None:
    """A product of 1.6 ms that took 76 us longer by chance does not make one of 4 us take 80."""
    rows = [Sample("gemm", (512, 512, 512), 1_624_000.0), Sample("alone", (512, 512, 512), 1_700_000.0)]
    model = model_of(here, *rows, Sample("gemm", (8, 64, 64), 4000.0))
    assert model.work_ns(ALONE) == pytest.approx(4000.0, rel=0.05)


def test_what_a_product_alone_saves_is_a_share(here: Any) -> None:
    """Where no core fetches rows from others, a larger product saves more."""
    model = alone(here, 5000.0, 4000.0)
    large = ALONE._replace(size=(4096, 64, 64))
    assert model.work_ns(large) == pytest.approx(0.8 * model.work_ns(large._replace(first="")))


def test_a_product_alone_is_like_the_nearest_that_was_measured(here: Any) -> None:
    """One row saves half where one row was measured to, and many rows a tenth where many were."""
    few, many = (1, 1024, 1024), (512, 1024, 1024)
    model = model_of(
        here,
        *(Sample("gemm", size, 1e5) for size in (few, many)),
        *(Sample("alone", size, ns) for size, ns in ((few, 5e4), (many, 9e4))),
    )
    alone = [model.work_ns(Work("gemm", "MatMul", size, first="input")) for size in (few, many)]
    assert alone == pytest.approx([5e4, 9e4], rel=0.01)


def test_a_skewed_product_alone_is_told_by_a_skewed_one(here: Any) -> None:
    """In a chain its skew takes half as long again; alone it takes as long as a square."""
    square, skewed = (128, 512, 512), (128, 256, 1024)
    rows = [Sample("gemm", square, 1e5), Sample("gemm", (32, 256, 1024), 3e4), Sample("gemm", (32, 512, 512), 2e4)]
    model = model_of(here, *rows, Sample("alone", skewed, 1e5))
    assert model.work_ns(Work("gemm", "MatMul", skewed)) == pytest.approx(1.5e5)
    assert model.work_ns(Work("gemm", "MatMul", skewed, first="input")) == pytest.approx(1e5)


def test_the_first_product_after_another_node_takes_a_share_longer(here: Any) -> None:
    """The node waits for every core that has read its rows before, which costs more for more rows: it is no launch."""
    model = model_of(here, Sample("gemm", (8, 64, 64), 5000.0), Sample("after", (8, 64, 64), 10_000.0))
    small = ALONE._replace(first="node")
    large = small._replace(size=(4096, 64, 64))
    assert model.work_ns(small) == pytest.approx(10_000.0)
    assert model.work_ns(large) == pytest.approx(2 * model.work_ns(large._replace(first="")))


def test_the_first_product_after_another_node_is_any_other_where_that_was_not_measured(here: Any) -> None:
    """On an accelerator the device is at work already when it comes."""
    model = alone(here, 5000.0, 15_000.0)
    assert model.work_ns(ALONE._replace(first="node")) == pytest.approx(5000.0)


def test_a_depthwise_convolution_goes_by_its_elements(here: Any) -> None:
    """Four times the channels with a quarter of the pixels are as many elements."""
    model = model_of(here, Sample("depthwise", (784, 64), 18_000.0), Sample("depthwise", (12_544, 64), 57_000.0))
    assert model.work_ns(Work("depthwise", "Conv", (196, 256))) == pytest.approx(18_000.0)


def test_a_correction_of_transfers_leaves_bandwidth_as_it_was_measured(here: Any) -> None:
    """What each value takes is halved, what its bytes take is not."""
    rows = (Sample("tensor_in", (), 8000.0), Sample("upload", (4096,), 2000.0))
    model = model_of(here, *rows)
    halved = MeasuredCostModel(model.device, dataclasses.replace(model.profile, corrections={"transfer": 0.5}))
    assert model.upload_ns(4096) == pytest.approx(10_000.0)
    assert halved.upload_ns(4096) == pytest.approx(6000.0)


def test_a_time_that_drowned_in_noise_does_not_drag_down_its_neighbour(here: Any) -> None:
    """A subtraction that left nothing, with runs far apart, says less than a steady row."""
    rows = (Sample("fused:bias", (512,), 18_000.0, spread=0.04), Sample("fused:bias", (8192,), 0.0, spread=1.6))
    model = model_of(here, *rows, device=Device.CPU)
    assert model.work_ns(Work("fused", "bias", (512,))) == pytest.approx(18_000.0, rel=0.05)


def test_a_batch_beyond_the_measured_ones_is_priced_by_a_large_product(here: Any) -> None:
    """At most twice the product with as many rows."""
    model = model_of(here, Sample("bmm", (8, 16, 64), 50_000.0))
    large = Work("bmm", "MatMul", (64, 64, 64, 64), 2.0 * 64**4)
    rows = model.work_ns(Work("gemm", "MatMul", (64 * 64, 64, 64)))
    assert model.work_ns(large) == pytest.approx(2 * rows)


def test_a_slow_operator_grows_in_proportion_beyond_its_largest_size(here: Any) -> None:
    """Ten times an addition is not held up by memory, so 64 times the elements take 64 times as long."""
    model = model_of(here, Sample("op:Tanh", (1 << 14,), 63_096.0))
    assert model.work_ns(Work("op", "Tanh", (1 << 20,))) == pytest.approx(64 * 63_096.0)


def test_a_quick_operator_grows_as_the_addition_does(here: Any) -> None:
    """The addition takes 100,000 ns for 1 << 20 elements, and 10 to the power 3.8 for 1 << 14."""
    model = model_of(here, Sample("op:Tanh", (1 << 14,), 2 * 10**3.8))
    assert model.work_ns(Work("op", "Tanh", (1 << 20,))) == pytest.approx(200_000.0)


def test_a_small_tensor_alone_does_not_tell_what_a_large_one_takes(here: Any) -> None:
    """Five times an addition of 1024 elements is what launching takes: a large one is priced as an addition."""
    model = model_of(here, Sample("op:Mul", (1024,), 5000.0))
    assert model.work_ns(Work("op", "Mul", (1 << 20,))) == pytest.approx(100_000.0)


def test_a_lookup_has_rows_of_its_own_or_those_of_a_copy(here: Any) -> None:
    """Only a CPU's calibration tells the two apart."""
    copied = Sample("op:Gather", (1 << 18,), 40_000.0)
    lookup = Work("op", "Lookup", (1 << 18,))
    assert model_of(here, copied).work_ns(lookup) == pytest.approx(40_000.0)
    both = model_of(here, copied, Sample("op:Lookup", (1 << 18,), 15_000.0))
    assert both.work_ns(lookup) == pytest.approx(15_000.0)
    assert both.work_ns(lookup._replace(like="Gather")) == pytest.approx(40_000.0)


def test_a_reduction_of_an_input_has_rows_of_its_own_or_those_of_a_result(here: Any) -> None:
    """Only a CPU's calibration tells the two apart."""
    computed = Sample("op:MaxColumns", (1 << 18,), 40_000.0)
    given = Work("op", "MaxOfGiven", (1 << 18, 900))
    assert model_of(here, computed).work_ns(given) == pytest.approx(40_000.0)
    both = model_of(here, computed, Sample("op:MaxOfGiven", (1 << 18,), 15_000.0))
    assert both.work_ns(given) == pytest.approx(15_000.0)
    assert both.work_ns(given._replace(like="MaxColumns")) == pytest.approx(40_000.0)


def test_a_few_long_rows_do_not_tell_what_many_take(here: Any) -> None:
    """Sixteen rows keep a core or two busy: the usual ones tell more about a thousand long ones."""
    usual = (Sample("op:ReduceMean", (1 << 14,), 8_000.0), Sample("op:ReduceMean", (1 << 20,), 30_000.0))
    few = Sample("rows:ReduceMean", (1 << 14, 1024), 11_000.0)
    assert model_of(here, *usual, few).work_ns(Work("op", "ReduceMean", (1 << 20, 1024))) == pytest.approx(30_000.0)


def test_the_length_of_a_row_counts_where_it_was_measured(here: Any) -> None:
    """Rows a quarter as long take three times as long in all, as they were seen to."""
    usual = (Sample("op:Softmax", (1024,), 2000.0), Sample("op:Softmax", (1 << 20,), 200_000.0))
    short = (Sample("rows:Softmax", (1024, 64), 6000.0), Sample("rows:Softmax", (1 << 20, 64), 600_000.0))
    model = model_of(here, *usual, *short)
    assert model.work_ns(Work("op", "Softmax", (1 << 20, 256))) == pytest.approx(200_000.0)
    assert model.work_ns(Work("op", "Softmax", (1 << 20, 64))) == pytest.approx(600_000.0)


def test_a_few_short_rows_do_not_tell_what_many_take(here: Any) -> None:
    """Where only a small tensor was measured in short rows, large ones are priced as of the usual length."""
    usual = (Sample("op:Softmax", (1024,), 2000.0), Sample("op:Softmax", (1 << 20,), 200_000.0))
    model = model_of(here, *usual, Sample("rows:Softmax", (1024, 64), 8000.0))
    assert model.work_ns(Work("op", "Softmax", (1 << 20, 64))) == pytest.approx(200_000.0)
