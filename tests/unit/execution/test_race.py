"""A race of devices: interleaved blocks, early drops, failures, a disturbed host, and the median of the blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlx_ort import Device, InputError, RunError
from rlx_ort.execution import benchmark as racing
from rlx_ort.execution.benchmark import Pace, race

CPU, CUDA, WEBGPU = Device.CPU, Device.CUDA, Device.WEBGPU


class Track:
    """Devices whose blocks take times given by the test; the order in which they ran is in `log`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, blocks: Mapping[Device, Any]) -> None:
        self.log: list[Device | str] = []
        self.time_s = 0.0
        self.block_s = 0.0
        self._blocks = {device: iter(times) for device, times in blocks.items()}
        monkeypatch.setattr(racing, "timed_block", self._block)

    def compile_on(self, device: Device) -> Any:
        """Return something that can be run."""
        return _Runner(device)

    def _block(self, runner: _Runner, inputs: object, count: int, warm: int) -> list[int]:
        count = min(count, 3)
        self.log.append(runner.device)
        self.time_s += self.block_s
        time = next(self._blocks[runner.device])
        if isinstance(time, Exception):
            raise time
        return [time] * count


class _Runner:
    def __init__(self, device: Device) -> None:
        self.device = device

    def run(self, inputs: object) -> list[Any]:
        """Do nothing: only blocks are timed."""
        return []


class Host(Pace):
    """A host whose pace is given by the test, slow above 100; blocks and pauses advance its time, pauses are logged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, track: Track, paces: Iterable[int]) -> None:
        self.paused_s = 0.0
        self._track, self._paces = track, iter(paces)
        clock = SimpleNamespace(
            perf_counter=lambda: track.time_s, perf_counter_ns=lambda: round(track.time_s * 1e9), sleep=self._sleep
        )
        monkeypatch.setattr(racing, "time", clock)

    @property
    def limit_ns(self) -> float:
        """A fixed limit."""
        return 100.0

    def now(self) -> float:
        """Return the next pace."""
        return next(self._paces)

    def _sleep(self, seconds: float) -> None:
        self._track.log.append("pause")
        self._track.time_s += seconds
        self.paused_s += seconds


def then_calm(*paces: int) -> Iterator[int]:
    """Return paces after which the host is as fast as usual."""
    return itertools.chain(paces, itertools.repeat(50))


def steady(ns: int) -> list[int]:
    """Return blocks that all take the same."""
    return [ns] * 100


def test_devices_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round has a block of every device, and every other round goes the other way round."""
    track = Track(monkeypatch, {CPU: steady(100), CUDA: steady(110)})
    race([CPU, CUDA], track.compile_on, {}, 2)
    assert track.log == [CPU, CUDA, CUDA, CPU]


def test_the_fastest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are in the order of their medians."""
    track = Track(monkeypatch, {CPU: steady(120), CUDA: steady(100)})
    rows = race([CPU, CUDA], track.compile_on, {}, 3)
    assert [(row.device, row.median_exec_ns) for row in rows] == [(CUDA, 100), (CPU, 120)]


def test_one_disturbed_block_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the blocks counts: 100 against 110, though one block took 900."""
    track = Track(monkeypatch, {CPU: [100, 900, *steady(100)], CUDA: steady(110)})
    rows = race([CPU, CUDA], track.compile_on, {}, 5)
    assert [row.device for row in rows] == [CPU, CUDA]


def test_a_device_that_is_clearly_slower_is_dropped_after_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the rounds is for those that are close."""
    track = Track(monkeypatch, {CPU: steady(100), CUDA: steady(105), WEBGPU: steady(5000)})
    race([CPU, CUDA, WEBGPU], track.compile_on, {}, 5)
    assert track.log.count(WEBGPU) == 2
    assert track.log.count(CPU) == track.log.count(CUDA) == 5


def test_two_that_overlap_get_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks of both lie among each other, there are up to four times as many rounds."""
    mixed = [100, 120, 101, 119] * 20
    track = Track(monkeypatch, {CPU: mixed, CUDA: mixed[1:]})
    race([CPU, CUDA], track.compile_on, {}, 3)
    assert track.log.count(CPU) == 12


