"""What runs took corrects later predictions of the same graph and device, for some seconds."""

from __future__ import annotations

import gc
import math
import weakref

import pytest

from rlx_ort.calibration.learned import Learned
from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph

CPU, CUDA = Device.CPU, Device.CUDA
SMALL, LARGE = (("n", 2),), (("n", 64),)
PREDICTED = 1000.0


class Clock:
    """A clock that is set by hand, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Return a clock that stands still."""
    return Clock()


@pytest.fixture
def learned(clock: Clock) -> Learned:
    """Return what has learned nothing yet."""
    return Learned(clock)


@pytest.fixture
def graph() -> Graph:
    """Return an empty graph."""
    return Graph("learned")


def test_a_first_prediction_is_untouched(learned: Learned, graph: Graph) -> None:
    """Nothing is known of the graph, then nothing of the device."""
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == PREDICTED
    learned.note(graph, CUDA, SMALL, 4000, PREDICTED)
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == PREDICTED


def test_a_run_just_now_counts_in_full(learned: Learned, graph: Graph) -> None:
    """The prediction becomes what was measured."""
    learned.note(graph, CPU, SMALL, 4000, PREDICTED)
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == pytest.approx(4000)


def test_after_three_seconds_half_the_correction_is_left(learned: Learned, graph: Graph, clock: Clock) -> None:
    """Half of the logarithm: four times as slow becomes twice."""
    learned.note(graph, CPU, SMALL, 4000, PREDICTED)
    clock.now += 3
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == pytest.approx(2000)


def test_after_nine_seconds_a_run_is_forgotten(learned: Learned, graph: Graph, clock: Clock) -> None:
    """However slow it was."""
    learned.note(graph, CPU, SMALL, 1e6, PREDICTED)
    clock.now += 9
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == PREDICTED


def test_a_long_run_is_remembered_for_longer(learned: Learned, graph: Graph, clock: Clock) -> None:
    """Of one that took a second half the correction is left after 20."""
    learned.note(graph, CPU, SMALL, 1e9, 1e7)
    clock.now += 20
    assert learned.corrected(graph, CPU, SMALL, 1e7) == pytest.approx(1e8)


def test_the_median_of_the_last_runs_counts(learned: Learned, graph: Graph) -> None:
    """A few disturbed ones do not; of eight, five slow ones do."""
    for _ in range(8):
        learned.note(graph, CPU, SMALL, 1000, PREDICTED)
    found = []
    for _ in range(5):
        learned.note(graph, CPU, SMALL, 7000, PREDICTED)
        found.append(round(learned.corrected(graph, CPU, SMALL, PREDICTED)))
    assert found == [1000, 1000, 1000, 1000, 7000]


def test_runs_of_before_do_not_count_beside_a_fresh_one(learned: Learned, graph: Graph) -> None:
    """A device that is tried again keeps or loses its place by that one run."""
    for _ in range(8):
        learned.note(graph, CPU, SMALL, 1000, PREDICTED)
    learned.note(graph, CPU, SMALL, 5000, PREDICTED, fresh=True)
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == pytest.approx(5000)


def test_runs_before_a_pause_do_not_count_beside_a_new_one(learned: Learned, graph: Graph, clock: Clock) -> None:
    """After three seconds a device may be another."""
    for _ in range(8):
        learned.note(graph, CPU, SMALL, 1000, PREDICTED)
    clock.now += 4
    learned.note(graph, CPU, SMALL, 5000, PREDICTED)
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == pytest.approx(5000)


def test_a_clock_that_stands_still_says_nothing(learned: Learned, graph: Graph) -> None:
    """A run of 0 ns is no measurement."""
    learned.note(graph, CPU, SMALL, 0, PREDICTED)
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == PREDICTED


def test_runs_of_another_size_count_half(learned: Learned, graph: Graph) -> None:
    """By how much they were off their own prediction."""
    learned.note(graph, CPU, LARGE, 40_000, 10_000)
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == pytest.approx(2000)


def test_a_new_run_of_another_size_counts_more_than_an_old_one_of_the_same(
    learned: Learned, graph: Graph, clock: Clock
) -> None:
    """After six seconds a quarter of the old one is left."""
    learned.note(graph, CPU, SMALL, 1000, PREDICTED)
    clock.now += 6
    learned.note(graph, CPU, LARGE, 40_000, 10_000)
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == pytest.approx(2000)


def test_runs_of_the_graph_as_it_was_before_it_grew_do_not_count(learned: Learned, graph: Graph) -> None:
    """It is another graph now."""
    learned.note(graph, CPU, SMALL, 4000, PREDICTED)
    graph.input("x", ["n"])
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == PREDICTED


def test_memory_is_bounded(learned: Learned, graph: Graph) -> None:
    """The oldest of many sizes is forgotten, the newest is not."""
    for n in range(1000):
        learned.note(graph, CPU, (("n", n),), 4000, PREDICTED)
    assert sum(len(records) for records in learned._graphs.values()) <= 128
    assert learned.corrected(graph, CPU, (("n", 999),), PREDICTED) == pytest.approx(4000)


def test_a_graph_is_not_kept_alive(learned: Learned) -> None:
    """What was learned goes with it."""
    graph = Graph("gone")
    learned.note(graph, CPU, SMALL, 4000, PREDICTED)
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


def test_a_clock_that_goes_back_is_no_error(learned: Learned, graph: Graph, clock: Clock) -> None:
    """The run counts as new."""
    learned.note(graph, CPU, SMALL, 4000, PREDICTED)
    clock.now -= 50
    assert math.isclose(learned.corrected(graph, CPU, SMALL, PREDICTED), 4000)
