"""Sizes that come back get sessions of their own: on CPU sessions that record with a driver on the host, on CUDA."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import pytest
from doubles.fake_recorder import FakeRecorder, record_whatever_the_clock_says
from fault_provider import until

from rlx_ort import CompileOptions, EngineError, GraphDevices
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.device import Device
from rlx_ort.execution import engine as engine_module
from rlx_ort.execution import sized, tunings
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph
from rlx_ort.providers.base import MemoryReading, SizedRun
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.engine.recipe import Recording
from rlx_ort.providers.engine.replays import Copy, NotRecordedError


def graph() -> Graph:
    """Return `x * w + 1` over an open number of rows."""
    made = Graph("sized")
    x = made.input("x", ["rows", 4])
    made.outputs = [x * made.param("w", [4], data=np.arange(4, dtype=np.float32)) + 1.0]
    return made


def rows(count: int, value: float = 3.0) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs with so many rows."""
    return {"x": np.full((count, 4), value, np.float32)}


def result(count: int, value: float = 3.0, weight: float = 1.0) -> np.ndarray[Any, Any]:
    """Return what the graph gives for `rows`."""
    return np.tile(np.arange(4, dtype=np.float32) * weight * value + 1, (count, 1))


@pytest.fixture
def replanning(monkeypatch: pytest.MonkeyPatch, jobs: list[Callable[[], None]]) -> list[Callable[[], None]]:
    """Let all sessions record, those of open sizes like ones with convolutions."""
    original = CpuProvider.recipe

    def recipe(self: CpuProvider, device: Device, options: CompileOptions) -> Any:
        made = original(self, device, options.with_(dims={"rows": 1}))
        return dataclasses.replace(made, replans=not options.dims)

    monkeypatch.setattr(CpuProvider, "recipe", recipe)
    return jobs


