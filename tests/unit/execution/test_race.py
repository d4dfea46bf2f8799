"""A race of devices: blocks in turn, early drops, failures, and the median that counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlx_ort.device import Device
from rlx_ort.errors import InputError, RunError
from rlx_ort.execution import race as racing
from rlx_ort.execution.race import race

CPU, CUDA, WEBGPU = Device.CPU, Device.CUDA, Device.WEBGPU


class Track:
    """Devices whose blocks take what the test says; the order in which they ran is in `log`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, blocks: Mapping[Device, Any]) -> None:
        self.log: list[Device] = []
        self._blocks = {device: iter(times) for device, times in blocks.items()}
        monkeypatch.setattr(racing, "timed_block", self._block)

    def compile_on(self, device: Device) -> Any:
        """Return something that can be run."""
        return _Runner(device)

    def _block(self, runner: _Runner, inputs: object, count: int, warm: int) -> list[int]:
        count = min(count, 3)
        self.log.append(runner.device)
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


@pytest.mark.parametrize(("run_ns", "count", "warm"), [(100_000, 30, 20), (10_000_000, 1, 1), (100, 200, 200)])
def test_short_runs_are_timed_in_longer_blocks(
    monkeypatch: pytest.MonkeyPatch, run_ns: int, count: int, warm: int
) -> None:
    """Runs of 100 us come 30 to a block of 3 ms, after 20 that do not count; runs of 10 ms come alone, after one."""
    found: list[tuple[int, int]] = []

    def block(runner: _Runner, inputs: object, count: int, warm: int) -> list[int]:
        found.append((count, warm))
        return [run_ns] * count

    monkeypatch.setattr(racing, "timed_block", block)
    race([CPU, CUDA], _Runner, {}, 3)  # type: ignore[arg-type]  # only `run` is needed
    assert set(found[2:]) == {(count, warm)}
