"""The last hour of a server, in samples of ten seconds: the work of each model and each device, in bounded memory.

Requests are only counted (`statistics.py`). A timer takes the differences of the counts, so that a sample costs the
same whatever the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

import rlx_ort
from rlx_ort.device import Device
from rlx_ort.serving.statistics import BOUNDS_NS, Statistics

Key: TypeAlias = tuple[str, str]
"""Name and version of a model."""

COLUMNS = ("requests", "failed", "p50", "p95", "p99", "waiting", "rows", "failovers")
"""Of a sample: requests a second, and failed ones; percentiles of the latency in ms; how many requests waited, as a
mean over time; rows of a batch; and requests that a second device had to run."""
SAMPLES = 360
_INTERVAL_S = 10.0
RECENT = 6
"""Samples that the present figures are from: those of a minute."""
_COUNTS = 6
_EDGES_NS = np.array([0, *BOUNDS_NS, 2 * BOUNDS_NS[-1]], np.float64)
_WIDTH = _COUNTS + len(BOUNDS_NS) + 1
_POINTS = 60
_SHARES = (0.5, 0.95, 0.99)
_Counts: TypeAlias = npt.NDArray[np.int64]
_log = logging.getLogger(__name__)


class Served(NamedTuple):
    """What is sampled of a model."""

    key: Key
    statistics: Statistics
    devices: Sequence[Device]


@functools.cache
def machine_facts() -> dict[str, str]:
    """Return the versions of this build and the machine that it runs on. The first call may take 0.1 s."""
    from rlx_ort.providers.engine.runtime import describe_runtime
    from rlx_ort.providers.hardware import cpu_name

    return {
        "version": rlx_ort.__version__,
        "onnxruntime": describe_runtime(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cores": f"{usable_cores():g}",
    }


def usable_cores() -> float:
    """Return the cores that this process may use, of which one may be a part."""
    from rlx_ort.providers.hardware import core_share

    share = core_share()
    return float(share.affinity if share.quota is None else min(share.affinity, share.quota))


def percentiles(counts: npt.NDArray[np.int64], shares: Iterable[float] = _SHARES) -> list[float]:
    """Return the times in ms under which these shares of some counted times are, NaN without any.

    They are exact to a bucket, a quarter of their value, and interpolated within it.
    """
    below = np.concatenate([[0], np.cumsum(counts)])
    if not below[-1]:
        return [math.nan for _ in shares]
    return [float(np.interp(share * below[-1], below, _EDGES_NS)) / 1e6 for share in shares]


class History:
    """The last hour of the models of a repository. It belongs to the repository's event loop.

    Args:
        served: returns the models that are loaded.
        interval_s: between two samples, in seconds.
    """

    def __init__(self, served: Callable[[], Iterable[Served]], interval_s: float = _INTERVAL_S) -> None:
        self.interval_s = interval_s
        self.started_s = time.time()
        self._served = served
        self._ring = _Ring(1, np.float64)  # when each sample was taken
        self._models: dict[Key, _Series] = {}
        self._all = _Ring(len(COLUMNS))
        self._devices: dict[Device, _Ring] = {}
        self._memory: dict[Device, tuple[int, int]] = {}
        self._sampled_s, self._cpu_s = time.monotonic(), time.process_time()
        self._task: asyncio.Task[None] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all samples."""
        rings = [self._ring, self._all, *self._devices.values(), *(each.ring for each in self._models.values())]
        recent = sum(counts.nbytes for series in self._models.values() for _, counts in series.recent)
        return recent + sum(ring.rows.nbytes for ring in rings)

    def start(self) -> None:
        """Begin to take samples on the running event loop, unless that has begun."""
        if self._task is None:
            self._sampled_s, self._cpu_s = time.monotonic(), time.process_time()
            self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Take no more samples."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                devices = {device for served in self._served() for device in served.devices}
                self.sample(await asyncio.to_thread(_memory_of, devices | {Device.CPU}))
            except Exception:  # of a provider, such as one that was registered from outside
                _log.exception("a sample of the history is missing")

    def sample(self, memory: Mapping[Device, tuple[int, int]]) -> None:
        """Keep the counts since the last sample; `memory` has used and all bytes of devices, 0 if unknown."""
        now_s, cpu_s = time.monotonic(), time.process_time()
        seconds = max(now_s - self._sampled_s, 1e-3)
        self._memory = dict(memory)
        served = list(self._served())
        busy_ns = dict.fromkeys([Device.CPU, *(device for each in served for device in each.devices)], 0.0)
        whole: _Counts = np.zeros(_WIDTH, np.int64)
        for each in served:
            series = self._series(each)
            whole += series.sample(now_s, seconds)
            for device in each.devices:
                busy_ns[device] += series.busy_ns.get(device.label, 0)
        self._all.add(_row(whole, seconds))
        for device, ns in busy_ns.items():
            share = min(ns / 1e9 / seconds, 1.0)
            if device == Device.CPU:
                share = min((cpu_s - self._cpu_s) / seconds / usable_cores(), 1.0)
            if device not in self._devices:
                self._devices[device] = _Ring(2, before=self._ring.count)
            self._devices[device].add([share, memory.get(device, (0, 0))[0] or math.nan])
        self._ring.add([time.time()])
        for gone in [key for key in self._models if key not in {each.key for each in served}]:
            del self._models[gone]
        for absent in [device for device in self._devices if device not in busy_ns]:
            del self._devices[absent]
        self._sampled_s, self._cpu_s = now_s, cpu_s

    def now(self) -> tuple[dict[str, float | None], dict[Key, dict[str, float | None]]]:
        """Return the columns of the last minute, of all models together and of each."""
        now_s = time.monotonic()
        whole: _Counts = np.zeros(_WIDTH, np.int64)
        models, longest_s = {}, 1e-3
        for each in self._served():
            counts, seconds = self._series(each).since(now_s)
            whole, longest_s = whole + counts, max(longest_s, seconds)
            models[each.key] = _named(_row(counts, seconds))
        return _named(_row(whole, longest_s)), models

    def devices(self) -> list[dict[str, Any]]:
        """Return the devices at the last sample.

        `busy` is the share of time in which a device ran batches, and for the CPU the share of its cores that this
        process used.
        """
        found = []
        for device, ring in self._devices.items():
            (busy, _), (used, most) = ring.last(), self._memory.get(device, (0, 0))
            found.append(
                {"device": device.label, "busy": _number(busy), "memory": used or None, "memory_bytes": most or None}
            )
        return found

    def of_server(self) -> dict[str, Any]:
        """Return the samples of all models together and of the devices, and the rate of requests of each model."""
        return {
            "times": self._ring.column(0),
            **{name: self._all.column(at) for at, name in enumerate(COLUMNS)},
            "devices": {
                device.label: {"busy": ring.column(0), "memory": ring.column(1, 0)}
                for device, ring in self._devices.items()
            },
            "models": [
                {"name": name, "version": version, "requests": series.ring.coarse(0)}
                for (name, version), series in self._models.items()
            ],
        }

    def of_model(self, key: Key) -> dict[str, Any]:
        """Return the samples of a model: for each column as many values as there are times."""
        series = self._models.get(key)
        ring = _Ring(len(COLUMNS), before=self._ring.count) if series is None else series.ring
        return {"times": self._ring.column(0), **{name: ring.column(at) for at, name in enumerate(COLUMNS)}}

    def _series(self, served: Served) -> _Series:
        """Return the samples of a model; those before it was loaded again stay, and its counts begin at 0."""
        series = self._models.get(served.key)
        if series is None or series.statistics is not served.statistics:
            ring = _Ring(len(COLUMNS), before=self._ring.count) if series is None else series.ring
            series = self._models[served.key] = _Series(ring, served.statistics, self._sampled_s)
        return series


