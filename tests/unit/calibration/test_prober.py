"""The order in which sizes are measured, and where a series stops, on a device whose times are arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlx_ort.calibration import prober as prober_module
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.series import Point, Series, computing
from rlx_ort.calibration.timing import Budget
from rlx_ort.device import Device
from rlx_ort.errors import RunError
from rlx_ort.ir.graph import Graph

_MS = 1_000_000


class Machine:
    """A device whose runs move a clock: a round trip, and for each link as long as the tensor has elements in ns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, limit_s: float = 100.0, point_s: float = 0.015) -> None:
        self.now = 0
        self.opened: list[int] = []
        self.open = 0
        self.most_open = 0
        self.sizes: list[int] = []
        self.prober = Prober(Device.CPU, Budget(limit_s, point_s, lambda: self.now))
        monkeypatch.setattr(Prober, "compile", lambda prober, graph, options=None: self._compile(graph))

    def series(self, *sizes: int, links: int = 8, **more: Any) -> Series:
        """Return a series over vectors of so many elements."""
        points = tuple(Point((size,), (size,), float(size)) for size in sizes)
        return Series("op:Fake", lambda count: Graph(str(count)), points, links, **more)

    def rows(self) -> dict[tuple[int, ...], float]:
        """Return what was measured."""
        return {row.size: row.ns for row in self.prober.rows}

    def _compile(self, graph: Graph) -> Compiled:
        links = int(graph.name) if graph.name.isdigit() else 0
        if links:
            self.opened.append(links)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        return Compiled(self, links)


class Compiled:
    """A graph that is ready to run on such a device."""

    def __init__(self, machine: Machine, links: int) -> None:
        self.machine = machine
        self.links = links

    def run(self, feeds: dict[str, Any]) -> None:
        """Let the time of a run pass."""
        count = int(feeds["shape"].prod())
        if self.links and count not in self.machine.sizes:
            self.machine.sizes.append(count)
        if count == 666 and self.links:
            raise RunError("no such kernel")
        self.machine.now += 10_000 + self.links * count

    def close(self) -> None:
        """Note that it is closed."""
        self.machine.open -= 1


def test_a_row_is_the_time_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round trip and the other links are taken off."""
    machine = Machine(monkeypatch)
    machine.prober.run(machine.series(1000, 50_000), 1e12)
    assert machine.rows() == {(1000,): pytest.approx(1000.0), (50_000,): pytest.approx(50_000.0)}


def test_the_least_work_is_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the series, so that the next size's time is foreseen."""
    machine = Machine(monkeypatch)
    machine.prober.run(machine.series(30_000, 10, 2000), 1e12)
    assert machine.sizes == [10, 2000, 30_000]


def test_a_size_that_would_take_too_long_is_left_out_with_those_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of two links of 100 ms is beyond four times the 15 ms of a point, and is not even begun."""
    machine = Machine(monkeypatch)
    machine.prober.run(machine.series(1000, 100 * _MS), 1e12)
    assert list(machine.rows()) == [(1000,)]
    assert machine.sizes == [1000]
    assert "100000000" in machine.prober.skipped["op:Fake"]


def test_a_deadline_is_overshot_by_one_point_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are measured until the deadline, and what is begun then takes no longer than a point may."""
    machine = Machine(monkeypatch, point_s=0.001)
    deadline_ns = 5.0 * _MS
    machine.prober.run(machine.series(*range(1000, 20_000, 500)), deadline_ns)
    assert machine.rows()
    assert len(machine.rows()) < 38
    assert machine.now < deadline_ns + 2 * _MS


