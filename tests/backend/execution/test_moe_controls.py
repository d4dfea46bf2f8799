"""Mixtures of experts: picks of routers are captured, and experts that are not resident run on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort import CompiledGraph, Device, DevicePolicy, Graph, GraphDevices, MoeResidencyStats, Session
from rlx_ort.errors import GraphVerifyError, InputError
from rlx_ort.options.compile_options import CompileOptions, PlacementRule

EXPERTS, WIDTH, TOKENS, PICKED = 4, 4, 3, 2
SOURCE = np.random.default_rng(5)
WEIGHTS = {
    "router": SOURCE.normal(size=(WIDTH, EXPERTS)),
    **{name: SOURCE.normal(size=(EXPERTS, WIDTH, WIDTH)) for name in ("gate", "up", "down")},
}
X = SOURCE.normal(size=(TOKENS, WIDTH)).astype(np.float32)


def _graph() -> Graph:
    graph = Graph("moe")
    x = graph.input("x", [TOKENS, WIDTH])
    w = {name: graph.param(name, data.shape, data=data.astype(np.float32)) for name, data in WEIGHTS.items()}
    picks = graph.topk(x @ w["router"], PICKED, "i32", name="picks")
    experts = graph.reshape(picks, [TOKENS * PICKED])
    rows = graph.expand(graph.reshape(x, [TOKENS, 1, WIDTH]), [TOKENS, PICKED, WIDTH])
    rows = graph.reshape(rows, [TOKENS * PICKED, WIDTH])
    for name in ("gate", "up", "down"):
        rows = graph.grouped_matmul(rows, w[name], experts, name=f"mm_{name}")
    graph.outputs = [rows]
    return graph


def _compiled(device: Device | str) -> CompiledGraph:
    """Return the graph compiled; a loop over experts has nodes that WebGPU leaves to the CPU."""
    return Session(device, CompileOptions(placement=PlacementRule.ASSISTED)).compile(_graph())


def _picks() -> npt.NDArray[np.int64]:
    scores = X.astype(np.float64) @ WEIGHTS["router"]
    return np.argsort(-scores, axis=1)[:, :PICKED].reshape(-1)


def _expected() -> npt.NDArray[np.float64]:
    rows = np.repeat(X.astype(np.float64), PICKED, axis=0)
    for name in ("gate", "up", "down"):
        rows = np.stack([row @ WEIGHTS[name][expert] for row, expert in zip(rows, _picks(), strict=True)])
    return rows


def _stats(masks: list[list[bool]]) -> MoeResidencyStats:
    counts = np.bincount(_picks(), minlength=EXPERTS)
    found = dict.fromkeys(("gpu_expert_calls", "cpu_expert_calls", "gpu_tokens", "cpu_tokens"), 0)
    for mask in masks:
        for expert, count in enumerate(counts):
            side = "gpu" if mask[expert] else "cpu"
            found[f"{side}_expert_calls"] += int(count > 0)
            found[f"{side}_tokens"] += int(count)
    return MoeResidencyStats(**found)


@pytest.mark.parametrize("mask", [[True] * 4, [True, False, True, False], [False] * 4], ids=["all", "some", "none"])
def test_results_do_not_depend_on_where_experts_are(device: Device, mask: list[bool]) -> None:
    """With all, some and no experts on the device, each row has the product of its own expert."""
    compiled = _compiled(device)
    compiled.set_moe_resident_experts(mask)
    np.testing.assert_allclose(compiled.run({"x": X})[0], _expected(), rtol=1e-4, atol=1e-4)
    assert compiled.take_moe_residency_stats() == _stats([mask] * 3)
    assert compiled.take_moe_residency_stats() is None


@pytest.mark.webgpu
def test_experts_that_are_not_resident_are_nodes_of_the_cpu() -> None:
    """Every node of their products is on the CPU, bodies included, and none of them counts as astray."""
    compiled = _compiled("webgpu")
    compiled.set_moe_resident_experts([True, False, True, False])
    compiled.run({"x": X})
    nodes = [node for group in compiled.placement.nodes_by_ep.values() for node in group]
    host = [node for node in nodes if "@moe-host" in node.name]
    assert {node.provider for node in host} == {"CPUExecutionProvider"}
    assert {node.op_type for node in host} >= {"MatMul"}
    on_device = [node for node in nodes if node.provider == "WebGpuExecutionProvider" and node.op_type == "MatMul"]
    assert len(on_device) == 4  # the router, and the resident experts of three products
    assert not {node.name for node in compiled.placement.strays} & {node.name for node in host}


def test_masks_of_layers_replace_one_for_all() -> None:
    """Experts beyond a mask, and layers beyond the masks, are resident."""
    compiled = _compiled("cpu")
    compiled.set_moe_resident_experts([False] * 4)
    compiled.set_moe_resident_experts_per_layer([[False]])
    compiled.run({"x": X})
    assert compiled.take_moe_residency_stats() == _stats([[False, True, True, True]] * 3)
    compiled.set_moe_resident_experts_per_layer([])
    compiled.run({"x": X})
    assert compiled.take_moe_residency_stats() == _stats([[True] * 4] * 3)


def test_accounts_belong_to_one_executable() -> None:
    """The run of another graph does not show, nor does that of a clone."""
    first, second = (_compiled("cpu") for _ in range(2))
    first.set_moe_resident_experts([True] * 4)
    second.set_moe_resident_experts([True] * 4)
    clone = first.clone()
    second.run({"x": X})
    clone.run({"x": X})
    assert first.take_moe_residency_stats() is None
    assert clone.take_moe_residency_stats() is not None


def test_picks_are_recorded_until_they_are_taken(device: Device) -> None:
    """Two forwards add up, a clone records into the same place, and the outputs stay those of the graph."""
    compiled = _compiled(device)
    assert compiled.take_moe_topk_capture() is None
    assert compiled.enable_moe_topk_capture(EXPERTS)
    assert len(compiled.run({"x": X})) == 1
    compiled.clone().run({"x": X})
    (layer,) = compiled.take_moe_topk_capture() or []
    assert layer.dtype == np.uint32
    np.testing.assert_array_equal(layer, np.concatenate([_picks(), _picks()]))
    assert compiled.take_moe_topk_capture() is None


def test_a_router_of_another_size_is_not_recorded() -> None:
    """Nothing is enabled, and nothing is recorded."""
    compiled = _compiled("cpu")
    assert not compiled.enable_moe_topk_capture(EXPERTS + 1)
    compiled.run({"x": X})
    assert compiled.take_moe_topk_capture() is None


def test_enabling_again_begins_anew() -> None:
    """What was recorded before is gone."""
    compiled = _compiled("cpu")
    compiled.enable_moe_topk_capture(EXPERTS)
    compiled.run({"x": X})
    compiled.enable_moe_topk_capture(EXPERTS)
    assert compiled.take_moe_topk_capture() is None


def test_a_changed_weight_reaches_experts_on_both_sides(device: Device) -> None:
    """A parameter that is split into parts is still set by its own name."""
    compiled = _compiled(device)
    compiled.set_moe_resident_experts([True, False, True, False])
    compiled.run({"x": X})
    compiled.set_param("down", np.zeros((EXPERTS, WIDTH, WIDTH), np.float32))
    np.testing.assert_array_equal(compiled.run({"x": X})[0], np.zeros((TOKENS * PICKED, WIDTH)))


@pytest.mark.webgpu
def test_experts_that_are_computed_cannot_move() -> None:
    """A weight that is neither parameter nor constant is refused, and the graph stays usable."""
    graph = Graph("computed")
    x, w = graph.input("x", [2, WIDTH]), graph.param("w", [EXPERTS, WIDTH, WIDTH], data=WEIGHTS["gate"])
    graph.outputs = [graph.grouped_matmul(x, w * 2.0, graph.input("experts", [2], "i32"))]
    compiled = Session("webgpu").compile(graph)
    with pytest.raises(GraphVerifyError, match="computes the weights"):
        compiled.set_moe_resident_experts([False])
    feeds: dict[str, Any] = {"x": X[:2], "experts": np.array([1, 0], np.int32)}
    assert compiled.run(feeds)[0].shape == (2, WIDTH)


def test_a_mask_is_one_row_of_booleans() -> None:
    """Numbers and tables raise."""
    compiled = _compiled("cpu")
    with pytest.raises(InputError, match="booleans"):
        compiled.set_moe_resident_experts(np.array([1, 0, 1, 0]))  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InputError, match="booleans"):
        compiled.set_moe_resident_experts(np.ones((2, 2), bool))


def test_every_run_through_buffers_is_recorded_once(device: Device) -> None:
    """The first `run_slots` of a shape counts like any other."""
    compiled = _compiled(device)
    compiled.enable_moe_topk_capture(EXPERTS)
    for runs in (1, 2):
        for _ in range(runs):
            compiled.run_slots([X])
        (layer,) = compiled.take_moe_topk_capture() or []
        np.testing.assert_array_equal(layer, np.concatenate([_picks()] * runs))


def test_capture_counts_for_the_named_and_the_chosen_graph() -> None:
    """What is enabled through one graph of a device records the runs of the other."""
    runner = GraphDevices(_graph(), DevicePolicy(allow=[Device.CPU]))
    runner.compile("cpu").enable_moe_topk_capture(EXPERTS)
    runner.run_fastest({"x": X})
    (layer,) = runner.compile("cpu").take_moe_topk_capture() or []
    np.testing.assert_array_equal(layer, _picks())
    with runner.compile("cpu") as lent:
        lent.run({"x": X})
    assert runner.compile("cpu").take_moe_topk_capture() is None
    np.testing.assert_allclose(runner.run("cpu", {"x": X})[0], _expected(), rtol=1e-4, atol=1e-5)
