"""What `/metrics` says of batches and of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from rlx_ort import Device, ServingError
from rlx_ort.serving.budget import Budget, Share
from rlx_ort.serving.history import History, machine_facts
from rlx_ort.serving.lanes import Times
from rlx_ort.serving.metrics import Metrics
from rlx_ort.serving.statistics import Statistics

_MILLISECONDS = ("0.001", "0.0025", "0.005")


def _text(statistics: Statistics, budget: Budget) -> str:
    """Return the metrics of a model that is loaded, beside one that is not."""
    model = SimpleNamespace(key=("m", "1"), statistics=statistics, scheduler=SimpleNamespace(depth=0))
    index = [{"name": name, "version": "1", "state": state} for name, state in (("m", "READY"), ("n", "UNAVAILABLE"))]
    repository: Any = SimpleNamespace(models=lambda: [model], budget=budget, index=lambda: index, history=History(list))
    return Metrics(repository).rendered()[0].decode()


def _samples(statistics: Statistics, budget: Budget) -> dict[tuple[str, str, str], float]:
    text = _text(statistics, budget)
    return {
        (sample.name, sample.labels.get("device", ""), sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_batches_are_counted_by_rows_and_device() -> None:
    """As a histogram of each device, whose buckets are powers of two."""
    statistics = Statistics()
    for device, rows in (("cpu", 1), ("cpu", 3), ("cpu", 4), ("webgpu", 300)):
        statistics.ran(Device(device), rows, 1, Times())
    found = _samples(statistics, Budget())
    name = "rlx_inference_batch_rows"
    buckets = {le: count for (each, device, le), count in found.items() if (each, device) == (name + "_bucket", "cpu")}
    assert buckets == {"1.0": 1, "2.0": 1, "4.0": 3, "+Inf": 3}
    assert found[name + "_sum", "cpu", ""] == 1 + 3 + 4
    assert found[name + "_count", "cpu", ""] == 3
    assert found[name + "_bucket", "webgpu", "256.0"] == 0
    assert found[name + "_bucket", "webgpu", "512.0"] == 1


def test_the_budget_is_shown() -> None:
    """What is held, what may be, the peak, and how many requests were refused."""
    budget = Budget(1000)
    share = Share(budget)
    share.take(900)
    with pytest.raises(ServingError):
        share.take(200)
    share.keep(300)
    found = _samples(Statistics(), budget)
    server = {name: value for (name, *_), value in found.items() if name.startswith("rlx_server_")}
    assert server == {
        "rlx_server_build_info": 1,
        "rlx_server_held_bytes": 300,
        "rlx_server_most_held_bytes": 1000,
        "rlx_server_peak_held_bytes": 900,
        "rlx_server_refused_request_count_total": 1,
        "rlx_server_ended_request_count_total": 0,
    }


def test_times_are_histograms_in_seconds() -> None:
    """Three buckets a decade, each with all below it; their sum is that of the requests."""
    statistics = Statistics()
    for took_us in (90, 100, 2400, 2600, 10**9):
        statistics.answered(Times(queue_ns=20_000), took_us * 1000)
    found = _samples(statistics, Budget())
    name = "rlx_inference_request_duration_seconds"
    buckets = {le: count for (each, _, le), count in found.items() if each == name + "_bucket"}
    assert [le for le in buckets if le.startswith("0.00")] == [*("0.0001", "0.00025", "0.0005"), *_MILLISECONDS]
    assert (buckets["0.0001"], buckets["0.001"], buckets["0.0025"], buckets["0.005"]) == (2, 2, 3, 4)
    assert (buckets["50.0"], buckets["+Inf"], found[name + "_count", "", ""]) == (4, 5, 5)
    assert found[name + "_sum", "", ""] == pytest.approx(1000.00519)
    assert found["rlx_inference_queue_duration_seconds_bucket", "", "2.5e-05"] == 5


def test_the_build_and_the_state_of_each_model_are_metrics() -> None:
    """Versions and machine as labels; a model that is not loaded is 0."""
    text = _text(Statistics(), Budget())
    [build] = [family for family in text_string_to_metric_families(text) if family.name == "rlx_server_build_info"]
    assert build.samples[0].labels == machine_facts()
    assert build.samples[0].labels["version"]
    assert 'rlx_model_ready{model="m",version="1"} 1.0' in text
    assert 'rlx_model_ready{model="n",version="1"} 0.0' in text
