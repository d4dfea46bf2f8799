"""What runs took corrects later predictions of the same graph and device, for some seconds."""

from __future__ import annotations

import gc
import weakref

import pytest

from rlx_ort import Device, Graph
from rlx_ort.calibration.learned import Learned

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


Run = tuple[float, tuple[tuple[str, int], ...], float]
RUNS: dict[str, tuple[list[Run], float, float]] = {  # seconds before a run, its size, and how long it took
    "a run just now counts in full": ([(0, SMALL, 4000)], 0, 4000),
    "half of the correction is left after three seconds": ([(0, SMALL, 4000)], 3, 2000),
    "none is left after nine": ([(0, SMALL, 1e6)], 9, PREDICTED),
    "a run of no time says nothing": ([(0, SMALL, 0)], 0, PREDICTED),
    "a run of another size counts half": ([(0, LARGE, 4000)], 0, 2000),
    "runs before a pause do not count": ([*[(0, SMALL, 1000)] * 8, (4, SMALL, 5000)], 0, 5000),
    "a new run of another size counts more than an old one": ([(0, SMALL, 1000), (6, LARGE, 4000)], 0, 2000),
}


@pytest.mark.parametrize(("runs", "later_s", "expected"), RUNS.values(), ids=RUNS)
def test_runs_correct_a_prediction_for_a_while(
    learned: Learned, graph: Graph, clock: Clock, runs: list[Run], later_s: float, expected: float
) -> None:
    """The logarithm of how far it was off fades."""
    for after_s, size, took_ns in runs:
        clock.now += after_s
        learned.note(graph, CPU, size, took_ns, PREDICTED)
    clock.now += later_s
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == pytest.approx(expected)


def test_a_long_run_is_remembered_for_longer(learned: Learned, graph: Graph, clock: Clock) -> None:
    """Of one that took a second half the correction is left after 20."""
    learned.note(graph, CPU, SMALL, 1e9, 1e7)
    clock.now += 20
    assert learned.corrected(graph, CPU, SMALL, 1e7) == pytest.approx(1e8)


def test_runs_of_before_do_not_count_beside_a_fresh_one(learned: Learned, graph: Graph) -> None:
    """A device that is tried again keeps or loses its place by that one run."""
    for _ in range(8):
        learned.note(graph, CPU, SMALL, 1000, PREDICTED)
    learned.note(graph, CPU, SMALL, 5000, PREDICTED, fresh=True)
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == pytest.approx(5000)


def test_the_median_of_the_last_runs_counts(learned: Learned, graph: Graph) -> None:
    """A few disturbed ones do not; of eight, five slow ones do."""
    for _ in range(8):
        learned.note(graph, CPU, SMALL, 1000, PREDICTED)
    found = []
    for _ in range(5):
        learned.note(graph, CPU, SMALL, 7000, PREDICTED)
        found.append(round(learned.corrected(graph, CPU, SMALL, PREDICTED)))
    assert found == [1000, 1000, 1000, 1000, 7000]


def test_runs_of_the_graph_as_it_was_before_it_grew_do_not_count(learned: Learned, graph: Graph) -> None:
    """It is another graph now."""
    learned.note(graph, CPU, SMALL, 4000, PREDICTED)
    graph.input("x", ["n"])
    assert learned.corrected(graph, CPU, SMALL, PREDICTED) == PREDICTED


def test_a_graph_is_not_kept_alive(learned: Learned) -> None:
    """What was learned goes with it."""
    graph = Graph("gone")
    learned.note(graph, CPU, SMALL, 4000, PREDICTED)
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


def test_memory_is_bounded(learned: Learned, graph: Graph) -> None:
    """The oldest of many sizes is forgotten, the newest is not."""
    for n in range(1000):
        learned.note(graph, CPU, (("n", n),), 4000, PREDICTED)
    assert sum(len(records) for records in learned._graphs.values()) <= 128
    assert learned.corrected(graph, CPU, (("n", 999),), PREDICTED) == pytest.approx(4000)