def test_a_device_that_fails_comes_last_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on."""
    track = Track(monkeypatch, {CPU: steady(100), CUDA: [90, RunError("out of memory"), 90]})
    rows = race([CPU, CUDA], track.compile_on, {}, 3)
    assert [(row.device, row.median_exec_ns) for row in rows] == [(CPU, 100), (CUDA, None)]
    assert rows[1].failure == "out of memory"


def test_a_device_that_cannot_be_compiled_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a row with the reason."""
    track = Track(monkeypatch, {CPU: steady(100)})

    def compile_on(device: Device) -> Any:
        if device == CUDA:
            raise RunError("no memory")
        return track.compile_on(device)

    rows = race([CPU, CUDA], compile_on, {}, 2)
    assert [(row.device, row.failure) for row in rows] == [(CPU, ""), (CUDA, "no memory")]


def test_inputs_that_do_not_fit_are_the_callers_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would fail on every device."""

    def compile_on(device: Device) -> Any:
        raise InputError("x has the wrong shape")

    with pytest.raises(InputError):
        race([CPU, CUDA], compile_on, {}, 2)


def test_a_round_begins_when_the_host_is_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pauses, and then every block."""
    track = Track(monkeypatch, {CPU: steady(100), CUDA: steady(110)})
    host = Host(monkeypatch, track, then_calm(150, 150))
    race([CPU, CUDA], track.compile_on, {}, 2, pace=host)
    assert track.log == ["pause", "pause", CPU, CUDA, CUDA, CPU]


def test_a_disturbed_round_is_measured_again_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is slow after the second block: both blocks are taken back, and the round is gone through again."""
    track = Track(monkeypatch, {CPU: [700, *steady(100)], CUDA: [900, *steady(110)]})
    host = Host(monkeypatch, track, then_calm(50, 50, 150))
    rows = race([CPU, CUDA], track.compile_on, {}, 1, pace=host)
    assert [(row.device, row.median_exec_ns) for row in rows] == [(CPU, 100), (CUDA, 110)]
    assert track.log == [CPU, CUDA, CPU, CUDA]


def test_a_device_that_fails_in_a_disturbed_round_stays_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow host is no reason to fail."""
    track = Track(monkeypatch, {CPU: steady(100), CUDA: [RunError("out of memory"), 90, 90]})
    host = Host(monkeypatch, track, then_calm(50, 50, 150))
    rows = race([CPU, CUDA], track.compile_on, {}, 2, pace=host)
    assert [(row.median_exec_ns, row.failure) for row in rows] == [(100, ""), (None, "out of memory")]
    assert track.log.count(CUDA) == 1


def test_waiting_for_a_calm_host_ends_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that stays slow is measured as it is."""
    track = Track(monkeypatch, {CPU: steady(100), CUDA: steady(110)})
    host = Host(monkeypatch, track, itertools.repeat(150))
    rows = race([CPU, CUDA], track.compile_on, {}, 2, pace=host)
    assert [row.median_exec_ns for row in rows] == [100, 110]
    assert [one for one in track.log if one != "pause"] == [CPU, CUDA, CUDA, CPU]
    assert host.paused_s == pytest.approx(1.0)


def test_rounds_are_not_repeated_for_more_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of 0.3 s, each of them disturbed, three are taken back, and a fourth would be beyond the second."""
    track = Track(monkeypatch, {CPU: [901, 902, 903, *steady(100)], CUDA: steady(110)})
    track.block_s = 0.3
    host = Host(monkeypatch, track, itertools.cycle((50, 150)))
    rows = race([CPU, CUDA], track.compile_on, {}, 1, pace=host)
    assert [row.median_exec_ns for row in rows] == [100, 110]
    assert track.log == [CPU, CPU, CPU, CPU, CUDA]


