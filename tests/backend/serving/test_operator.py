"""An operator's first hour with the server, in the order of docs/serving.md, and the dashboard for Grafana."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_provider import until
from served_models import save_product, started_command

from rlx_ort import is_available

prometheus = pytest.importorskip("prometheus_client.parser")
ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "examples" / "serving" / "grafana-dashboard.json").read_text(encoding="utf-8"))
TOKEN = "open sesame"  # of this test
MOST_MINUTES = 5
INPUT = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}


class Operator:
    """Starts a server with a token, and asks it."""

    def __init__(self, folder: Path) -> None:
        arguments = [str(folder), "--device", "cuda,cpu", "--token-env", "SERVE_TOKEN", "--repository-control"]
        self.process, self.address, _ = started_command(arguments, {"SERVE_TOKEN": TOKEN})

    def ask(self, path: str, document: Any = None, token: str = TOKEN) -> tuple[int, Any]:
        """Return the status and the answer, of JSON if it is such."""
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(f"http://{self.address}{path}", data, {"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read().decode()
                return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
        except urllib.error.HTTPError as err:
            with err:
                return err.code, json.loads(err.read())


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[Path], Operator]]:
    """Return a function that starts a server; what a test started is ended."""
    started: list[Operator] = []

    def start(folder: Path) -> Operator:
        started.append(Operator(folder))
        return started[-1]

    yield start
    for operator in started:
        operator.process.kill()
        operator.process.wait()


def samples(text: str) -> set[tuple[str, frozenset[str]]]:
    """Return the names of metrics and of their labels."""
    families = prometheus.text_string_to_metric_families(text)
    return {(sample.name, frozenset(sample.labels)) for family in families for sample in family.samples}


def test_the_first_hour_of_an_operator(
    begin: Callable[[Path], Operator], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Start, health, who may ask, a request, which device answers and why, its cost, new models, the end."""
    begun_s = time.monotonic()
    for name in ("first", "second"):
        save_product(tmp_path / f"{name}.onnx")
    operator = begin(tmp_path)
    ask = operator.ask
    assert ask("/v2/health/ready")[0] == 200
    assert ask("/v2/models/first/infer", {"inputs": [INPUT]}, token="wrong")[0] == 401
    status, answer = ask("/v2/models/first/infer", {"inputs": [INPUT]})
    assert (status, answer["outputs"][0]["data"][:3]) == (200, [60, 70, 80])
    assert ask("/v2/models/first/infer", {"inputs": []})[0] == 400

    state = ask("/status")[1]
    rows = {row["name"]: row for row in state["models"]}
    assert (rows["first"]["answered"], rows["first"]["failures"]) == (1, 1)
    assert rows["first"]["p95"] > 0
    assert rows["second"]["p95"] is None
    assert state["machine"]["cpu"]
    assert state["machine"]["onnxruntime"].startswith(("onnxruntime", "ort"))
    if not is_available("cuda"):
        assert rows["first"]["devices"] == ["cpu"]
        assert "CUDA" in ask("/v2/models/first/config")[1]["parameters"]["not_used.cuda"]["string_value"]

    text = ask("/metrics")[1]
    for line in ("request_success_total", "request_failure_total", "request_duration_seconds_count"):
        assert f'rlx_inference_{line}{{model="first",version="1"}} 1.0' in text
    assert "rlx_server_build_info{" in text

    save_product(tmp_path / "third.onnx")
    assert ask("/v2/repository/models/third/load", {})[0] == 200
    assert ask("/v2/models/third/infer", {"inputs": [INPUT]})[0] == 200
    (tmp_path / "broken.onnx").write_bytes(b"this is not a model")
    status, answer = ask("/v2/repository/models/broken/load", {})
    assert status >= 400
    reasons = {row["name"]: row["reason"] for row in ask("/status")[1]["models"]}
    assert answer["error"].startswith(reasons["broken"][:20])
    assert reasons["broken"]
    assert 'rlx_model_ready{model="broken",version="1"} 0.0' in ask("/metrics")[1]
    assert ask("/v2/models/first/infer", {"inputs": [INPUT]})[0] == 200

    until(lambda: ask("/status/history")[1]["times"], 20.0, 0.5)  # the first sample
    history = ask("/v2/models/first/history")[1]
    assert len(history["requests"]) == len(history["times"])
    assert sum(filter(None, history["requests"])) > 0
    if sys.platform != "win32":
        operator.process.send_signal(signal.SIGTERM)
        assert operator.process.wait(30) == 0
    minutes = (time.monotonic() - begun_s) / 60
    record_property("minutes", round(minutes, 2))
    assert minutes < MOST_MINUTES


def test_the_dashboard_names_metrics_and_labels_that_there_are(
    begin: Callable[[Path], Operator], tmp_path: Path
) -> None:
    """Of a server that has answered; that of failovers has no sample yet."""
    save_product(tmp_path / "first.onnx")
    ask = begin(tmp_path).ask
    ask("/v2/models/first/infer", {"inputs": [INPUT]})
    until(lambda: ask("/status")[1]["devices"], 20.0, 0.5)
    text = ask("/metrics")[1]
    there = dict(samples(text))
    assert "# TYPE rlx_inference_failover_total counter" in text
    there["rlx_inference_failover_total"] = frozenset({"model", "version", "device"})
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    expressions += [each["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    assert len(expressions) > 20
    for expression in expressions:
        names = re.findall(r"\brlx_\w+", expression)
        assert names, expression
        labels = set(re.findall(r"(\w+)=~?\"", expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            labels |= set(group.split(", "))
        for name in names:
            assert name in there, (name, expression)
            assert labels <= there[name], (name, labels - there[name])