def test_nothing_is_opened_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says so."""
    machine = Machine(monkeypatch)
    machine.now = 10 * _MS
    machine.prober.run(machine.series(1000), 9.0 * _MS)
    assert (machine.opened, machine.rows()) == ([], {})
    assert machine.prober.skipped == {"op:Fake": "no time for f32"}


def test_a_long_chain_is_cut_where_a_few_links_take_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large size gets a session of its own with fewer links, and the same time a link."""
    machine = Machine(monkeypatch)
    machine.prober.run(machine.series(1000, 5 * _MS), 1e12)
    assert machine.opened[0] == 8
    assert machine.opened[-1] < 8
    assert machine.rows()[5 * _MS,] == pytest.approx(5.0 * _MS)


def test_a_chain_that_must_keep_its_links_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold weights are only cold if all of them take turns."""
    machine = Machine(monkeypatch)
    machine.prober.run(machine.series(1000, 5 * _MS, shortened=False), 1e12)
    assert set(machine.opened) == {8}


def test_one_session_is_open_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle threads of another would take the cores, and nothing is left open."""
    machine = Machine(monkeypatch)
    machine.prober.run(machine.series(1000, 5 * _MS), 1e12)
    assert (machine.most_open, machine.open) == (1, 0)


def test_a_failing_size_ends_the_series_and_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is kept, and the session is closed."""
    machine = Machine(monkeypatch)
    machine.prober.run(machine.series(10, 666, 5000), 1e12)
    assert list(machine.rows()) == [(10,)]
    assert machine.prober.skipped["op:Fake"] == "f32: no such kernel"
    assert machine.open == 0


def test_a_companion_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else a link does has been measured before."""
    machine = Machine(monkeypatch)
    machine.prober.run(machine.series(1000), 1e12)
    second = machine.series(1000, companion="op:Fake")
    machine.prober.run(Series("op:Second", second.build, second.points, companion="op:Fake"), 1e12)
    assert machine.prober.of("op:Second", (1000,)) == pytest.approx(0.0, abs=1.0)


def test_a_companion_without_lengths_is_taken_off_rows_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """An addition of as many elements takes as long, whatever the length of a row."""
    machine = Machine(monkeypatch)
    machine.prober.rows.append(Sample("op:Fake", (1000,), 400.0))
    machine.prober.run(
        Series("rows:Second", machine.series(1000).build, (Point((1000,), (1000, 8), 1000.0),), companion="op:Fake"),
        1e12,
    )
    assert machine.prober.of("rows:Second", (1000, 8)) == pytest.approx(600.0, abs=1.0)


def test_a_hurried_point_takes_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not everything would be reached, each size gets fewer runs."""
    spent = []
    for hurried in (False, True):
        machine = Machine(monkeypatch)
        machine.prober.hurried = hurried
        machine.prober.run(machine.series(1000), 1e12)
        spent.append(machine.now)
    assert spent[1] < spent[0] / 2


def test_a_probe_without_rows_is_foreseen_from_the_rate_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that take a second at the rate of products are not begun, though the probe has no row yet."""
    machine = Machine(monkeypatch)
    machine.prober.run(Series("gemm", machine.series().build, (computing((1000,), (1000,), 1e6),)), 1e12)
    machine.prober.run(Series("conv", machine.series().build, (computing((2000,), (2000,), 1e12),)), 1e12)
    assert machine.sizes == [1000]
    assert "2000" in machine.prober.skipped["conv"]


def _searching(monkeypatch: pytest.MonkeyPatch, machine: Machine, *, once: bool) -> None:
    """Make a device search for a kernel for 400 ms, at its first shape or at each new one."""
    run, searched = Compiled.run, set[int]()

    def search(compiled: Compiled, feeds: dict[str, Any]) -> None:
        count = int(feeds["shape"].prod())
        if compiled.links and count not in searched and not (once and searched):
            searched.add(count)
            machine.now += 400 * _MS
        run(compiled, feeds)

    monkeypatch.setattr(Compiled, "run", search)


