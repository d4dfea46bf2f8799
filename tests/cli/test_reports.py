"""`devices`, `doctor`, `inspect` and `report`: what they say about this machine and a model."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import make_text_classifier
import onnx
import onnx.parser
import pytest
from command_line import Cli

from rlx_ort import Device
from rlx_ort.providers.diagnosis import Finding, Severity


def test_devices_lists_every_kind_once(cli: Cli) -> None:
    """Each known kind of device has one row, and the CPU's says it is available."""
    rows = cli("devices", "--json").document["devices"]
    assert sorted(row["device"] for row in rows) == sorted(map(str, Device.all()))
    assert [row["available"] for row in rows if row["device"] == "cpu"] == [True]


def test_devices_gives_a_reason_for_each_that_is_missing(cli: Cli) -> None:
    """No device is unavailable without saying why."""
    rows = cli("devices", "--json").document["devices"]
    assert [row["device"] for row in rows if not row["available"] and not row["reason"]] == []


def test_devices_prints_a_table_for_people(cli: Cli) -> None:
    """Without --json there is a row for each device in plain text."""
    outcome = cli("devices")
    assert outcome.code == 0
    assert any(line.split()[:3] == ["cpu", "CPU", "(MLAS)"] for line in map(str.strip, outcome.out.splitlines()))


def test_inspect_describes_the_classifier(cli: Cli, classifier: Path) -> None:
    """Inputs, outputs, dims, and the parameters' number and bytes are those of the file."""
    document = cli("inspect", classifier, "--json").document
    weights = make_text_classifier.make_weights()
    assert [(row["name"], row["dtype"], row["shape"]) for row in document["inputs"]] == [
        ("ids", "i64", ["batch", "tokens"]),
        ("mask", "i64", ["batch", "tokens"]),
    ]
    assert [row["name"] for row in document["outputs"]] == ["probabilities"]
    assert (document["dims"][:2], document["opset"]["ai.onnx"]) == (["batch", "tokens"], 21)
    assert document["params"] == {
        "count": len(weights),
        "elements": sum(array.size for array in weights.values()),
        "bytes": sum(array.nbytes for array in weights.values()),
    }


def test_inspect_prints_tables_for_people(cli: Cli, classifier: Path) -> None:
    """Without --json the same facts are in the text."""
    outcome = cli("inspect", classifier)
    assert outcome.code == 0
    assert [word for word in ("ids", "mask", "probabilities", "batch, tokens") if word not in outcome.out] == []


def test_inspect_counts_the_memory_of_the_sizes_that_are_given(cli: Cli, classifier: Path) -> None:
    """Weights are those of the file whatever the sizes, activations grow with them; the text has both."""
    sizes = (("--dim", "batch=2", "--dim", "tokens=8"), ("--dim", "batch=64", "--dim", "tokens=128"))
    small, large = (
        next(
            row
            for row in cli("inspect", classifier, "--memory", *dims, "--json").document["memory"]
            if row["device"] == "cpu"
        )
        for dims in sizes
    )
    weights = sum(array.nbytes for array in make_text_classifier.make_weights().values())
    assert weights <= small["weights"] == large["weights"] < weights + 10_000
    assert small["activations"] * 32 < large["activations"] <= large["arena"]
    assert large["total"] < large["limit"] if sys.platform == "linux" else large["limit"] is None
    text = cli("inspect", classifier, "--memory").out
    assert [word for word in ("weights", "packed", "activations", "total") if word not in text] == []
    assert "memory" not in cli("inspect", classifier, "--json").document


def test_report_has_the_memory_of_a_device_that_takes_the_model(cli: Cli, add_one: Path) -> None:
    """In bytes in the document, and as a column."""
    rows = {row["device"]: row for row in cli("report", add_one, "--json").document["devices"]}
    assert rows["cpu"]["memory_bytes"] > 0
    assert rows["tpu"]["memory_bytes"] is None
    assert "memory" in cli("report", add_one).out


