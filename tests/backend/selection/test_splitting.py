"""Plans keep their budgets and are as fast as the best cut; nothing here opens a session of the second device."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, Graph, GraphDevices, InputError, MemoryBudgetError
from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.options.split_plan import SplitPlan, Stage
from rlx_ort.selection.memory import memory_need
from rlx_ort.selection.splitting import counted, memory_of, plan_split
from rlx_ort.selection.support import support_of

CPU, CUDA = Device.CPU, Device.CUDA
ROWS = 1024  # enough that a GPU is faster, by the shipped figures
X = {"x": np.ones((ROWS, 256), np.float32)}
WIDTHS = [256, 512, 256, 1024, 256, 512, 512, 256]


def layers(name: str = "layers") -> Graph:
    """Return seven products of different size with a gelu behind each."""
    graph = Graph(name)
    value = graph.input("x", ["rows", WIDTHS[0]])
    for number, shape in enumerate(itertools.pairwise(WIDTHS)):
        weight = graph.param(f"w{number}", data=np.full(shape, 0.01, np.float32), shape=shape)
        value = graph.gelu(value @ weight, name=f"layer{number}")
    graph.outputs = [value]
    return graph


def need(graph: Graph, device: Device) -> int:
    """Return the memory of the whole graph on a device."""
    found = memory_need(graph, device, dims={"rows": ROWS})
    assert found is not None
    return found.total


def budgets(graph: Graph, missing_bytes: int, cpu_bytes: int = 1 << 40) -> dict[Device, int]:
    """Return budgets of which that of CUDA misses some bytes for the whole graph."""
    return {CUDA: need(graph, CUDA) - missing_bytes, CPU: cpu_bytes}


@pytest.mark.parametrize("missing_bytes", [100_000, 1_000_000, 2_500_000])
def test_a_plan_keeps_its_budgets(missing_bytes: int) -> None:
    """By the figures of each stage alone; the rest of the graph goes to the other device."""
    graph = layers()
    plan = GraphDevices(graph).plan(X, budgets(graph, missing_bytes))
    given = dict(plan.budgets)
    assert {stage.device for stage in plan.stages} == {CPU, CUDA}
    for device, used in memory_of(plan).items():
        assert used <= given[device]
    for stage in plan.stages:
        assert stage.memory_bytes > 0
        assert stage.run_ns is not None


@pytest.mark.parametrize("missing_bytes", [100_000, 1_000_000, 2_500_000])
def test_no_cut_in_two_is_faster(missing_bytes: int) -> None:
    """Of all that keep the budgets, at every node and in both orders."""
    graph = layers()
    given = budgets(graph, missing_bytes)
    plan = GraphDevices(graph).plan(X, given)
    best = math.inf
    for first, node in itertools.product((CPU, CUDA), graph.nodes[:-1]):
        second = CUDA if first == CPU else CPU
        cut = SplitPlan((Stage(first, node.name), Stage(second, graph.nodes[-1].name)), tuple(given.items()))
        with contextlib.suppress(GraphVerifyError, MemoryBudgetError):  # before any node that is needed, or too large
            best = min(best, counted(graph, cut, CompileOptions(), {"rows": ROWS}).run_ns or math.inf)
    assert plan.run_ns is not None
    assert plan.run_ns <= best * 1.001


def test_a_graph_that_fits_has_one_stage_on_the_fastest_device() -> None:
    """Nothing is cut without need."""
    graph = layers()
    plan = GraphDevices(graph).plan(X, {CUDA: "40GB", CPU: "40GB"})
    assert len(plan.stages) == 1


def test_the_slowest_stage_counts_where_runs_overlap() -> None:
    """The time of a plan is that of its slowest stage, and no more than that of the other kind of plan."""
    graph = layers()
    given = budgets(graph, 1_000_000)
    usual, overlapping = (GraphDevices(graph).plan(X, given, overlap=overlap) for overlap in (False, True))
    times = [stage.run_ns or math.inf for stage in overlapping.stages]
    assert overlapping.run_ns == max(times)
    assert max(times) <= max(stage.run_ns or math.inf for stage in usual.stages)


def test_a_node_that_only_the_cpu_takes_goes_there() -> None:
    """With budgets for more than the whole graph on both devices, and a CPU that is slower."""
    graph = Graph("determinant")
    x = graph.input("x", [64, 64])
    big = graph.gelu(x @ x, name="big")
    graph.outputs = list(graph.onnx_node("Det", [big], types=[TensorType(DType.F32, Shape([]))]))
    assert not support_of(CUDA, graph).supported
    plan = GraphDevices(graph).plan(budgets={CUDA: "40GB", CPU: "40GB"})
    assert plan.stages[-1].device == CPU


def test_plans_are_the_same_each_time() -> None:
    """Of graphs that are alike."""
    plans = [GraphDevices(layers()).plan(X, budgets(layers(), 1_000_000)) for _ in range(2)]
    assert plans[0].document() == plans[1].document()


def test_json_gives_the_plan_back() -> None:
    """With its figures."""
    graph = layers()
    plan = GraphDevices(graph).plan(X, budgets(graph, 1_000_000))
    again = SplitPlan.read(json.dumps(plan.document()).encode())
    assert again == plan
    assert again.document() == plan.document()


def test_a_plan_of_devices_and_nodes_is_enough() -> None:
    """Whoever edits one need not know figures; they are counted when it is used."""
    graph = layers()
    plan = SplitPlan.read({"stages": [{"device": "cuda", "last": "layer3"}, {"device": "cpu", "last": "layer6"}]})
    assert all(stage.memory_bytes > 0 for stage in counted(graph, plan, CompileOptions(), {"rows": ROWS}).stages)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"stages": []}, "no stages"),
        ({"stages": [{"device": "cuda"}]}, "last is missing"),
        ({"stages": [{"device": "gpuu", "last": "x"}]}, "gpuu"),
        ({"stages": [{"device": "cpu", "last": "x"}], "budget": 3}, "budget is not known"),
        ({"stages": [{"device": "cpu", "last": "x"}], "schema": 7}, "another version"),
        ({"stages": [{"device": "cpu", "last": "x"}], "budgets": {"cpu": -1}}, "at least 0"),
    ],
)
def test_what_is_no_plan_is_refused(document: Mapping[str, Any], message: str) -> None:
    """With the place of the mistake."""
    with pytest.raises(InputError, match=message):
        SplitPlan.read(document)


def test_budgets_that_hold_nothing_say_what_is_missing() -> None:
    """Before anything is loaded."""
    graph = layers()
    with pytest.raises(MemoryBudgetError, match=r"needs at least [\d,]+ bytes: [\d,]+ are missing"):
        GraphDevices(graph).plan(X, {CPU: 1_000_000})


def test_a_plan_over_its_budget_names_it_and_by_how_much() -> None:
    """When it is used, before anything is loaded."""
    graph = layers()
    plan = GraphDevices(graph).plan(X, budgets(graph, 1_000_000))
    used = memory_of(plan)[CUDA]
    smaller = SplitPlan(plan.stages, ((CUDA, used - 1000), (CPU, 1 << 40)))
    runner = GraphDevices(graph, options=CompileOptions(split=smaller))
    with pytest.raises(MemoryBudgetError, match=r"on CUDA need .*: 1,000 are missing"):
        runner.run_fastest(X)


@pytest.mark.parametrize("given", ["cuda", "cuda=much", "nothing=4GB", "", {"cuda": "4 apples"}])
def test_a_budget_that_is_none_is_refused(given: Any) -> None:
    """With an example of one."""
    with pytest.raises(InputError, match="cuda=8GB,cpu=16GB"):
        GraphDevices(layers()).plan(X, given)


def test_where_no_plan_keeps_all_stages_open_one_device_opens_them_in_turn() -> None:
    """With the weights on the host; the largest stage keeps the budget."""
    graph = layers()
    given = {CUDA: need(graph, CUDA) - 1_500_000}
    plan = plan_split(graph, given, dims={"rows": ROWS})
    assert plan.streams
    assert len(plan.stages) > 1
    assert memory_of(plan)[CUDA] <= given[CUDA]


def test_auto_plans_nothing_where_every_device_holds_the_graph() -> None:
    """The run is an ordinary one."""
    runner = GraphDevices(layers(), options=CompileOptions(split="auto"))
    assert not hasattr(runner.run_fastest(X).placement, "stages")


def test_options_take_no_other_split() -> None:
    """Than a plan, or "auto"."""
    with pytest.raises(InputError, match="'auto' or a plan"):
        CompileOptions(split="half")  # type: ignore[arg-type]
