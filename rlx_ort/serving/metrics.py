"""Prometheus metrics of a repository, with names and splits like Triton's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from rlx_ort.serving.models import BatchRows
    from rlx_ort.serving.repository import Repository

_SPANS = {
    "success": ("request_success", "request_duration_us", "answered requests", "time of answered requests"),
    "fail": ("request_failure", "", "failed requests", ""),
    "queue": ("", "queue_duration_us", "", "time that requests waited"),
    "compute_input": ("", "compute_input_duration_us", "", "time for joining inputs"),
    "compute_infer": ("", "compute_infer_duration_us", "", "time of runs"),
    "compute_output": ("", "compute_output_duration_us", "", "time for splitting outputs"),
}


def rendered(repository: Repository) -> tuple[bytes, str]:
    """Return the metrics as text, and its media type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(repository))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def collect(self) -> Iterator[Any]:
        models = list(self._repository.models())
        for span, (count, duration, counted, timed) in _SPANS.items():
            for name, text, attribute, unit in ((count, counted, "count", 1), (duration, timed, "ns", 1000)):
                if name:
                    family = CounterMetricFamily(f"rlx_inference_{name}", text, labels=["model", "version"])
                    for model in models:
                        value = getattr(model.statistics.spans[span], attribute)
                        family.add_metric([model.name, model.version], value / unit)
                    yield family
        executions = CounterMetricFamily("rlx_inference_exec_count", "batches that ran", labels=["model", "version"])
        devices = CounterMetricFamily(
            "rlx_inference_device", "requests by the device that answered", labels=["model", "version", "device"]
        )
        pending = GaugeMetricFamily(
            "rlx_inference_pending_request_count", "requests that wait", labels=["model", "version"]
        )
        rows = HistogramMetricFamily(
            "rlx_inference_batch_rows", "rows of the batches that ran", labels=["model", "version", "device"]
        )
        for model in models:
            for device, batches in model.statistics.rows.items():
                rows.add_metric([model.name, model.version, device], *_histogram(batches))
            executions.add_metric([model.name, model.version], model.statistics.executions)
            pending.add_metric([model.name, model.version], model.scheduler.depth)
            for device, answered in model.statistics.devices.items():
                devices.add_metric([model.name, model.version, device], answered)
        yield from (executions, devices, pending, rows)
        budget = self._repository.budget
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
    buckets, below = [], 0
    for octave in range(max(counted.octaves, default=0) + 1):
        below += counted.octaves.get(octave, 0)
        buckets.append((f"{1 << octave}.0", float(below)))
    return [*buckets, ("+Inf", float(below))], float(counted.total)