def test_a_search_at_each_shape_is_foreseen_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that searches for a kernel at each new shape has no more shapes than there is time for."""
    machine = Machine(monkeypatch, limit_s=0.7)
    _searching(monkeypatch, machine, once=False)
    machine.prober.run(machine.series(1000, 2000, 3000), 700.0 * _MS)
    assert machine.sizes == [1000]
    assert machine.now < 700 * _MS


def test_loading_kernels_once_does_not_stop_a_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first shape of a probe takes beyond its runs is granted, as far as there is patience."""
    found = []
    for patience_ns in (0.0, 500.0 * _MS):
        machine = Machine(monkeypatch)
        with monkeypatch.context() as patched:
            _searching(patched, machine, once=True)
            machine.prober.run(machine.series(1000, 2000, 3000), 300.0 * _MS, patience_ns)
        found.append(machine.sizes)
    assert found == [[1000], [1000, 2000, 3000]]


def test_a_second_visit_keeps_the_quicker_time_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was slowed down the first time is put right, what is slowed down now stays as it was."""
    machine = Machine(monkeypatch)
    series = machine.series(1000, 2000)
    machine.prober.rows = [Sample("op:Fake", (1000,), 1500.0), Sample("op:Fake", (2000,), 1800.0)]
    machine.prober.revisit(series, 1e12)
    assert machine.rows() == pytest.approx({(1000,): 1000.0, (2000,): 1800.0}, abs=1.0)
    assert len(machine.prober.rows) == 2


def test_a_second_visit_without_time_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the first visit stay, and nothing is said to be missing."""
    machine = Machine(monkeypatch)
    machine.prober.rows = [Sample("op:Fake", (1000,), 1500.0)]
    machine.prober.revisit(machine.series(1000), 0.0)
    assert machine.rows() == {(1000,): 1500.0}
    assert not machine.prober.skipped


class SteadyPace:
    """A pace that the test sets; anything above 100 is slow."""

    limit_ns, usual_ns = 100.0, 80.0

    def __init__(self) -> None:
        self.ns = 50.0

    def now(self) -> float:
        """Return what the test says."""
        return self.ns


def calm_after_a_row(monkeypatch: pytest.MonkeyPatch, first_ns: float) -> Machine:
    """Return a machine that has measured a row of so many ns on a disturbed host, which is calm now."""
    machine = Machine(monkeypatch)
    pace = SteadyPace()
    monkeypatch.setattr(machine.prober, "pace", pace)
    pace.ns = 150.0
    machine.prober.run(machine.series(1000), 1e12)
    assert machine.prober.disturbed("op:Fake", (1000,))
    machine.prober.rows = [Sample("op:Fake", (1000,), first_ns)]
    pace.ns = 50.0
    machine.prober.frames.forget(pace.limit_ns)
    return machine


def test_a_row_from_a_disturbed_host_gives_way_to_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the later one took longer: a frame that was slowed down makes what is left too little."""
    machine = calm_after_a_row(monkeypatch, 700.0)
    machine.prober.revisit(machine.series(1000), 1e12, disturbed=True)
    assert machine.rows() == {(1000,): pytest.approx(1000.0)}
    assert not machine.prober.disturbed("op:Fake", (1000,))


@pytest.mark.parametrize(("first_ns", "kept_ns"), [(900.0, 900.0), (1500.0, 1000.0)])
def test_of_products_in_two_sessions_the_quicker_one_counts(
    monkeypatch: pytest.MonkeyPatch, first_ns: float, kept_ns: float
) -> None:
    """Whether it was disturbed or not: a session may be slow on a host that is as usual."""
    machine = calm_after_a_row(monkeypatch, first_ns)
    machine.prober.revisit(machine.series(1000), 1e12, quickest=True)
    assert machine.rows() == {(1000,): pytest.approx(kept_ns)}


def test_of_two_sessions_of_which_neither_is_better_the_mean_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The geometric one, of 4000 and 1000."""
    machine = calm_after_a_row(monkeypatch, 4000.0)
    machine.prober.revisit(machine.series(1000), 1e12, mean=True)
    assert machine.rows() == {(1000,): pytest.approx(2000.0)}