class _Ring:
    """The last rows of a table; the oldest is overwritten. `before` rows of it are unknown."""

    def __init__(self, width: int, dtype: npt.DTypeLike = np.float32, before: int = 0) -> None:
        self.rows: npt.NDArray[Any] = np.full((SAMPLES, width), np.nan, dtype)
        self.count = before

    def add(self, row: Sequence[float]) -> None:
        self.rows[self.count % SAMPLES] = row
        self.count += 1

    def last(self) -> list[float]:
        return [float(value) for value in self.rows[(self.count - 1) % SAMPLES]]

    def _ordered(self, at: int) -> npt.NDArray[Any]:
        column = self.rows[:, at]
        return column[: self.count] if self.count < SAMPLES else np.roll(column, -(self.count % SAMPLES))

    def column(self, at: int, digits: int = 3) -> list[float | None]:
        return [_number(value, digits) for value in self._ordered(at).tolist()]

    def coarse(self, at: int) -> list[float | None]:
        """Return the means of a column over equal spans."""
        values = self._ordered(at)
        return [
            _number(float(part.mean())) for part in np.array_split(values, min(len(values), _POINTS) or 1) if part.size
        ]


class _Series:
    """The samples of a model, and its counts at the last ones."""

    def __init__(self, ring: _Ring, statistics: Statistics, since_s: float) -> None:
        self.ring, self.statistics = ring, statistics
        self.recent: deque[tuple[float, _Counts]] = deque([(since_s, np.zeros(_WIDTH, np.int64))], maxlen=RECENT)
        self.busy_ns: dict[str, int] = {}  # how long each device ran between the last two samples
        self._ran_ns: dict[str, int] = {}

    def sample(self, now_s: float, seconds: float) -> _Counts:
        """Keep a sample, and return the counts since the last one."""
        counts = _counts_of(self.statistics)
        since = counts - self.recent[-1][1]
        self.ring.add(_row(since, seconds))
        self.recent.append((now_s, counts))
        before, self._ran_ns = self._ran_ns, {label: batches.ns for label, batches in self.statistics.rows.items()}
        self.busy_ns = {label: ns - before.get(label, 0) for label, ns in self._ran_ns.items()}
        return since

    def since(self, now_s: float) -> tuple[_Counts, float]:
        """Return the counts of the last minute, and its seconds."""
        began_s, counts = self.recent[0]
        return _counts_of(self.statistics) - counts, max(now_s - began_s, 1e-3)