def test_inspect_shows_the_facts_recorded_in_the_file(cli: Cli, tmp_path: Path) -> None:
    """Its size, IR version, opset, producer, operators and metadata, before the import rewrites anything."""
    proto = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 12, "com.microsoft": 1], producer_name: "pytorch", producer_version: "2.4">
    old (float[rows, 2] x, float[2] b) => (float[rows] y)
    { g = com.microsoft.BiasGelu (x, b)  y = ReduceSum <axes: ints = [1], keepdims: int = 0> (g) }""")
    onnx.helper.set_model_props(proto, {"author": "somebody", "labels": "cat," * 40})
    path = tmp_path / "old.onnx"
    onnx.save(proto, path)
    document = cli("inspect", path, "--json").document
    assert document["file"] == {
        "bytes": path.stat().st_size,
        "weight_bytes": 0,
        "ir_version": 8,
        "opset": {"ai.onnx": 12, "com.microsoft": 1},
        "producer": "pytorch 2.4",
        "operators": [
            {"domain": "ai.onnx", "kind": "ReduceSum", "count": 1},
            {"domain": "com.microsoft", "kind": "BiasGelu", "count": 1},
        ],
        "doc": "",
    }
    assert document["metadata"] == {"author": "somebody", "labels": "cat," * 40}
    text = cli("inspect", path).out
    words = ("opset ai.onnx 12, com.microsoft 1", "pytorch 2.4", "metadata author", "somebody", "ReduceSum", "BiasGelu")
    assert [word for word in words if word not in text] == []
    assert text.count("cat,") == 40


def test_report_recommends_one_device_that_can_run_the_model(cli: Cli, classifier: Path) -> None:
    """Exactly one row is recommended; it is available, supports the graph and has no blocker."""
    rows = cli("report", classifier, "--dim", "batch=2", "--dim", "tokens=8", "--json").document["devices"]
    [chosen] = [row for row in rows if row["recommended"]]
    assert (chosen["available"], chosen["supports_graph"], chosen["blocker"]) == (True, True, None)
    assert chosen["predicted_ns"] > 0


def test_report_names_the_blocker_of_a_denied_device(cli: Cli, add_one: Path) -> None:
    """A denied device is blocked by the policy and is not recommended."""
    rows = {row["device"]: row for row in cli("report", add_one, "--deny", "cpu", "--json").document["devices"]}
    assert "denied" in rows["cpu"]["blocker"]
    assert rows["cpu"]["recommended"] is False


def test_report_with_sessions_reads_the_placement(cli: Cli, add_one: Path) -> None:
    """With --sessions the CPU's session has all its nodes on the CPU, and unavailable devices are not opened."""
    rows = {row["device"]: row for row in cli("report", add_one, "--sessions", "--json").document["devices"]}
    assert (rows["cpu"]["placement_share"], rows["cpu"]["open_error"]) == (1.0, None)
    assert rows["tpu"]["placement_share"] is None


def test_report_keeps_the_rows_of_the_allow_list(cli: Cli, add_one: Path) -> None:
    """With --only, the report has these devices in this order."""
    rows = cli("report", add_one, "--only", "cuda,cpu", "--json").document["devices"]
    assert [row["device"] for row in rows] == ["cuda", "cpu"]


def test_report_says_which_predictions_were_not_measured_here(cli: Cli, add_one: Path) -> None:
    """A device whose profile was shipped, not measured, is named in a note on stderr."""
    rows = cli("report", add_one, "--only", "cpu", "--json").document["devices"]
    assert rows[0]["profile_source"].startswith("default")
    assert "not measured on this machine: cpu" in cli("report", add_one, "--only", "cpu").err


@pytest.mark.parametrize(
    ("severity", "code"), [(Severity.ERROR, 1), (Severity.WARNING, 0), (Severity.INFO, 0)], ids=lambda value: str(value)
)
def test_doctor_returns_1_for_an_error_only(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, severity: Severity, code: int
) -> None:
    """A finding at error level makes the exit code 1; warnings and remarks leave it at 0."""
    finding = Finding("some-code", severity, "what was found", "what to do")
    monkeypatch.setattr("rlx_ort.providers.diagnosis.diagnose", lambda: [finding])
    outcome = cli("doctor", "--json")
    row = {"code": "some-code", "level": severity.value, "what": "what was found", "remedy": "what to do"}
    assert (outcome.code, outcome.document) == (code, {"schema": 1, "findings": [row]})


def test_doctor_prints_the_remedy_of_each_finding(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table for people holds the level, the finding and its remedy."""
    finding = Finding("some-code", Severity.WARNING, "what was found", "what to do")
    monkeypatch.setattr("rlx_ort.providers.diagnosis.diagnose", lambda: [finding])
    outcome = cli("doctor")
    assert [word for word in ("warning", "what was found", "what to do") if word not in outcome.out] == []


def test_doctor_tells_the_onnx_runtime_of_this_machine(cli: Cli) -> None:
    """On the machine as it is, one finding names the ONNX Runtime that is loaded."""
    rows = cli("doctor", "--json").document["findings"]
    [runtime] = [row for row in rows if row["code"] == "runtime"]
    assert importlib.metadata.version("onnxruntime") in runtime["what"]


def test_report_says_of_each_kind_of_op_how_it_gets_to_the_device(cli: Cli, add_one: Path) -> None:
    """With --ops and --open, the CPU's row has the path of each kind, and where a session put its nodes."""
    document = cli("report", add_one, "--only", "cpu", "--ops", "--sessions", "--json").document
    dispatch = document["devices"][0]["dispatch"]
    assert (dispatch["policy"], dispatch["compile_ready"]) == ("prefer-native", True)
    assert [(row["path"], row["count"], row["placed"]) for row in dispatch["ops"]] == [
        ("native", 1, {"CPUExecutionProvider": 1})
    ]


def test_report_prints_the_ops_for_people(cli: Cli, add_one: Path) -> None:
    """One header a device, one line a kind."""
    outcome = cli("report", add_one, "--only", "cpu", "--ops")
    assert outcome.code == 0
    assert "dispatch report: CPU, policy prefer-native" in outcome.out
    assert "1 x native" in outcome.out