def test_how_much_slower_the_host_was_is_told_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """By half for one, within the limit for the other."""
    machine = Machine(monkeypatch)
    pace = SteadyPace()
    monkeypatch.setattr(machine.prober, "pace", pace)
    for size, ns in ((1000, 150.0), (2000, 90.0)):
        pace.ns = ns
        machine.prober.run(machine.series(size), 1e12)
    slower = {row.size: machine.prober.slower(row) for row in machine.prober.rows}
    assert slower == {(1000,): pytest.approx(150 / pace.usual_ns), (2000,): 1.0}


def test_a_row_keeps_how_slow_the_host_was_when_a_later_one_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row stays, and it is not of a disturbed host."""
    machine = Machine(monkeypatch)
    pace = SteadyPace()
    monkeypatch.setattr(machine.prober, "pace", pace)
    machine.prober.run(machine.series(1000), 1e12)
    machine.prober.rows = [dataclasses.replace(row, ns=row.ns - 1.0) for row in machine.prober.rows]
    pace.ns = 150.0
    machine.prober.revisit(machine.series(1000), 1e12)
    assert [machine.prober.slower(row) for row in machine.prober.rows] == [1.0]


def test_what_is_worth_it_waits_for_a_calm_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third look finds it calm."""
    machine, pauses = Machine(monkeypatch), []
    pace = SteadyPace()
    monkeypatch.setattr(machine.prober, "pace", pace)
    pace.ns = 150.0

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        pace.ns = 50.0 if len(pauses) == 2 else 150.0

    monkeypatch.setattr(prober_module.time, "sleep", pause)
    machine.prober.await_calm()
    assert len(pauses) == 2


@pytest.mark.parametrize(("quick", "most_s"), [(False, 0.1), (True, 0.0)])
def test_a_host_that_stays_disturbed_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, quick: bool, most_s: float
) -> None:
    """Nor at all by a short calibration."""
    machine, pauses = Machine(monkeypatch), []
    pace = SteadyPace()
    machine.prober.quick = quick
    monkeypatch.setattr(machine.prober, "pace", pace)
    pace.ns = 150.0
    monkeypatch.setattr(prober_module.time, "sleep", pauses.append)
    machine.prober.await_calm()
    assert sum(pauses) == pytest.approx(most_s)


def test_only_disturbed_sizes_are_measured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured on a host as usual is left alone."""
    machine = Machine(monkeypatch)
    pace = SteadyPace()
    monkeypatch.setattr(machine.prober, "pace", pace)
    machine.prober.run(machine.series(1000), 1e12)
    pace.ns = 150.0
    machine.prober.run(machine.series(2000), 1e12)
    pace.ns, machine.sizes = 50.0, []
    machine.prober.revisit(machine.series(1000, 2000), 1e12, disturbed=True)
    assert machine.sizes == [2000]


def test_a_frame_from_a_disturbed_host_makes_its_rows_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is what is left above its frame, so both have to be right."""
    machine = Machine(monkeypatch)
    pace = SteadyPace()
    monkeypatch.setattr(machine.prober, "pace", pace)
    pace.ns = 150.0
    machine.prober.frames.prepare([(1000,)])
    pace.ns = 50.0
    machine.prober.run(machine.series(1000), 1e12)
    assert machine.prober.disturbed("op:Fake", (1000,))


def test_the_severity_of_a_series_is_that_of_its_worst_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """By half above the pace, as a share, and not what other sizes of its probe had."""
    machine = Machine(monkeypatch)
    pace = SteadyPace()
    monkeypatch.setattr(machine.prober, "pace", pace)
    for size, ns in ((1000, 120.0), (2000, 150.0), (3000, 50.0)):
        pace.ns = ns
        machine.prober.run(machine.series(size), 1e12)
    series = [machine.series(*sizes) for sizes in ((1000, 2000), (1000,), (3000,))]
    assert [machine.prober.severity(one) for one in series] == pytest.approx([0.5, 0.2, 0.0])
