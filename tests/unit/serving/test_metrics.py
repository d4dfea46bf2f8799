"""What `/metrics` says of batches and of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from rlx_ort import Device, ServingError
from rlx_ort.serving.budget import Budget, Share
from rlx_ort.serving.lanes import Times
from rlx_ort.serving.metrics import rendered
from rlx_ort.serving.models import Statistics


def _samples(statistics: Statistics, budget: Budget) -> dict[tuple[str, str, str], float]:
    model = SimpleNamespace(name="m", version="1", statistics=statistics, scheduler=SimpleNamespace(depth=0))
    repository: Any = SimpleNamespace(models=lambda: [model], budget=budget)
    text = rendered(repository)[0].decode()
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
        "rlx_server_held_bytes": 300,
        "rlx_server_most_held_bytes": 1000,
        "rlx_server_peak_held_bytes": 900,
        "rlx_server_refused_request_count_total": 1,
        "rlx_server_ended_request_count_total": 0,
    }
