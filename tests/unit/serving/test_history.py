"""The last hour of a server: its samples, their memory, and what they are made of."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest

from rlx_ort import Device
from rlx_ort.serving.history import SAMPLES, History, Served, percentiles
from rlx_ort.serving.lanes import Times
from rlx_ort.serving.statistics import Durations, Statistics

MS = 1_000_000
GPU = Device("cuda")


class Clock:
    """The time of a history, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.cpu_s = 1000.0
        times = SimpleNamespace(
            monotonic=lambda: self.now_s, time=lambda: self.now_s + 1e9, process_time=lambda: self.cpu_s
        )
        monkeypatch.setattr("rlx_ort.serving.history.time", times)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the time that histories of a test see."""
    return Clock(monkeypatch)


def ask(statistics: Statistics, took_ms: float, waited_ms: float = 0.0, device: Device = Device.CPU) -> None:
    """Count a request of one row."""
    times = Times(round(waited_ms * MS), 0, round((took_ms - waited_ms) * MS), 0)
    statistics.answered(times, round(took_ms * MS))
    statistics.ran(device, 1, 1, times)


def sample(history: History, clock: Clock, seconds: float = 10.0) -> None:
    """Take a sample some seconds after the last one."""
    clock.now_s += seconds
    history.sample({})


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.5])
def test_percentiles_are_right_to_a_bucket(spread: float) -> None:
    """Within 13 % of those of the times themselves, whatever their distribution."""
    drawn = np.exp(np.random.default_rng(0).normal(math.log(3), spread, 20_000))
    statistics = Statistics()
    for took_ms in drawn:
        statistics.answered(Times(), round(took_ms * MS))
    found = percentiles(np.array(statistics.durations, np.int64))
    np.testing.assert_allclose(found, np.percentile(drawn, [50, 95, 99]), rtol=0.13)


def test_times_beyond_the_last_bucket_count() -> None:
    """As at least so long."""
    statistics = Statistics()
    statistics.answered(Times(), 10**13)
    assert statistics.durations[-1] == 1
    assert all(found >= 80_000 for found in percentiles(np.array(statistics.durations, np.int64)))
    assert all(map(math.isnan, percentiles(np.array(Durations(), np.int64))))


def test_a_sample_has_what_happened_since_the_last_one(clock: Clock) -> None:
    """Rates a second, percentiles, and by Little's law how many requests waited; without requests no latency."""
    statistics = Statistics()
    history = History(lambda: [Served(("m", "1"), statistics, [Device.CPU])])
    for _ in range(50):
        ask(statistics, 4.0, waited_ms=2.0)
    statistics.spans["fail"].add(0, 10)
    sample(history, clock)
    sample(history, clock)
    found = history.of_model(("m", "1"))
    assert found["requests"] == [6.0, 0.0]
    assert found["failed"] == [1.0, 0.0]
    assert found["waiting"] == [0.01, 0.0]
    assert found["rows"] == [1.0, None]
    assert found["p50"][0] == pytest.approx(4.0, rel=0.13)
    assert found["p99"][1] is None
    assert found["times"] == [1e9 + 1010, 1e9 + 1020]
    assert history.of_server()["requests"] == found["requests"]


def test_the_present_figures_are_of_the_last_minute(clock: Clock) -> None:
    """They are there before the first sample, and forget what is older."""
    statistics = Statistics()
    history = History(lambda: [Served(("m", "1"), statistics, [Device.CPU])])
    clock.now_s += 5
    ask(statistics, 1.0)
    whole, models = history.now()
    assert (whole["requests"], models["m", "1"]["requests"]) == (0.2, 0.2)
    for _ in range(7):
        sample(history, clock)
    assert history.now()[0]["requests"] == 0


