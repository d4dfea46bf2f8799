"""A graph in stages on several devices gives what it gives on one, however it is run."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_provider import FaultProvider
from model_corpus import UserModel, corpus
from sample_models.decoders import DECODER, FORMS, build
from tiny_llama import Sizes, build_in_place, make_weights

from rlx_ort import (
    CompileOptions,
    DecodeLoop,
    Device,
    DevicePolicy,
    Graph,
    GraphDevices,
    InputError,
    LegalizeError,
    PlacementRule,
    StageError,
    load,
)
from rlx_ort.options.split_plan import SplitPlan, Stage
from rlx_ort.selection.memory import memory_need
from rlx_ort.selection.predict import cost_model
from rlx_ort.selection.support import support_of

SOURCE = np.random.default_rng(42)
X = {"x": SOURCE.normal(size=(3, 8)).astype(np.float32)}
WEIGHTS = [SOURCE.normal(size=(8, 8)).astype(np.float32) for _ in range(4)]
MODELS = {model.name: model for model in corpus() if model.exporter in ("dynamo", "torchscript")}
FEWEST_NODES = 6


@pytest.fixture(autouse=True)
def takes_open_dims(request: pytest.FixtureRequest) -> None:
    """Leave out the device that takes graphs of fixed sizes only: these take any number of rows."""
    if "device" in request.fixturenames and request.getfixturevalue("device").kind == "qnn":
        pytest.skip("it takes graphs of fixed sizes only")


def layers() -> Graph:
    """Return four products with a bias that all of them read, for any number of rows; the first is a result too."""
    graph = Graph("layers")
    x = graph.input("x", ["rows", 8])
    bias = graph.neg(graph.param("bias", data=np.ones(8, np.float32), shape=[8]), name="bias_neg")
    values = [x]
    for number, weight in enumerate(WEIGHTS):
        product = values[-1] @ graph.param(f"w{number}", data=weight, shape=weight.shape)
        values.append(graph.add(product, bias, name=f"layer{number}"))
    graph.set_outputs([values[-1], values[1]], ["y", "first"])
    return graph


def expected(x: Any, weights: Any = WEIGHTS) -> list[Any]:
    """Return the results in float64."""
    values = [np.asarray(x, np.float64)]
    for weight in weights:
        values.append(values[-1] @ weight.astype(np.float64) - 1)
    return [values[-1], values[1]]


def staged(device: Device | str, *last: str, graph: Graph | None = None, first: str = "cpu") -> GraphDevices:
    """Return a runner of a graph that is cut behind some nodes, on the CPU and another device in turns."""
    graph = graph or layers()
    devices = [Device(first), Device(device)]
    names = [*last, graph.nodes[-1].name]
    stages = tuple(Stage(devices[number % 2], name) for number, name in enumerate(names))
    return GraphDevices(graph, options=CompileOptions(split=SplitPlan(stages)))


def same(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    """Check that outputs agree."""
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * float(np.abs(other).max()))


def test_stages_give_what_the_graph_gives(device: Device) -> None:
    """Three of them, the first and the last on the same device."""
    outputs = staged(device, "layer0", "layer2")(X)
    same(outputs, expected(X["x"]))
    assert outputs.keys() == ["y", "first"]


def test_the_answer_says_where_each_stage_ran(device: Device) -> None:
    """By its placement; `device` is that of the last stage."""
    outputs = staged(device, "layer1")(X)
    assert outputs.device == device
    assert outputs.placement is not None
    assert outputs.placement.devices == tuple(dict.fromkeys([Device.CPU, device]))
    assert not outputs.placement.strays


def test_a_plan_leaves_a_device_the_nodes_that_it_takes(device: Device) -> None:
    """The planner asks by the strict rule, by which stages are opened: the positions of this decoder are i64."""
    sizes = Sizes(vocabulary=256, width=256, layers=4, inner=512)
    graph = build_in_place(sizes, make_weights(sizes))
    refused = [each.kind for each in support_of(device, graph).unsupported]
    if device == Device.CPU or cost_model(device) is None or refused not in ([], ["Gather"]):
        pytest.skip("there is nothing to plan with, or it takes no cached attention in f32")
    whole = memory_need(graph, Device.CPU, dims={"batch": 1, "seq": 4})
    assert whole is not None
    plan = GraphDevices(graph).plan(budgets={"cpu": int(whole.total * 0.8), device: "8GB"})
    assert device in plan.devices
    prompt, tokens = np.array([[3, 1, 4, 1]]), []
    for options in (CompileOptions(), CompileOptions(split=plan)):
        runner = GraphDevices(graph, DevicePolicy.only(["cpu", device]), options)
        compiled = runner.compile_fastest() if options.split else runner.compile("cpu")
        loop = DecodeLoop(compiled, max_length=sizes.longest)
        tokens.append([int(token[0]) for token in loop.generate(prompt, max_new_tokens=5)])
    assert tokens[0] == tokens[1]


def test_other_sizes_take_the_same_sessions(device: Device) -> None:
    """The plan is for any number of rows."""
    runner = staged(device, "layer1")
    for rows in (1, 5, 3):
        x = SOURCE.normal(size=(rows, 8)).astype(np.float32)
        same(runner(x=x), expected(x))


def test_outputs_that_are_not_asked_for_are_left_out(device: Device) -> None:
    """In any order, and none at all."""
    compiled = staged(device, "layer1").compile_fastest()
    y, first = expected(X["x"])
    same(compiled.run_read_outputs(X, [1, 0, 1]), [first, y, first])
    assert compiled.run_read_outputs(X, []) == []


def test_a_named_device_runs_the_whole_graph(device: Device) -> None:
    """Only runs whose device is chosen are split."""
    runner = staged(device, "layer1")
    assert not hasattr(runner.run("cpu", X).placement, "stages")


def test_runs_that_overlap_give_each_its_own(device: Device) -> None:
    """In order, and equal to those of runs one by one."""
    compiled = staged(device, "layer0", "layer2").compile_fastest()
    inputs = [{"x": SOURCE.normal(size=(3, 8)).astype(np.float32)} for _ in range(12)]
    for outputs, given in zip(compiled.run_pipelined(inputs), inputs, strict=True):
        same(outputs, expected(given["x"]))


def test_handles_live_over_stages(device: Device) -> None:
    """An output that feeds an input of another stage is the value of the next run."""
    graph = Graph("counting")
    total, step = graph.input("total", [4]), graph.input("step", [4])
    doubled = graph.mul(step, 2.0, name="doubled")
    graph.set_outputs([graph.add(total, doubled, name="sum")], ["new_total"])
    compiled = staged(device, "doubled", graph=graph).compile_fastest()
    compiled.bind_gpu_handle("total", np.zeros(4, np.float32))
    compiled.set_gpu_handle_feed("total", 0)
    for _ in range(3):
        compiled.run({"step": np.ones(4, np.float32)})
    np.testing.assert_array_equal(compiled.read_gpu_handle("total"), [6, 6, 6, 6])


def test_a_changed_parameter_is_seen_by_a_run_that_was_prepared(device: Device) -> None:
    """By all stages, in the state that the runs before have left."""
    graph = Graph("scaled")
    total, step = graph.input("total", [4]), graph.input("step", [4])
    scaled = graph.mul(step, graph.param("scale", [4], data=np.ones(4, np.float32)), name="scaled")
    graph.set_outputs([graph.add(total, scaled, name="sum")], ["new_total"])
    compiled = staged(device, "scaled", graph=graph).compile_fastest()
    binder = compiled.engine().binder
    loop = binder.loop(["total", "step"], ["new_total"], ["new_total"])
    state: Any = np.zeros(4, np.float32)
    for scale in (1, 1, 1, 3, 3):
        if scale == 3:
            compiled.set_param("scale", np.full(4, 3, np.float32))
        (state,) = loop([state, np.ones(4, np.float32)])
    np.testing.assert_array_equal(state.numpy(), np.full(4, 9, np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_a_split_decoder_are_those_of_a_float64_reference(device: Device, form: str) -> None:
    """Its cache lies with the layers of each stage."""
    prompt = np.random.default_rng(7).integers(0, DECODER.vocabulary, (1, 6))
    graph = build(form=form)
    names = [node.name for node in graph.nodes if not node.op.is_leaf]
    runner = staged(device, names[len(names) // 2], graph=graph)
    options = runner.options.with_(placement=PlacementRule.ASSISTED)  # a device may leave lengths to the CPU
    try:
        loop = DecodeLoop(GraphDevices(graph, options=options).compile_fastest(), 32)
    except (LegalizeError, StageError) as err:
        if form != "scatter":  # ONNX Runtime 1.24 has no TensorScatter
            raise
        pytest.skip(str(err))
    tokens = np.stack(list(loop.generate(prompt, 12)), axis=1)
    np.testing.assert_array_equal(tokens, DECODER.tokens(prompt, 12))


@pytest.mark.parametrize(("form", "shared"), [("cached", True), ("masked", True), ("concat", False)])
def test_the_cache_of_each_stage_is_written_in_place_where_the_graph_allows_it(form: str, shared: bool) -> None:
    """As on one device; the steps are bound once."""
    graph = build(form=form)
    names = [node.name for node in graph.nodes if not node.op.is_leaf]
    loop = DecodeLoop(staged("cpu", names[len(names) // 2], graph=graph).compile_fastest(), 32)
    loop.prefill(np.zeros((1, 4), np.int64))
    assert loop.in_place is shared


def test_no_run_mixes_weights_of_two_versions(device: Device) -> None:
    """Parameters of two stages are set together while runs are in progress."""
    runner = staged(device, "layer1")
    others = [2 * WEIGHTS[0], *WEIGHTS[1:3], 3 * WEIGHTS[3]]
    allowed = [expected(X["x"])[0], expected(X["x"], others)[0]]
    done = threading.Event()
    seen: list[Any] = []

    def run() -> None:
        while not done.is_set():
            seen.append(runner(X)[0])

    worker = threading.Thread(target=run)
    worker.start()
    for number in range(12):
        with runner.update_params():
            runner.set_param("w0", (others if number % 2 else WEIGHTS)[0])
            runner.set_param("w3", (others if number % 2 else WEIGHTS)[3])
    done.set()
    worker.join()
    for result in seen:
        assert min(float(np.abs(result - each).max() / np.abs(each).max()) for each in allowed) < 1e-4


def test_a_value_that_a_later_stage_of_the_device_reads_stays_there(device: Device) -> None:
    """And one that comes back from another device is moved through the host; the results are right either way."""
    graph = Graph("skipping")
    x = graph.input("x", [4])
    early = graph.exp(x, name="early")
    middle = graph.neg(early, name="middle")
    graph.set_outputs([graph.add(early, middle, name="late")], ["y"])
    runner = staged("cpu", "early", "middle", graph=graph, first=device.label)
    np.testing.assert_allclose(runner(x=np.ones(4, np.float32))["y"], np.zeros(4), atol=1e-6)


def test_an_output_may_be_an_input_or_a_weight(device: Device) -> None:
    """It comes with the last stage."""
    graph = Graph("passing")
    x = graph.input("x", [4])
    w = graph.param("w", data=np.arange(4, dtype=np.float32), shape=[4])
    first = graph.exp(x, name="first")
    graph.set_outputs([graph.neg(first, name="second"), x, w], ["y", "same", "weight"])
    outputs = staged(device, "first", graph=graph)(x=np.zeros(4, np.float32))
    np.testing.assert_allclose(outputs["y"], -np.ones(4), atol=1e-6)
    np.testing.assert_array_equal(outputs["same"], np.zeros(4))
    np.testing.assert_array_equal(outputs["weight"], np.arange(4))


def test_another_graphs_plan_is_refused() -> None:
    """With the nearest name."""
    with pytest.raises(InputError, match="no node 'layer9'; did you mean 'layer"):
        staged("cpu", "layer9")(X)


def test_stages_in_the_wrong_order_are_refused() -> None:
    """Each ends behind the one before."""
    with pytest.raises(InputError, match="'layer0' comes before"):
        staged("cpu", "layer2", "layer0")(X)


@pytest.fixture(params=MODELS)
def user_model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[UserModel, Graph]:
    """Return a model as a framework exports it, and its graph."""
    model = MODELS[request.param]
    path = tmp_path / "model.onnx"
    path.write_bytes(model.model())
    return model, load(path).graph


def test_users_models_give_what_their_framework_gives(device: Device, user_model: tuple[UserModel, Graph]) -> None:
    """Cut at a random place; nodes that only the CPU takes stay with it, and sizes on the host."""
    model, graph = user_model
    refused = [
        row.index for row in support_of(device, graph, CompileOptions(placement=PlacementRule.STRICT)).unsupported
    ]
    first = max(refused, default=0) + 1
    names = [node.name for node in graph.nodes[first:] if not node.op.is_leaf][:-1]
    if len(names) < FEWEST_NODES:
        pytest.skip("only the CPU takes its nodes")
    runner = staged(device, random.Random(model.name).choice(names), graph=graph)
    for case, sizes in enumerate(model.cases[:2]):
        outputs = runner(model.feeds(sizes))
        errors = [want.error(got) for want, got in zip(model.expected(case), outputs, strict=True)]
        assert max(errors) < 2e-3


def test_a_plan_that_streams_holds_one_stage_at_a_time(device: Device) -> None:
    """Each run opens the stages in turn; none is open behind it, and decoders and other threads get theirs."""
    stages = tuple(Stage(device, name) for name in ("layer0", "layer2", "layer3"))
    runner = GraphDevices(layers(), options=CompileOptions(split=SplitPlan(stages, streams=True)))
    with ThreadPoolExecutor(2) as pool:
        for outputs in pool.map(lambda _: runner(X), range(4)):
            same(outputs, expected(X["x"]))
    slot: Any = runner.compile_fastest()._slot
    assert [stage.slot.is_open for stage in slot.stages] == [False] * 3


def test_stages_of_different_runs_overlap(fault: FaultProvider) -> None:
    """A run is in the first stage while another one is in the second."""
    plan = SplitPlan((Stage(Device("fault"), "layer1"), Stage(Device.CPU, "layer3")))
    compiled = GraphDevices(layers(), options=CompileOptions(split=plan)).compile_fastest()
    slot: Any = compiled._slot
    _, second = slot.stages
    begun = threading.Event()

    fault.script = lambda _: begun.set()
    with second.turns, ThreadPoolExecutor(1) as pool:  # the second stage is busy
        run = pool.submit(compiled.run, X)
        assert begun.wait(10)
        begun.clear()
        with ThreadPoolExecutor(1) as other:
            another = other.submit(compiled.run, X)
            assert begun.wait(10)  # in the first stage beside it
            second.turns.release()
            same(run.result(), expected(X["x"]))
            same(another.result(), expected(X["x"]))
            second.turns.acquire()
