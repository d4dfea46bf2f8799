"""Every op in every dtype on every provider: right within the bounds, or refused with a reason before anything runs.

The expected results are those of the reference interpreter, in float64. What a provider cannot do is asked, not
listed: where `legalize` refuses, the refusal must name the node, the device, the reason and what to do.

Providers that compile are asked about each node, which takes seconds an op. There one in three pairs of an op and a
dtype that models seldom have is run, always the same; with EVERY_DTYPE=1 all are.
"""

from __future__ import annotations

import os
from functools import cache

import device_facts
import numpy as np
import pytest
from interpreter import RULES, Array, evaluate
from op_tests.cases import CASES, DTYPES, Case, X, built, kinds_of, plain, runnable_kinds
from op_tests.harness import compare

from rlx_ort import Device, DType, Graph, legalize_graph_for_device, verify
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.errors import EngineError, GraphVerifyError, LegalizeError
from rlx_ort.execution.session import Session, working_provider
from rlx_ort.ir.op import op_class
from rlx_ort.ir.serde import from_json, to_json
from rlx_ort.ir.types import TensorType

SELDOM = (DType.BF16, DType.F64, DType.I8, DType.I16, DType.U16, DType.U32, DType.U64)
RUN_ONE_IN = 3  # of those pairs

# Computed from other tests of the op, because the interpreter cannot know them.
ELSEWHERE = {"Capture", "Custom", "OnnxNode", "Param"}


def _takes(case: Case, dtype: DType) -> bool:
    try:
        built(case, dtype)
    except GraphVerifyError:
        return False
    return True


_PAIRS = [
    (name, dtype)
    for name, case in CASES.items()
    for dtype in (DTYPES if case.has_dtype else DTYPES[:1])
    if _takes(case, dtype)
]


def left_out(name: str, dtype: DType) -> bool:
    """Whether an op in a dtype is run with EVERY_DTYPE=1 alone; each op is run in some of the seldom dtypes."""
    if dtype not in SELDOM or os.environ.get("EVERY_DTYPE"):
        return False
    return (list(CASES).index(name) + SELDOM.index(dtype)) % RUN_ONE_IN != 0


@cache
def lacks_f16(device: Device) -> str:
    """Return why this adapter computes no f16 although the provider has kernels for it, or nothing."""
    graph, feeds = built(CASES["stop_gradient"], DType.F16)
    graph.outputs = [graph.neg(graph.outputs[0])]
    try:
        Session(device).compile(graph).run(feeds)
    except EngineError as err:
        if "requires f16 but the device does not support it" in str(err):
            return str(err)
        raise
    return ""


@pytest.mark.parametrize(("name", "dtype"), _PAIRS, ids=[f"{name}-{dtype.value}" for name, dtype in _PAIRS])
def test_op_is_right_or_refused(name: str, dtype: DType, device: Device) -> None:
    """Built, verified, legalised, exported and run, with the interpreter's results; or refused with a reason."""
    if working_provider(device).compiles and left_out(name, dtype):
        pytest.skip("run with EVERY_DTYPE=1")
    case = CASES[name]
    graph, feeds = built(case, dtype)
    assert verify(graph) == []
    try:
        legalize_graph_for_device(graph, device)
    except LegalizeError as err:
        assert_refused_well(err, graph, device)
        return
    if device != Device.CPU and DType.F16 in dtypes_of(graph) and lacks_f16(device):
        pytest.skip(f"this adapter: {lacks_f16(device)}")
    run_and_compare(case, graph, feeds, device, dtype)


def dtypes_of(graph: Graph) -> set[DType]:
    return {kind.dtype for node in graph.nodes for kind in node.types if isinstance(kind, TensorType)}


def run_and_compare(case: Case, graph: Graph, feeds: dict[str, Array], device: Device, dtype: DType) -> None:
    """Run on the device, all of it, and compare within the bound of the narrower of the dtype and the result's."""
    results = Session(device).compile(graph).run(feeds)
    for value, result, expected in zip(graph.outputs, results, evaluate(graph, feeds), strict=True):
        assert DType.from_numpy(result.dtype) is value.dtype
        widths = device_facts.bound(device, DType.from_numpy(result.dtype)), device_facts.bound(device, dtype)
        compare(result, expected, max(widths) * case.loose)


def assert_refused_well(err: LegalizeError, graph: Graph, device: Device) -> None:
    """A refusal names the user's node, the device, two ways out, and the kernel that is missing or not taken."""
    known = ("has no kernel for", f"{device.family.display} leaves ")  # the second of providers that are asked
    text, nodes = str(err), err.report.still_unsupported
    assert nodes
    for node in nodes:
        assert graph.nodes[node.index].name == node.name
        assert repr(node.name) in text
        assert any(each in node.reason for each in known) or (node.reason and working_provider(device).compiles)
    assert device.display in text
    assert "Choose another device" in text
    assert "PlacementRule.ASSISTED" in text


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.has_dtype])
def test_an_op_names_the_dtype_that_it_does_not_take(name: str) -> None:
    """What an op takes on no device is refused while the graph is built, and the message names the dtype."""
    for dtype in DTYPES:
        if (name, dtype) not in _PAIRS:
            with pytest.raises(GraphVerifyError, match=rf"\b{dtype.value}\b"):
                built(CASES[name], dtype)


def test_every_kind_has_a_case_and_a_reference() -> None:
    """An op that is added must be checked here; what the interpreter cannot know is named with its own tests."""
    covered = set()
    for case in CASES.values():
        covered |= kinds_of(plain(case)[0])
    assert set(runnable_kinds()) - covered == ELSEWHERE
    assert {op_class(kind) for kind in covered} - {op_class("Input"), op_class("Constant")} <= set(RULES)


@pytest.mark.parametrize("name", CASES)
def test_every_case_survives_json_and_exports(name: str) -> None:
    """The graph comes back equal from JSON, and each ONNX node of its model leads back to a node of the graph."""
    graph, _ = plain(CASES[name])
    back = from_json(*to_json(graph))
    assert to_json(back) == to_json(graph)
    for node in export_model(back).nodes:
        assert 0 <= node.origin < len(graph.nodes)


def test_a_looser_bound_has_a_reason() -> None:
    """Nobody loosens a bound without saying why."""
    assert all(case.why for case in CASES.values() if case.loose != 1)


def test_inputs_are_the_same_numbers_in_every_float() -> None:
    """The inputs are exact in f16 and bf16, so a difference is the op's."""
    array = X((50,)).array(DType.F64, 0)
    for dtype in (DType.F32, DType.F16, DType.BF16):
        np.testing.assert_array_equal(X((50,)).array(dtype, 0).astype(np.float64), array)
