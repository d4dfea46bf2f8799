"""Traces: phases with ONNX Runtime's profile inside, by the user's names, in the form that Perfetto reads."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from typing import Any

import make_text_classifier
import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, Graph, PlacementRule, Precision, Session, from_onnx
from rlx_ort.report.trace import TracedRun, trace_document, traced_run

INPUTS = make_text_classifier.sample_inputs(batch=2, tokens=8)
PHASES = ["choose", "export", "open", *["copy in", "run", "copy out"] * 2]


def _traced(device: Device, options: CompileOptions | None = None) -> TracedRun:
    graph = from_onnx(make_text_classifier.make_model(make_text_classifier.make_weights()))
    return traced_run(graph, INPUTS, functools.partial(Device, device), options, runs=2)


def test_the_phases_fill_the_time(device: Device) -> None:
    """Their sum is within 5 % of the wall time, none overlaps the next, and the outputs are those of a plain run.

    A busy machine may stop the thread between two phases, so one of five tries must show it.
    """
    for _ in range(5):
        traced = _traced(device)
        if sum(phase.ns for phase in traced.phases) >= 0.95 * traced.wall_ns:
            break
    assert [phase.name for phase in traced.phases] == PHASES
    assert sum(phase.ns for phase in traced.phases) == pytest.approx(traced.wall_ns, rel=0.05)
    ends = [phase.start_ns + phase.ns for phase in traced.phases]
    assert all(end <= after.start_ns for end, after in zip(ends, traced.phases[1:], strict=False))
    graph = from_onnx(make_text_classifier.make_model(make_text_classifier.make_weights()))
    assisted = CompileOptions(placement=PlacementRule.ASSISTED)
    [expected] = Session(device, assisted).compile(graph).run(INPUTS)
    np.testing.assert_allclose(traced.outputs[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dims", [{}, {"batch": 2, "tokens": 8}], ids=["open dims", "bound dims"])
def test_every_node_has_the_users_name(dims: dict[str, int]) -> None:
    """Fused nodes too: ONNX Runtime names them after nothing of the model, and their result has a name."""
    traced = _traced(Device.CPU, CompileOptions(dims=dims))
    model = make_text_classifier.make_model(make_text_classifier.make_weights())
    own = {node.name for node in model.graph.node}
    assert {node.op_type for node in traced.nodes if node.origin not in own} == set()
    fused = {node.origin for node in traced.nodes if node.op_type in {"FusedMatMul", "Gelu", "BiasGelu"}}
    assert fused == {"products0", "gelu0", "products1", "gelu1"}


def test_convolutions_in_blocked_layout_have_the_users_name() -> None:
    """The CPU runs them under the name of their result, which a Relu after them writes."""
    graph = Graph("convolutions")
    x = graph.input("x", [1, 16, 8, 8])
    weight = graph.param("w", [16, 16, 3, 3], data=np.ones((16, 16, 3, 3), np.float32))
    kind = x.type
    for at in range(2):
        [x] = graph.onnx_node("Conv", [x, weight], {"pads": [1, 1, 1, 1]}, types=[kind], name=f"conv_{at}")
        [x] = graph.onnx_node("Relu", [x], types=[kind], name=f"relu_{at}")
    graph.outputs = [x]
    traced = traced_run(graph, {"x": np.ones((1, 16, 8, 8), np.float32)}, functools.partial(Device, "cpu"))
    named = {node.origin for node in traced.nodes if node.op_type.endswith("Conv")}
    assert named == {"conv_0", "conv_1"}


def test_nodes_that_are_computed_in_f32_for_f16_have_the_users_name() -> None:
    """On the CPU, which casts around them and expands functions: no time is without a node of the user."""
    graph = Graph("half")
    x = graph.input("x", [1, 16, 8, 8])
    weight = graph.param("w", [16, 16, 3, 3], data=np.full((16, 16, 3, 3), 0.01, np.float32))
    for at in range(2):
        [y] = graph.onnx_node("Conv", [x, weight], {"pads": [1, 1, 1, 1]}, types=[x.type], name=f"conv_{at}")
        [x] = graph.onnx_node("Relu", [y], types=[x.type], name=f"relu_{at}")
    graph.outputs = [graph.softmax(graph.gelu(x, name="gelu"), name="softmax")]
    inputs = {"x": np.ones((1, 16, 8, 8), np.float32)}
    traced = traced_run(graph, inputs, functools.partial(Device, "cpu"), CompileOptions(precision=Precision.F16))
    assert [node.name for node in traced.nodes if not node.exported] == []
    assert {node.origin for node in traced.nodes if node.op_type == "Conv"} == {"conv_0", "conv_1"}
    assert {"gelu", "softmax"} <= {node.origin for node in traced.nodes}


def test_nodes_run_within_a_run(device: Device) -> None:
    """The two clocks agree to a millisecond."""
    traced = _traced(device)
    runs = [(phase.start_ns, phase.start_ns + phase.ns) for phase in traced.phases if phase.name == "run"]
    for node in traced.nodes:
        assert any(start - 1e6 <= node.start_ns and node.start_ns + node.ns <= end + 1e6 for start, end in runs), node


def _problems(document: dict[str, Any]) -> list[str]:
    """Return what breaks the rules of Chrome's trace event format: fields, types, names, and slices that nest."""
    found = []
    slices = defaultdict(list)
    named = set()
    for event in document["traceEvents"]:
        if not (isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)):
            found.append(f"fields of {event}")
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
        elif event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        else:
            found.append(f"phase of {event}")
    for (pid, tid), events in slices.items():
        if ("thread_name", pid, tid) not in named or ("process_name", pid, 0) not in named:
            found.append(f"no name for {pid}, {tid}")
        open_ends: list[float] = []
        for start, end, name in sorted(events, key=lambda event: (event[0], -event[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if end < start or (open_ends and end > open_ends[-1] + 1):  # ONNX Runtime counts whole microseconds
                found.append(f"{name} overlaps what it is not in")
            open_ends.append(end)
    return found


def test_the_trace_keeps_the_rules_of_the_format(device: Device) -> None:
    """Perfetto and Chrome read complete events with numbers, and slices of a thread nest."""
    document = json.loads(json.dumps(trace_document([_traced(device), _traced(Device.CPU)])))
    assert _problems(document) == []
    processes = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert processes == [f"rlx-ort on {device.label}", "rlx-ort on cpu"]
    named = {
        event["name"] for event in document["traceEvents"] if event["cat" if "cat" in event else "name"] == "phases"
    }
    assert named == {*PHASES}
