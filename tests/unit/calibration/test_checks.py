"""The last stage of a calibration: which graphs are compared with their predictions, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlx_ort.calibration import checks
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.calibration.references import ReferenceGraph
from rlx_ort.calibration.timing import Budget
from rlx_ort.device import Device
from rlx_ort.errors import RunError
from rlx_ort.ir.graph import Graph

_MS = 1_000_000


class Stage:
    """Graphs `g0`, `g1` and so on, of a time each, on a device whose clock they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: Any, times: dict[str, int], limit_s: float) -> None:
        self.now = 0
        self.times = times
        self.predicted: dict[str, dict[str, float]] = {}
        self.begun: list[str] = []
        self.closed: list[str] = []
        self.after: Callable[[], None] = lambda: None  # called when the graph of this name runs
        self.after_graph = ""
        self.profile: CalibrationProfile = here.profile()
        self.prober = Prober(Device.CUDA, Budget(limit_s, 0.015, lambda: self.now))
        graphs = tuple(ReferenceGraph(name, lambda name=name: (Graph(name), {})) for name in times)
        monkeypatch.setattr(checks, "REFERENCES", graphs)
        monkeypatch.setattr(checks, "terms_by_class", lambda graph, model: self.predicted.get(graph.name, _USUAL))
        monkeypatch.setattr(Prober, "compile", lambda prober, graph, options=None: Compiled(self, graph.name))

    def check(self) -> CalibrationProfile:
        """Return the profile after the stage."""
        return checks.check(self.profile, self.prober)


class Compiled:
    """A graph that is ready to run."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage = stage
        self.name = name
        stage.begun.append(name)

    def run(self, feeds: dict[str, Any]) -> None:
        """Let its time pass; a graph without one fails."""
        if not self.stage.times[self.name]:
            raise RunError("no such kernel\nand more")
        self.stage.now += self.stage.times[self.name]
        if self.name == self.stage.after_graph:
            self.stage.after()

    def close(self) -> None:
        """Note it."""
        self.stage.closed.append(self.name)


_USUAL = {"overhead": 0.2 * _MS, "product": 0.8 * _MS}


def test_each_graph_is_kept_with_its_time_and_its_terms(monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
    """What was measured is the median of its runs."""
    stage = Stage(monkeypatch, here, {"g0": 2 * _MS, "g1": 3 * _MS}, limit_s=10.0)
    assert [(row.name, row.ns, row.terms) for row in stage.check().references] == [
        ("g0", 2.0 * _MS, _USUAL),
        ("g1", 3.0 * _MS, _USUAL),
    ]


def test_graphs_that_take_longer_than_predicted_correct_the_class(monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
    """The round trip stays as it is, and the class at fault gets a factor above 1."""
    stage = Stage(monkeypatch, here, {f"g{at}": 2 * _MS for at in range(6)}, limit_s=10.0)
    corrections = stage.check().corrections
    assert corrections.keys() == {"product"}
    assert corrections["product"] > 1.3


def test_the_last_graphs_are_left_out_where_the_time_runs_out(monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
    """The limit is overshot by one graph at most, and what is missing is named."""
    stage = Stage(monkeypatch, here, {f"g{at}": 5 * _MS for at in range(100)}, limit_s=0.2)
    found = stage.check()
    assert 3 < len(found.references) < 100
    assert found.skipped["references"].startswith(f"no time for g{len(found.references)} ")
    assert stage.now < 0.24e9


def test_the_quicker_of_two_measurements_counts(monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
    """What slowed the machine down while all graphs were measured is gone when they are measured again."""
    stage = Stage(monkeypatch, here, {"g0": 4 * _MS, "g1": 3 * _MS}, limit_s=10.0)
    stage.after = lambda: stage.times.update(g0=2 * _MS)
    stage.after_graph = "g1"
    assert [(row.name, row.ns) for row in stage.check().references] == [("g0", 2.0 * _MS), ("g1", 3.0 * _MS)]


class SlowPace:
    """A host that is slow from when one graph is compiled to when the next one is."""

    limit_ns = 100.0

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage = stage
        self.name = name

    def now(self) -> float:
        """Return a slow pace while the last graph that ran is the one."""
        return 150.0 if self.stage.begun[-1] == self.name else 50.0


@pytest.mark.parametrize(("dispatch_ns", "kept"), [(3_000.0, ["g0", "g2"]), (50_000.0, ["g0", "g1", "g2"])])
def test_a_graph_launched_from_a_disturbed_host_is_left_out(
    monkeypatch: pytest.MonkeyPatch, here: Any, dispatch_ns: float, kept: list[str]
) -> None:
    """A GPU in software is no accelerator: what slows the host down slows it down as much."""
    stage = Stage(monkeypatch, here, {f"g{at}": 2 * _MS for at in range(3)}, limit_s=10.0)
    monkeypatch.setattr(stage.prober, "pace", SlowPace(stage, "g1"))
    stage.prober.launches(1e5, dispatch_ns)
    found = stage.check()
    assert [row.name for row in found.references] == kept
    assert found.skipped.get("disturbed", "").startswith("1 of 3" if len(kept) == 2 else "")


def test_sessions_are_closed_at_the_end(monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
    """Between the two measurements they stay open."""
    stage = Stage(monkeypatch, here, {"g0": 2 * _MS, "g1": 3 * _MS, "g2": 0}, limit_s=10.0)
    stage.check()
    assert sorted(stage.closed) == sorted(stage.begun) == ["g0", "g1", "g2"]


def test_a_graph_that_fails_is_passed_over(monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
    """Its reason is kept, in one line."""
    stage = Stage(monkeypatch, here, {"g0": 0, "g1": 2 * _MS}, limit_s=10.0)
    found = stage.check()
    assert [row.name for row in found.references] == ["g1"]
    assert found.skipped["g0"] == "no such kernel"


def test_a_graph_that_is_predicted_to_take_too_long_is_not_begun(monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
    """Eight times a point's time is the most."""
    stage = Stage(monkeypatch, here, {"g0": 2 * _MS, "g1": 2 * _MS}, limit_s=10.0)
    stage.predicted["g0"] = {"product": 121.0 * _MS}
    assert [row.name for row in stage.check().references] == ["g1"]
    assert stage.begun == ["g1"]


def test_a_profile_without_the_needed_rows_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
    """Nothing can be predicted from it, so nothing is measured."""
    stage = Stage(monkeypatch, here, {"g0": 2 * _MS}, limit_s=10.0)
    stage.profile = here.profile(rows=here.profile().rows[:1])
    assert stage.check() is stage.profile
    assert stage.begun == []