def test_what_a_disturbance_takes_is_not_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0.9 s of waiting there are as many rounds as without, where the budget is 0.5 s and a round takes 0.2 s."""
    found = []
    for slow in (0, 45):
        mixed = [100, 120, 101, 119] * 5
        track = Track(monkeypatch, {CPU: mixed, CUDA: mixed[1:]})
        track.block_s = 0.1
        host = Host(monkeypatch, track, then_calm(*[150] * slow))
        race([CPU, CUDA], track.compile_on, {}, 5, 0.5, pace=host)
        found.append((track.log.count("pause"), track.log.count(CPU)))
    assert found == [(0, 3), (45, 3)]


class Clock:
    """A clock between whose readings so many ns go by, in turn."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = list(steps)
        self._time = 0

    def __call__(self) -> int:
        """Return the time in ns, and go on."""
        now = self._time
        self._time += self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        return now


def _loops(*times: int) -> list[int]:
    """Return steps of a clock by which each loop, three of them to a pace, takes a time."""
    return [step for time in times for step in (time, 1)]


def test_the_quickest_of_three_loops_counts() -> None:
    """A loop that was interrupted does not make the host slow."""
    assert Pace(Clock(_loops(90, 13, 14))).now() == 13


def test_nothing_is_slow_before_the_usual_pace_is_known() -> None:
    """With few loops timed, no limit is known."""
    pace = Pace(Clock(_loops(*[13] * 21)))
    for _ in range(7):
        pace.now()
    assert pace.limit_ns == math.inf


def test_a_disturbed_core_is_beyond_the_limit_and_a_slower_clock_is_not() -> None:
    """Loops of 13 are usual; 21 is beyond the limit, 14 is not, and neither moves it."""
    pace = Pace(Clock(_loops(*[13] * 60, *[21] * 6, *[14] * 6)))
    for _ in range(20):
        pace.now()
    disturbed = [pace.now(), pace.now()]
    slower = [pace.now(), pace.now()]
    assert all(found > pace.limit_ns for found in disturbed)
    assert all(found <= pace.limit_ns for found in slower)


def test_a_host_that_is_always_busy_is_as_usual() -> None:
    """Two quick loops among many slow ones do not make the slow ones a disturbance."""
    pace = Pace(Clock(_loops(*[13] * 6, *[26] * 60)))
    found = [pace.now() for _ in range(22)]
    assert found[-1] <= pace.limit_ns


def test_a_calibration_takes_few_quick_loops_for_the_usual_ones() -> None:
    """Eight of a hundred: the host is slow nearly all the time that it takes."""
    pace = Pace(Clock(_loops(*[13] * 24, *[26] * 276)), 0.05)
    found = [pace.now() for _ in range(100)]
    assert pace.usual_ns == 13
    assert found[-1] > pace.limit_ns


def test_what_is_usual_stays_known_and_does_not_grow_for_ever() -> None:
    """Ten thousand times, spread over 1000 to 1999, leave some thousand, whose quantile of 0.3 is 1300 as before."""
    times = [1000 + 7 * at % 1000 for at in range(10_000)]
    pace = Pace(Clock(_loops(*[time for time in times for _ in range(3)])))
    for _ in times:
        pace.now()
    assert 1000 < len(pace._known) < 5000
    assert pace.usual_ns == pytest.approx(1300, abs=5)


@pytest.mark.parametrize("step", [0, -5])
def test_a_clock_that_makes_no_sense_tells_nothing(step: int) -> None:
    """A clock that stands still or goes back leaves no pace behind."""
    pace = Pace(Clock([step]))
    assert [pace.now() for _ in range(9)] == [0.0] * 9
    assert pace.limit_ns == math.inf