def _counts_of(statistics: Statistics) -> _Counts:
    spans = statistics.spans
    rows = sum(each.total for each in statistics.rows.values())
    failovers = sum(statistics.failovers.values())
    counts = (spans["success"].count, spans["fail"].count, spans["queue"].ns, statistics.executions, rows, failovers)
    return np.array([*counts, *statistics.durations], np.int64)


def _row(counts: _Counts, seconds: float) -> list[float]:
    """Return the columns of the counts of some time."""
    answered, failed, queue_ns, batches, rows, failovers = (int(count) for count in counts[:_COUNTS])
    latency = percentiles(counts[_COUNTS:])
    a_batch = rows / batches if batches else math.nan
    return [
        (answered + failed) / seconds,
        failed / seconds,
        *latency,
        queue_ns / 1e9 / seconds,  # Little's law
        a_batch,
        float(failovers),
    ]


def _named(row: Sequence[float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in zip(COLUMNS, row, strict=True)}


def _number(value: float, digits: int = 3) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def _memory_of(devices: Iterable[Device]) -> dict[Device, tuple[int, int]]:
    """Return the bytes of devices' memory that this process uses, and all that they have; 0 where it is unknown."""
    from rlx_ort.providers.hardware import memory_bytes, private_bytes
    from rlx_ort.providers.registry import availability, provider_of

    found = {}
    for device in devices:
        if device == Device.CPU:
            found[device] = (private_bytes(), memory_bytes())
            continue
        provider = provider_of(device)
        reading = None if provider is None else provider.memory(device)
        used = reading.nbytes if reading is not None and reading.whole else 0
        found[device] = (used, availability(device).memory_bytes)
    return found