def test_sizes_in_turns_have_sessions_where_each_change_would_plan_anew(
    replanning: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if they are not faster than a recording that the next size would end; one size alone has none."""
    monkeypatch.setattr(sized, "WORTH", 0.0)
    compiled = Session("cpu").compile(graph())
    run_often(compiled, 3, 20)
    replanning.pop()()
    assert [found.state for found in sizes_of(compiled)] == ["refused"]
    assert compiled.device_graph_report().recorded
    monkeypatch.setattr(sized, "WORTH_IN_TURNS", 1e9)
    for _ in range(2 * sized.AFTER_RUNS):
        for count in (3, 5):
            run_often(compiled, count, 1)
            finish(replanning)
    assert {found.sizes for found in sizes_of(compiled)} == {"x [3, 4]", "x [5, 4]"}
    for count in (3, 5, 7, 3, 5):
        run_often(compiled, count, 2)


def test_sizes_in_turns_have_no_sessions_where_their_recordings_last(
    replanning: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take the device's memory once more for each size, and gain nothing."""
    monkeypatch.setattr(FakeRecorder, "lasts", lambda self, recording: True)
    compiled = Session("cpu").compile(graph())
    for count in (3, 5, 7) * (2 * sized.AFTER_RUNS):
        run_often(compiled, count, 1)
    assert not replanning
    assert not sizes_of(compiled)
    assert len(compiled.device_graph_report().recorded) == 3


def test_the_session_of_a_size_opens_when_it_is_asked_for(
    replanning: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept though it is no faster than a run whose plans another size would end, and opened once."""
    monkeypatch.setattr(sized, "WORTH", 0.0)
    compiled = Session("cpu").compile(graph())
    assert compiled.replans
    assert compiled.open_sized(rows(3))
    assert compiled.open_sized(rows(3))
    assert [(found.sizes, found.state) for found in sizes_of(compiled)] == [("x [3, 4]", "used")]
    run_often(compiled, 3)
    run_often(compiled, 5, 2)
    assert not replanning


def test_no_session_is_opened_for_a_size_that_gains_nothing_by_one(jobs: list[Callable[[], None]]) -> None:
    """Or where inputs have no open sizes."""
    compiled = Session("cpu", CompileOptions(dims={"rows": 3})).compile(graph())
    assert not compiled.replans
    assert not compiled.open_sized(rows(3))
    assert not Session("cpu", CompileOptions(device_graph=False)).compile(graph()).open_sized(rows(3))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, jobs: list[Callable[[], None]]) -> list[Callable[[], None]]:
    """Let all sessions record, those of open sizes too, and keep tunings apart from those of other tests."""
    original = CpuProvider.recipe
    monkeypatch.setattr(
        CpuProvider, "recipe", lambda self, device, options: original(self, device, options.with_(dims={"rows": 1}))
    )
    return jobs


def test_a_size_has_a_session_where_a_faster_variant_was_found_for_it(
    recording: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though the session of open sizes is recorded and leaves nothing to gain otherwise; others have none."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sized, "WORTH", 1e9)
    slot = Session("cpu", CompileOptions(dims={"rows": 3})).compile(graph())._slot
    key = tunings.key_of(slot.provider, slot.device, slot.exported, slot.options)
    assert key is not None
    record = {
        "device": "cpu",
        "sizes": {"rows": 3},
        "variant": {"spinning": False},
        "graph": tunings.digest_of(graph()),
    }
    assert tunings.keep(key, record)
    compiled = Session("cpu").compile(graph())
    for count in (3, 5):
        run_often(compiled, count, 20)
        finish(recording)
    assert compiled.device_graph_report().recorded
    assert [(found.sizes, found.state) for found in sizes_of(compiled)] == [("x [3, 4]", "used")]


def test_a_size_that_seldom_changes_has_no_session_that_is_not_faster(
    replanning: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One new plan in forty runs costs less than forty slower runs."""
    monkeypatch.setattr(sized, "WORTH", 0.0)
    monkeypatch.setattr(sized, "WORTH_IN_TURNS", 1e9)
    compiled = Session("cpu").compile(graph())
    for count in (3, 5):
        run_often(compiled, count, 40)
        finish(replanning)
    assert {found.state for found in sizes_of(compiled)} == {"refused"}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[Callable[[], None]]]:
    """Make CPU sessions record, only those with fixed sizes with success, and collect what runs in the background.

    The others cannot begin to record, or with the parameter `choosy` they record five rows alone.
    """
    Session("cpu")  # the probe's session must not be among them
    original = CpuProvider.recipe
    opens = getattr(request, "param", "") == "choosy"

    def recipe(self: CpuProvider, device: Device, options: CompileOptions) -> Any:
        def opened() -> FakeRecorder:
            if not options.dims and not opens:
                raise NotRecordedError("a node computes sizes on the host")
            return FakeRecorder() if options.dims else Choosy()

        recording = Recording(opened, options.device_graph is True) if options.device_graph else None
        return dataclasses.replace(original(self, device, options), recording=recording)

    found: list[Callable[[], None]] = []
    monkeypatch.setattr(CpuProvider, "recipe", recipe)
    record_whatever_the_clock_says(monkeypatch)
    monkeypatch.setattr(sized, "WORTH", 1e9)
    monkeypatch.setattr(sized, "_in_thread", found.append)
    yield found
    found.clear()


def sizes_of(compiled: CompiledGraph) -> tuple[SizedRun, ...]:
    """Return what became of the sizes that came back."""
    found = compiled.device_graph_report().sized
    assert found is not None
    return found


def finish(jobs: list[Callable[[], None]]) -> None:
    """Do what waits in the background."""
    while jobs:
        jobs.pop()()


def run_often(compiled: CompiledGraph, count: int, times: int = sized.AFTER_RUNS) -> None:
    """Run as often as a session of its own takes, and compare each result."""
    for value in range(times):
        np.testing.assert_array_equal(compiled.run(rows(count, value))[0], result(count, value))


def test_a_size_that_comes_back_has_a_session_that_records(jobs: list[Callable[[], None]]) -> None:
    """Its runs are replayed, and those of other sizes go on as before."""
    compiled = Session("cpu").compile(graph())
    run_often(compiled, 3)
    assert [found.state for found in sizes_of(compiled)] == ["opening"]
    jobs.pop()()
    report = compiled.device_graph_report()
    assert [(found.sizes, found.state) for found in sizes_of(compiled)] == [("x [3, 4]", "used")]
    assert [one.inputs for one in report.recorded] == [{"x": "float32[3, 4]"}]
    assert report.reason
    run_often(compiled, 3)
    run_often(compiled, 5, 3)


class Choosy(FakeRecorder):
    """Records runs over five rows alone."""

    def record(self, copies_in: Sequence[Copy], run: Callable[[], None], copies_out: Sequence[Copy]) -> Any:
        """Refuse other sizes."""
        self.refusal = "" if [size for *_, size in copies_in] == [rows(5)["x"].nbytes] else "sizes come from the host"
        return super().record(copies_in, run, copies_out)


@pytest.mark.parametrize("jobs", ["choosy"], indirect=True)
def test_a_size_whose_recording_is_refused_has_one_though_others_are_recorded(jobs: list[Callable[[], None]]) -> None:
    """Neither a size that came once nor one that is recorded keeps it waiting."""
    compiled = Session("cpu").compile(graph())
    run_often(compiled, 7, 1)
    run_often(compiled, 5, 20)
    run_often(compiled, 3, 2 * sized.AFTER_RUNS)
    assert [(found.sizes, found.state) for found in sizes_of(compiled)] == [("x [3, 4]", "opening")]
    jobs.pop()()
    run_often(compiled, 3)
    recorded = [one.inputs for one in compiled.device_graph_report().recorded]
    assert recorded == [{"x": "float32[5, 4]"}, {"x": "float32[3, 4]"}]


def test_sizes_that_do_not_come_back_have_none(jobs: list[Callable[[], None]]) -> None:
    """No session is opened for a size that was seen a few times."""
    compiled = Session("cpu").compile(graph())
    for count in range(1, 20):
        run_often(compiled, count, sized.AFTER_RUNS - 1)
    assert jobs == []


def test_there_are_at_most_as_many_as_the_options_say(jobs: list[Callable[[], None]]) -> None:
    """None with 0."""
    compiled = Session("cpu", CompileOptions(sized_sessions=2)).compile(graph())
    for count in (1, 2, 3):
        run_often(compiled, count)
        finish(jobs)
    assert [found.sizes for found in sizes_of(compiled)] == ["x [1, 4]", "x [2, 4]"]
    without = Session("cpu", CompileOptions(sized_sessions=0)).compile(graph())
    run_often(without, 1, 20)
    assert jobs == []
    assert without.device_graph_report().sized is None


def test_their_weights_take_a_share_of_the_memory_at_most(
    jobs: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one would be too much; here the memory in use cannot be read."""
    monkeypatch.setattr(CpuProvider, "memory", lambda *_: None)
    compiled = Session("cpu").compile(graph())
    engine = compiled.engine()
    assert engine.sized is not None
    engine.sized.most_bytes = 20
    for count in (1, 2):
        run_often(compiled, count)
        finish(jobs)
    assert [found.state for found in sizes_of(compiled)] == ["used", "refused"]


def test_the_memory_that_they_really_take_counts_and_no_more_are_opened_without_room(
    jobs: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 1 GB by the provider's reading, of the 1.5 GB that all may take."""
    taken = iter(range(0, 10 << 30, 1 << 30))
    monkeypatch.setattr(CpuProvider, "memory", lambda *_: MemoryReading(next(taken), whole=True, source="a test"))
    facts = dataclasses.replace(engine_module.availability(Device.CPU), memory_bytes=24 << 30)
    monkeypatch.setattr(engine_module, "availability", lambda device: facts)
    compiled = Session("cpu").compile(graph())
    for count in (1, 2, 3):
        run_often(compiled, count)
        finish(jobs)
    assert [(found.sizes, found.state) for found in sizes_of(compiled)] == [
        ("x [1, 4]", "used"),
        ("x [2, 4]", "refused"),
    ]
    assert sizes_of(compiled)[0].nbytes == 1 << 30
    assert "2048 MB with it are more than 1536 MB" in sizes_of(compiled)[1].reason


def test_a_wrong_session_is_refused_with_the_reason(
    jobs: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs go on in the plain session."""
    compiled = Session("cpu").compile(graph())
    run_often(compiled, 3)
    monkeypatch.setattr(sized, "_same", lambda got, want, tolerance: False)
    jobs.pop()()
    (found,) = sizes_of(compiled)
    assert found.state == "refused"
    assert "differs by" in found.reason
    run_often(compiled, 3, 20)
    assert jobs == []


def off_by(little: float, inside: str = "f32") -> Graph:
    """Return `x * w + 1 + little`, a part of it by way of another dtype."""
    made = graph()
    made.outputs = [made.add(made.outputs[0].cast(inside).cast("f32"), little, name="y")]
    return made


@pytest.mark.parametrize(
    ("inside", "precision", "state"), [("f32", "f16", "used"), ("f16", "f32", "used"), ("f32", "f32", "refused")]
)
def test_a_session_may_differ_by_the_rounding_of_what_the_model_computes_in(
    jobs: list[Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    inside: str,
    precision: str,
    state: str,
) -> None:
    """The session of the size has the exact results here; the plain one is off by more than 1e-4."""
    exact, original = Session("cpu").compile(off_by(0.0, "f64")), engine_module._sized_slot
    monkeypatch.setattr(engine_module, "_sized_slot", lambda slot, key: original(exact._slot, key))
    compiled = Session("cpu", CompileOptions(precision=precision)).compile(off_by(0.0005, inside))
    for _ in range(sized.AFTER_RUNS):
        compiled.run(rows(3, 0.1))
    jobs.pop()()
    assert [found.state for found in sizes_of(compiled)] == [state], sizes_of(compiled)


@pytest.fixture
def slower(jobs: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> CompiledGraph:
    """Return a graph that had its first trial of a session for three rows, where none is fast enough."""
    monkeypatch.setattr(sized, "WORTH", 0.0)
    compiled = Session("cpu").compile(graph())
    run_often(compiled, 3)
    jobs.pop()()
    return compiled


def test_a_session_that_is_not_faster_is_refused(slower: CompiledGraph) -> None:
    """It would take memory for nothing."""
    (found,) = sizes_of(slower)
    assert (found.state, "a plain one" in found.reason) == ("refused", True)


def test_a_session_that_was_slower_is_tried_again_after_more_runs(
    slower: CompiledGraph, jobs: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other work on the device may have spoilt the times; each further try comes after many more runs."""
    run_often(slower, 3, 1_019)
    assert not jobs
    run_often(slower, 3, 1)
    jobs.pop()()
    run_often(slower, 3, 15_359)
    assert (len(jobs), [found.state for found in sizes_of(slower)]) == (0, ["refused"])
    monkeypatch.setattr(sized, "WORTH", 1e9)
    run_often(slower, 3, 1)
    jobs.pop()()
    assert [found.state for found in sizes_of(slower)] == ["used"]


class Competing:
    """A session that runs in its turn, and is ten times as slow beside a run of another one."""

    version = 0
    busy: list[Competing]

    def __init__(self, busy: list[Competing], takes_s: float) -> None:
        self.busy, self.takes_s, self.lock = busy, takes_s, threading.RLock()
        self.weights = SimpleNamespace(version=0, values=list)
        self.current = self.session = self

    def guarded(self) -> Any:
        """Hold its turn."""
        return self.lock

    def run(self, names: Sequence[str], feeds: Any) -> list[Any]:
        """Return the input after the time that it takes."""
        with self.lock:
            self.busy.append(self)
            time.sleep(self.takes_s)
            time.sleep(9 * self.takes_s * (len({*self.busy}) > 1))
            self.busy.remove(self)
        return [feeds["x"]]

    def engine(self, rule: Any) -> Any:
        """Return itself."""
        return self

    def close(self) -> None:
        """End."""


@pytest.mark.parametrize("beside", [5, 7], ids=["the plain session", "a session of another size"])
def test_a_session_is_timed_without_runs_for_other_threads(beside: int) -> None:
    """Under load it would compete with them, and would be refused."""
    busy, over = list[Competing](), threading.Event()
    plain = Competing(busy, 0.003)
    always: Any = lambda *_: True  # noqa: E731  # gains
    made = sized.SizedSessions(
        plain.run, always, False, lambda _: Competing(busy, 0.001), "strict", 4, 1 << 30, alone=plain.guarded
    )
    assert made.open_now(["y"], rows(7))

    def load() -> None:
        while not over.is_set():
            made.run(["y"], rows(beside))
            time.sleep(0.0005)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        assert made.open_now(["y"], rows(3)), made.report()
    finally:
        over.set()
        thread.join()


def test_a_changed_parameter_is_seen_by_the_next_run(jobs: list[Callable[[], None]]) -> None:
    """The sessions of the old weights are gone with the plain one."""
    compiled = Session("cpu").compile(graph())
    run_often(compiled, 3)
    jobs.pop()()
    compiled.set_param("w", np.arange(4, dtype=np.float32) * 10)
    np.testing.assert_array_equal(compiled.run(rows(3))[0], result(3, weight=10))
    assert compiled.device_graph_report().sized == ()


def test_a_mutable_parameter_is_seen_by_the_next_run(jobs: list[Callable[[], None]]) -> None:
    """It is fed to the session of the sizes as to the plain one."""
    made = Graph("mutable")
    x = made.input("x", ["rows", 4])
    made.outputs = [x * made.param("w", [4], data=np.ones(4, np.float32), mutable=True)]
    compiled = Session("cpu").compile(made)
    for _ in range(sized.AFTER_RUNS):
        compiled.run(rows(3))
    jobs.pop()()
    for value in (2.0, 5.0):
        compiled.set_param("w", np.full(4, value, np.float32))
        np.testing.assert_array_equal(compiled.run(rows(3))[0], np.full((3, 4), 3 * value))
    assert [found.state for found in sizes_of(compiled)] == ["used"]


def test_a_failure_in_the_session_of_a_size_goes_back_to_the_plain_one(
    jobs: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning and the reason in the report; nothing is opened for the size again."""
    compiled = Session("cpu").compile(graph())
    run_often(compiled, 3)
    jobs.pop()()
    engine = compiled.engine()
    assert engine.sized is not None
    (slot,) = engine.sized.slots()

    def fails(*given: Any) -> Any:
        raise EngineError("out of memory")

    slot.engine(compiled.rule).run = fails
    run_often(compiled, 3, 20)
    (found,) = sizes_of(compiled)
    assert (found.state, found.reason) == ("refused", "a run failed: out of memory")
    assert "run in the plain session again" in caplog.text
    assert jobs == []


def test_closing_closes_the_sessions_of_sizes_too(jobs: list[Callable[[], None]]) -> None:
    """Also one that is opened when it is too late."""
    compiled = Session("cpu").compile(graph())
    run_often(compiled, 3)
    jobs.pop()()
    run_often(compiled, 5)
    engine = compiled.engine()
    assert engine.sized is not None
    (slot,) = engine.sized.slots()
    compiled.close()
    assert slot.closed
    jobs.pop()()
    assert [found.state for found in engine.sized.report()] == ["used", "refused"]


def test_a_dropped_graph_keeps_no_session_of_a_size(jobs: list[Callable[[], None]]) -> None:
    """A job that begins after it finds nothing to do."""
    compiled = Session("cpu").compile(graph())
    run_often(compiled, 3)
    del compiled
    gc.collect()
    jobs.pop()()


def test_a_model_that_computes_shapes_is_right_run_after_run(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, through the front door, over two sizes; on a GPU that records, the first one has a session."""
    record_whatever_the_clock_says(monkeypatch)
    monkeypatch.setattr(sized, "WORTH", 1e9)
    text = """<ir_version: 8, opset_import: ["" : 17]>
    shapes (float[batch, steps, 8] x) => (float[n, m] y) <int64[1] zero = {0}, int64[1] rest = {-1}> {
        shape = Shape(x)
        batch = Gather(shape, zero)
        to = Concat <axis = 0> (batch, rest)
        flat = Reshape(x, to)
        y = Tanh(flat)
    }"""
    runner = GraphDevices(from_onnx(onnx.parser.parse_model(text)))
    compiled = runner.compile(device)
    for batch in (2, 3):
        for value in range(3 * sized.AFTER_RUNS):
            x = np.full((batch, 5, 8), value / 20, np.float32)
            np.testing.assert_allclose(runner.run(device, {"x": x})[0], np.tanh(x.reshape(batch, -1)), rtol=1e-5)
            if device.kind == "cuda" and value == sized.AFTER_RUNS:
                until(lambda: all(found.state != "opening" for found in sizes_of(compiled)), 30.0)
    if device.kind == "cuda":
        assert compiled.device_graph_report().recorded
