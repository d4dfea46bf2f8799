"""Prometheus metrics of a repository, with names and splits like Triton's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from rlx_ort.serving.history import machine_facts
from rlx_ort.serving.statistics import BOUNDS_NS, BatchRows, Durations

if TYPE_CHECKING:
    from rlx_ort.serving.models import ServedModel
    from rlx_ort.serving.repository import Repository

_SPANS = (
    ("request_success", "success", "answered requests"),
    ("request_duration_us", "success", "time of answered requests"),
    ("request_failure", "fail", "failed requests"),
    ("queue_duration_us", "queue", "time that requests waited"),
    ("compute_input_duration_us", "compute_input", "time for joining inputs"),
    ("compute_infer_duration_us", "compute_infer", "time of runs"),
    ("compute_output_duration_us", "compute_output", "time for splitting outputs"),
)
_SHOWN = ("1", "25", "5")  # the digits of buckets


class Metrics:
    """The metrics of a repository at one moment. The other functions may be called from a thread."""

    def __init__(self, repository: Repository) -> None:
        self._families = [*_of_models(list(repository.models())), *_of_server(repository)]

    def collect(self) -> Iterator[Any]:
        """Yield the families, as a collector of the library."""
        yield from self._families

    def rendered(self) -> tuple[bytes, str]:
        """Return the metrics as text, and its media type."""
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        registry.register(self)
        return generate_latest(registry), CONTENT_TYPE_LATEST


def _of_models(models: Sequence[ServedModel]) -> Iterator[Any]:
    for name, span, text in _SPANS:
        family = CounterMetricFamily(f"rlx_inference_{name}", text, labels=["model", "version"])
        for model in models:
            counter = model.statistics.spans[span]
            family.add_metric([*model.key], counter.ns / 1000 if name.endswith("_us") else counter.count)
        yield family
    each, on_device = ["model", "version"], ["model", "version", "device"]
    executions = CounterMetricFamily("rlx_inference_exec_count", "batches that ran", labels=each)
    devices = CounterMetricFamily("rlx_inference_device", "requests by the device that answered", labels=on_device)
    pending = GaugeMetricFamily("rlx_inference_pending_request_count", "requests that wait", labels=each)
    rows = HistogramMetricFamily("rlx_inference_batch_rows", "rows of the batches that ran", labels=on_device)
    busy = CounterMetricFamily("rlx_inference_device_busy_seconds", "time of runs by device", labels=on_device)
    failovers = CounterMetricFamily(
        "rlx_inference_failover", "requests that a second device had to run, by the one that failed", labels=on_device
    )
    durations = HistogramMetricFamily(
        "rlx_inference_request_duration_seconds", "time of answered requests", labels=each
    )
    waits = HistogramMetricFamily("rlx_inference_queue_duration_seconds", "time that requests waited", labels=each)
    for model in models:
        spans = model.statistics.spans
        durations.add_metric([*model.key], *_seconds(model.statistics.durations, spans["success"].ns))
        waits.add_metric([*model.key], *_seconds(model.statistics.waits, spans["queue"].ns))
        for device, failed in model.statistics.failovers.items():
            failovers.add_metric([*model.key, device], failed)
        for device, batches in model.statistics.rows.items():
            rows.add_metric([*model.key, device], *_histogram(batches))
            busy.add_metric([*model.key, device], batches.ns / 1e9)
        executions.add_metric([*model.key], model.statistics.executions)
        pending.add_metric([*model.key], model.scheduler.depth)
        for device, answered in model.statistics.devices.items():
            devices.add_metric([*model.key, device], answered)
    yield from (executions, devices, pending, rows, busy, failovers, durations, waits)


def _of_server(repository: Repository) -> Iterator[Any]:
    yield InfoMetricFamily("rlx_server_build", "versions and machine of the server", machine_facts())
    ready = GaugeMetricFamily("rlx_model_ready", "whether a model is loaded", labels=["model", "version"])
    for entry in repository.index():
        ready.add_metric([entry["name"], entry["version"]], float(entry["state"] == "READY"))
    yield ready
    for name, text, key in (
        ("busy_ratio", "share of time in which a device ran; of the CPU, that this process used", "busy"),
        ("memory_used_bytes", "memory of the device that this process uses", "memory"),
        ("memory_bytes", "memory of the device", "memory_bytes"),
    ):
        family = GaugeMetricFamily(f"rlx_device_{name}", text, labels=["device"])
        for row in repository.history.devices():
            if row[key] is not None:
                family.add_metric([row["device"]], row[key])
        yield family
    budget = repository.budget
    for name, text, value in (
        ("held", "bytes of requests and their answers now", budget.held_bytes),
        ("most_held", "bytes that requests and their answers may take", budget.most_bytes),
        ("peak_held", "the most bytes that requests and their answers have taken", budget.peak_bytes),
    ):
        yield GaugeMetricFamily(f"rlx_server_{name}_bytes", text, value)
    yield CounterMetricFamily(
        "rlx_server_refused_request_count", "requests that found no room in memory", budget.refused
    )
    yield CounterMetricFamily(
        "rlx_server_ended_request_count", "requests of slow clients that were ended for others", budget.ended
    )


def _histogram(counted: BatchRows) -> tuple[list[tuple[str, float]], float]:
    """Return the buckets of a histogram, each with all below it, and the sum."""
    below = [
        *accumulate(float(counted.octaves.get(octave, 0)) for octave in range(max(counted.octaves, default=0) + 1))
    ]
    buckets = [(f"{1 << octave}.0", count) for octave, count in enumerate(below)]
    return [*buckets, ("+Inf", below[-1])], float(counted.total)


def _seconds(durations: Durations, total_ns: int) -> tuple[list[tuple[str, float]], float]:
    """Return the buckets of a histogram of times, three a decade, each with all below it, and the sum in seconds."""
    below = [*accumulate(map(float, durations))]
    shown = [at for at, bound_ns in enumerate(BOUNDS_NS) if str(bound_ns).rstrip("0") in _SHOWN]
    return [*((str(BOUNDS_NS[at] / 1e9), below[at]) for at in shown), ("+Inf", below[-1])], total_ns / 1e9