def test_an_hour_is_kept_and_its_memory_does_not_grow(clock: Clock) -> None:
    """360 samples of ten seconds take 16 KiB a model at most; older ones are overwritten, the newest is the last."""
    models = {f"m{at}": Statistics() for at in range(20)}
    history = History(lambda: [Served((name, "1"), each, [Device.CPU]) for name, each in models.items()])
    sizes = []
    for at in range(SAMPLES + 100):
        for _ in range(at % 7):
            ask(models["m3"], 1.0)
        sample(history, clock)
        sizes.append(history.nbytes)
    assert max(sizes[10:]) == min(sizes[10:]) <= 21 * (16 << 10)
    found = history.of_model(("m3", "1"))
    assert len(found["times"]) == SAMPLES
    assert found["times"][-1] - found["times"][0] == pytest.approx(3590)
    assert found["requests"] == [at % 7 / 10 for at in range(100, SAMPLES + 100)]


def test_a_model_that_is_loaded_again_keeps_its_hour_and_one_that_is_unloaded_does_not(clock: Clock) -> None:
    """Its counts begin at 0 then; a model that comes later has no samples for the time before."""
    served = {"a": Statistics()}
    history = History(lambda: [Served((name, "1"), each, [Device.CPU]) for name, each in served.items()])
    for _ in range(5):
        ask(served["a"], 1.0)
    sample(history, clock)
    served |= {"a": Statistics(), "b": Statistics()}
    ask(served["a"], 1.0)
    ask(served["b"], 1.0)
    sample(history, clock)
    assert history.of_model(("a", "1"))["requests"] == [0.5, 0.1]
    assert history.of_model(("b", "1"))["requests"] == [None, 0.1]
    assert history.of_server()["requests"] == [0.5, 0.2]
    del served["a"]
    sample(history, clock)
    assert history.of_model(("a", "1"))["requests"] == [None, None, None]


def test_devices_have_their_share_of_the_time_and_their_memory(clock: Clock) -> None:
    """Of all models together; the CPU's is that of the process, whatever ran there."""
    models = [Statistics(), Statistics()]
    history = History(lambda: [Served((str(at), "1"), each, [GPU, Device.CPU]) for at, each in enumerate(models)])
    ask(models[0], 2000.0, device=GPU)
    ask(models[1], 1000.0, device=GPU)
    ask(models[1], 9000.0)
    clock.now_s += 10
    history.sample({GPU: (1 << 30, 8 << 30)})
    rows = {row["device"]: row for row in history.devices()}
    assert rows["cuda"] == {"device": "cuda", "busy": 0.3, "memory": 1 << 30, "memory_bytes": 8 << 30}
    assert rows["cpu"] == {"device": "cpu", "busy": 0.0, "memory": None, "memory_bytes": None}
    clock.cpu_s += 10  # of a core
    sample(history, clock)
    rows = {row["device"]: row for row in history.devices()}
    assert rows["cuda"]["busy"] == 0
    assert 0 < rows["cpu"]["busy"] <= 1


def test_requests_that_a_second_device_had_to_run_are_counted(clock: Clock) -> None:
    """In the sample in which the first one failed them."""
    statistics = Statistics()
    history = History(lambda: [Served(("m", "1"), statistics, [GPU, Device.CPU])])
    statistics.failed_over(GPU, 3)
    sample(history, clock)
    sample(history, clock)
    assert history.of_server()["failovers"] == [3.0, 0.0]


async def test_samples_go_on_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    """As where the memory of a device cannot be read for once."""
    failing = [True]

    def served() -> list[Served]:
        if failing and len(history.of_server()["times"]) == 1:
            failing.clear()
            raise OSError("gone")
        return [Served(("m", "1"), Statistics(), [Device.CPU])]

    history = History(served, 0.01)
    history.start()
    async with asyncio.timeout(10):
        while len(history.of_server()["times"]) < 3:
            await asyncio.sleep(0.01)
    await history.stop()
    assert failing == []
    assert "a sample of the history is missing" in caplog.text
    [cpu] = history.devices()
    assert cpu["memory"] < cpu["memory_bytes"]
