"""Which nodes put the same question, and what the answers make of a graph."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.asked_providers import AskedProvider, CrashingProvider, SocialProvider

from rlx_ort import CompileOptions, Device, DType, EngineError, Graph, OptimizationLevel, PlacementRule
from rlx_ort.converters.to_onnx.exporter import drafted
from rlx_ort.ir.types import Shape, TensorType, UnknownType
from rlx_ort.providers import asking_child, registry
from rlx_ort.providers.asking import ask, asking_options
from rlx_ort.providers.base import EngineSession, Provider, SessionRequest
from rlx_ort.providers.cuda import CudaProvider
from rlx_ort.providers.kernel_limits import KernelLimit, limited_nodes
from rlx_ort.providers.null import NullProvider
from rlx_ort.selection.questions import NodeGroup, answers_for, groups_of, questions_of
from rlx_ort.selection.support import support_of

PLAIN = CompileOptions()
STRICT = CompileOptions(placement=PlacementRule.STRICT)
ASSISTED = CompileOptions(placement=PlacementRule.ASSISTED)


def groups(graph: Graph, options: CompileOptions = PLAIN, *, whole: bool = False) -> list[NodeGroup]:
    return groups_of(drafted(graph, options, None), options, whole=whole, shapes=False)


def unary(*names: str) -> Graph:
    """Return a chain of activations on a vector."""
    graph = Graph("chain")
    value = graph.input("x", [4])
    for name in names:
        value = graph.activation(name, value)
    graph.outputs = [value]
    return graph


def asked(provider: Provider, graph: Graph, budget_s: float = 20.0) -> dict[str, str]:
    """Return what a provider answers, by operator."""
    found = answers(provider, graph, budget_s)
    return {key.partition("::")[2].partition("-")[0]: answer for key, answer in found.items()}


def answers(provider: Provider, graph: Graph, budget_s: float = 20.0) -> dict[str, str]:
    """Return what a provider answers, by key."""
    registry.default_registry().register(provider)
    draft = drafted(graph, PLAIN, None)
    found = groups_of(draft, PLAIN, whole=provider.compiles, shapes=False)
    model = draft.finished().model
    questions = list(questions_of(found, draft.outline, model))
    return ask(provider, Device(provider.kinds[0]), questions, model, asking_options(PLAIN), budget_s)


def test_equal_nodes_of_other_sizes_put_one_question() -> None:
    """Sizes do not matter to a kernel."""
    g = Graph("sizes")
    a, b = g.input("a", [2, 3]), g.input("b", [7, 5])
    g.outputs = [g.relu(a), g.relu(b)]
    assert [len(group.nodes) for group in groups(g)] == [2]


def test_other_attributes_put_another_question() -> None:
    """A kernel may refuse an attribute."""
    g = Graph("attributes")
    x = g.input("x", [2, 3, 4])
    g.outputs = [g.softmax(x, axis=1), g.softmax(x, axis=2)]
    assert len(groups(g)) == 2


def test_another_rank_puts_another_question() -> None:
    """A kernel may take some ranks only."""
    g = Graph("ranks")
    g.outputs = [g.relu(g.input("a", [2, 3])), g.relu(g.input("b", [2, 3, 4]))]
    assert len(groups(g)) == 2


def test_a_constant_input_puts_another_question() -> None:
    """Compiling providers take some operators with constant inputs only."""
    g = Graph("constant")
    x, y = g.input("x", [4, 4]), g.input("y", [4, 4])
    g.outputs = [x @ y, x @ g.param("w", [4, 4], data=np.ones((4, 4), np.float32))]
    assert len(groups(g)) == 2


def test_folded_nodes_put_no_question() -> None:
    """What depends on constants alone is computed before nodes are assigned."""
    g = Graph("folded")
    w = g.param("w", [4, 4], data=np.ones((4, 4), np.float32))
    g.outputs = [g.input("x", [4, 4]) @ g.exp(w)]
    assert [group.pattern.op_type for group in groups(g)] == ["MatMul"]
    off = CompileOptions(optimization=OptimizationLevel.OFF)
    assert {group.pattern.op_type for group in groups(g, off)} == {"Exp", "MatMul"}


@pytest.mark.parametrize("mask_is_read", [False, True])
def test_a_dropout_whose_mask_nobody_reads_puts_no_question(mask_is_read: bool) -> None:
    """Outside of training it passes its input on, and ONNX Runtime drops it."""
    g = Graph("dropout")
    kinds = [TensorType(DType.F32, Shape((4,))), TensorType(DType.BOOL, Shape((4,)))]
    value, mask = g.onnx_node("Dropout", [g.relu(g.input("x", [4]))], types=kinds)
    g.outputs = [g.tanh(value), mask] if mask_is_read else [g.tanh(value)]
    found = [group.pattern.op_type for group in groups(g)]
    assert found == (["Relu", "Dropout", "Tanh"] if mask_is_read else ["Relu", "Tanh"])


def test_answers_are_the_provider_the_cpu_or_the_reason() -> None:
    """A refusal of one node does not hide the answers to the others of its session."""
    found = asked(AskedProvider(), unary("relu", "neg", "exp", "tanh"))
    assert found["Relu"] == found["Tanh"] == "device"
    assert found["Neg"] == "cpu"
    assert "no kernel for Exp" in found["Exp"]


def test_refusals_that_name_no_node_take_few_sessions() -> None:
    """CUDA refuses LRN of more than 16 channels so; 17 of 150 kinds have to be refused one by one."""

    class Nameless(AskedProvider):
        def open(self, request: SessionRequest) -> EngineSession:
            nodes = request.model.model.graph.node
            self.opened.append([node.op_type for node in nodes])
            if any(a.name == "size" and a.i > 16 for node in nodes for a in node.attribute):
                raise EngineError("the descriptor cannot be set")
            return NullProvider.open(self, request)

    g = Graph("kinds")
    value = g.input("x", [2, 3, 4, 5])
    operators = {"Elu": "alpha", "LRN": "size", "LeakyRelu": "alpha", "HardSigmoid": "beta", "Selu": "gamma"}
    for at in range(25):
        for operator, name in (operators | {"ThresholdedRelu": "alpha"}).items():
            given = {name: 2 * at + 1 if operator == "LRN" else 0.01 * (at + 1)}
            (value,) = g.onnx_node(operator, [value], types=[value.type], attributes=given)
    g.outputs = [value]
    provider = Nameless()
    found = answers(provider, g)
    assert len(found) == 150
    assert sum("descriptor" in answer for answer in found.values()) == 17
    assert sum(answer == "device" for answer in found.values()) == 133
    assert len(provider.opened) <= 45  # 119 when refused sessions are cut into halves


def test_a_node_that_ends_the_process_ends_only_the_child() -> None:
    """The crash is the answer, and the questions after it are asked in another child."""
    found = asked(CrashingProvider(), unary("relu", "abs", "tanh"))
    assert found["Relu"] == found["Tanh"] == "device"
    assert "ended the process" in found["Abs"]


def test_a_package_in_the_current_folder_is_not_executed_by_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child imports from this process's path, and not from where somebody happens to work."""
    for name in ("rlx_ort", "json", "onnxruntime"):
        (tmp_path / name).mkdir()
        marked = "import pathlib\npathlib.Path(__file__).with_name('executed').touch()\n"
        (tmp_path / name / "__init__.py").write_text(marked, encoding="utf-8")
    asking_child._end_child()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert asked(CrashingProvider(), unary("relu"))["Relu"] == "device"
    asking_child._end_child()
    assert not list(tmp_path.rglob("executed"))


def test_a_question_that_takes_too_long_has_no_answer() -> None:
    """The child is stopped when the budget is spent."""
    start = time.monotonic()
    found = asked(CrashingProvider(), unary("relu", "sqrt"), budget_s=3.0)
    assert "Sqrt" not in found
    assert time.monotonic() - start < 50


def test_a_crash_is_not_asked_for_again(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is on disk, so a later graph with the same node is refused without a question."""
    provider = CrashingProvider()
    machine.providers.register(provider)
    device, graph = Device("crashing"), unary("abs")
    first = support_of(device, graph, STRICT)
    assert "ended the process" in first.unsupported[0].reason
    draft = drafted(unary("abs"), PLAIN, None)
    found = groups_of(draft, PLAIN, whole=True, shapes=False)
    monkeypatch.setattr(asking_child, "_child", lambda: pytest.fail("another child was asked"))
    answers = answers_for(provider, device, found, draft, PLAIN)
    assert "ended the process" in answers[found[0].key]


def test_what_is_left_to_the_cpu_is_refused_strictly(machine: Any) -> None:
    """The strict rule names the node; the assisted rule counts it as the CPU's."""
    machine.add("cpu", kernels=machine.kernels("Relu", "Neg"))
    machine.providers.register(AskedProvider())
    device, graph = Device("asked"), unary("relu", "neg")
    strict = support_of(device, graph, STRICT)
    assert [node.kind for node in strict.unsupported] == ["Activation"]
    assert "to the CPU" in strict.unsupported[0].reason
    assert len(support_of(device, graph, ASSISTED).cpu_nodes) == 1


def test_a_known_answer_opens_no_session(machine: Any) -> None:
    """A second graph with the same kinds of nodes is judged from the store."""
    provider = AskedProvider()
    machine.providers.register(provider)
    support_of(Device("asked"), unary("sigmoid", "tanh"), STRICT)
    before = len(provider.opened)
    assert before
    assert support_of(Device("asked"), unary("tanh", "sigmoid"), STRICT).supported
    assert len(provider.opened) == before


def test_a_form_whose_kernel_fails_in_the_run_is_refused(machine: Any) -> None:
    """The provider says which attributes of an operator its kernel does not compute; other nodes are asked about."""

    class Limited(AskedProvider):
        limits = (KernelLimit("Softmax", lambda node, given: given.get("axis") == 0, "axis 0 is not computed"),)

    machine.add("cpu", kernels=machine.kernels("Softmax"))
    machine.providers.register(Limited())
    for axis, supported in ((0, False), (1, True)):
        g = Graph("limited")
        g.outputs = [g.softmax(g.input("x", [2, 3]), axis=axis)]
        found = support_of(Device("asked"), g, STRICT)
        assert found.supported is supported
        assert supported or "axis 0 is not computed" in found.unsupported[0].reason


@pytest.mark.parametrize(("source", "refused"), [(DType.F32, False), (DType.F16, True)])
def test_cuda_casts_f32_to_four_bit_floats_and_f16_not(source: DType, refused: bool) -> None:
    """On an H200 (ONNX Runtime 1.31.1) the f32 cases of the ONNX suite ran, and the f16 ones failed in the run."""
    g = Graph("cast")
    x, like = g.input("x", [4], source), g.input("like", [4], DType.F4E2M1)
    kind = TensorType(DType.F4E2M1, Shape((4,)))
    g.outputs = [
        *g.onnx_node("Cast", [x], types=[kind], attributes={"to": 23}),
        *g.onnx_node("CastLike", [x, like], types=[kind]),
    ]
    assert {bool(limited_nodes(group.nodes, CudaProvider.limits, {})) for group in groups(g)} == {refused}


def keyed(graph: Graph) -> list[str]:
    """Return the operators that a compiling provider is asked about, a name for each question."""
    return sorted(group.pattern.op_type for group in groups(graph, whole=True))


def test_compilers_are_asked_about_broadcast_and_empty_tensors_on_their_own() -> None:
    """They refuse a dim of 1 or 0 where they take others."""
    g = Graph("dims")
    inputs = [g.input(name, dims) for name, dims in {"a": [2, 3], "b": [4, 5], "c": [2, 1], "d": [0, 3]}.items()]
    g.outputs = [g.relu(value) for value in inputs]
    assert keyed(g) == ["Relu"] * 3
    assert len(groups(g)) == 1


def test_a_known_shape_makes_what_reads_it_constant() -> None:
    """A compiler sees the shape that ONNX Runtime computed, and the types that follow from it."""
    g = Graph("shapes")
    x, like = g.input("x", [6, 2]), g.input("like", [3, 4])
    (shape,) = g.onnx_node("Shape", [like], types=[TensorType(DType.I64, Shape((2,)))])
    (reshaped,) = g.onnx_node("Reshape", [x, shape], types=[UnknownType()])
    (result,) = g.onnx_node("Relu", [reshaped], types=[UnknownType()])
    g.outputs = [result]
    found = {group.pattern.op_type: group for group in groups(g, whole=True)}
    assert found.keys() == {"Reshape", "Relu"}
    assert found["Reshape"].constants[1].numpy().tolist() == [3, 4]
    assert [str(kind) for kind in found["Relu"].pattern.inputs] == ["f32(3, 4)"]


def test_small_weights_are_constants_with_values() -> None:
    """Sessions have them inside the model, where a compiler reads them."""
    g = Graph("weights")
    x, axes = g.input("x", [2, 3]), g.param("axes", [1], "i64", data=np.array([1], np.int64))
    g.outputs = g.onnx_node("ReduceSum", [x, axes], types=[TensorType(DType.F32, Shape((2, 1)))])
    (group,) = groups_of(drafted(g, PLAIN, None), PLAIN, whole=True, shapes=False, weights=g.weights)
    assert group.constants[1].numpy().tolist() == [1]


def test_a_node_that_is_taken_between_others_only_is_taken_there() -> None:
    """The first and only node of a graph has no neighbours."""
    assert asked(SocialProvider(), unary("relu", "tanh", "relu"))["Tanh"] == "device"
    assert asked(SocialProvider(), unary("tanh"))["Tanh"] == "cpu"


def test_the_place_of_a_node_does_not_matter_without_optimisation() -> None:
    """Nothing is dropped then."""
    off = CompileOptions(optimization=OptimizationLevel.OFF)
    chain = unary("relu", "relu", "relu")
    assert len(groups(chain, off, whole=True)) == 1
    assert len(groups(chain, whole=True)) == 3
