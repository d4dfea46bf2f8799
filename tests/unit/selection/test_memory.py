"""The memory of a graph on a device, counted before a session is opened, and devices that cannot hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlx_ort import Device, DeviceCandidate, DType, Graph, rank
from rlx_ort.errors import NoViableDeviceError
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.base import SessionMemory
from rlx_ort.selection.arena import Arena, Pattern
from rlx_ort.selection.candidates import fastest_device_for
from rlx_ort.selection.memory import MARGIN, MemoryNeed, memory_need, memory_shortage

MIB = 1 << 20
ROW = 4 * 256 * 4  # bytes of a value of `product`


@pytest.mark.parametrize(
    ("sizes", "regions"),
    [
        ([8, 3 * MIB, 3 * MIB, 3 * MIB, 3 * MIB], [1, 4, 4, 8]),  # ONNX Runtime 1.31.1 logged these for DistilBERT
        ([6422528, 6422528, 25690112], [8, 8, 32]),  # and these for MobileNetV3 at batch 8
    ],
)
def test_the_arena_grows_as_onnx_runtime_does(sizes: Sequence[int], regions: Sequence[int]) -> None:
    """A region is taken only where no chunk is large enough, and a chunk is split where half of it would be wasted."""
    arena = Arena()
    for size in sizes:
        arena.take(size)
    assert arena.reserved == sum(regions) * MIB
    assert arena.touched <= arena.reserved


def test_memory_that_was_given_back_is_joined_and_taken_again() -> None:
    """Two neighbours become one chunk, and pages count once."""
    arena = Arena()
    first, second = arena.take(MIB // 4), arena.take(MIB // 4)
    arena.give_back(first)
    arena.give_back(second)
    arena.take(MIB // 2)
    assert (arena.reserved, arena.touched) == (MIB, MIB // 2)


def test_an_arena_under_a_limit_takes_no_more_than_it_is_asked_for() -> None:
    """As with kSameAsRequested."""
    arena = Arena(exact=True)
    arena.take(5 * MIB)
    assert arena.reserved == 5 * MIB


def test_a_pattern_takes_the_tightest_gap() -> None:
    """Later blocks go between earlier ones where they fit."""
    pattern = Pattern()
    wide, _, narrow, _ = (pattern.take(size) for size in (40, 10, 20, 10))
    pattern.give_back(wide)
    pattern.give_back(narrow)
    assert pattern.take(15) == (50, 15)
    assert pattern.take(30) == (0, 30)
    assert pattern.peak == 80


def product(layers: int = 3) -> Graph:
    """Return `tanh(x @ w)` again and again, with weights of 256 KiB each."""
    graph = Graph("product")
    value = graph.input("x", ("batch", 256))
    for layer in range(layers):
        weight = graph.param(f"w{layer}", (256, 256), data=np.ones((256, 256), np.float32))
        value = graph.tanh(value @ weight)
    graph.outputs = [value]
    return graph


def add(machine: Any, kind: str, limit: int | None = None, **given: Any) -> None:
    """Add a device that takes the graphs of these tests and has a limit."""
    taken = machine.kernels("MatMul", "Tanh", "Erf", "Concat", "Add", "Mul", "Softmax")
    profile = machine.profile(roundtrip_ns=1.0 if kind == "cuda" else 2.0)
    machine.add(kind, kernels=taken, profile=profile, memory_limit=lambda *_: limit, **given)


def need_of(graph: Graph, device: str = "cuda", **dims: int) -> MemoryNeed:
    """Return the counted memory."""
    need = memory_need(graph, device, None, dims)
    assert need is not None
    return need


def test_weights_count_once_and_activations_by_what_is_alive(machine: Any) -> None:
    """A product needs its input beside its result; an operator in place needs nothing more."""
    add(machine, "cuda", session_memory=SessionMemory(in_place=frozenset({"Tanh"})))
    need = need_of(product(), batch=4)
    assert need.weights == 3 * 256 * 256 * 4
    assert need.inputs == ROW
    assert [node.weights for node in need.nodes] == [256 * 256 * 4, 0] * 3
    assert need.activations == 2 * ROW
    assert [node.crossing for node in need.nodes] == [ROW] * 6
    assert need.total >= need.weights + need.inputs + need.activations


def test_weights_take_whole_pages_of_a_device(machine: Any) -> None:
    """Large ones two and one, and small ones share one: 256, 192, 48 and 16 KiB in pages of 200."""
    graph = Graph("pages")
    value = graph.input("x", ("batch", 256))
    for rows, columns in ((256, 256), (256, 192), (192, 64), (64, 64)):
        value = value @ graph.param(f"w{rows}_{columns}", (rows, columns))
    graph.outputs = [value]
    add(machine, "cuda", session_memory=SessionMemory(page_bytes=200 << 10))
    assert need_of(graph, batch=4).weights == 4 * (200 << 10)


def wide(batch: int | str = "batch") -> Graph:
    """Return a graph whose first product is narrow, the second wide, and the third one narrow again."""
    graph = Graph("wide")
    narrow = graph.matmul(graph.input("x", (batch, 256)), graph.param("a", (256, 256)), name="narrow")
    wide = graph.tanh(narrow @ graph.param("b", (256, 512)))
    graph.outputs = [graph.tanh(wide @ graph.param("c", (512, 256)))]
    return graph


def test_a_buffer_that_is_taken_again_is_held_until_then(machine: Any) -> None:
    """As ONNX Runtime plans it: the first product's memory waits for the third one, which has the same shape."""
    add(machine, "cuda", session_memory=SessionMemory(arena=False))
    need = need_of(wide(batch=4))
    assert [node.live // ROW for node in need.nodes] == [1, 3, 5, 3, 2]
    assert need.activations == need.arena == 5 * ROW


def test_memory_of_an_open_size_is_not_taken_again(machine: Any) -> None:
    """ONNX Runtime reuses a buffer for a value of the same shape; the model leaves out shapes with open dims."""
    add(machine, "cuda", session_memory=SessionMemory(arena=False))
    assert [node.live // ROW for node in need_of(wide(), batch=4).nodes] == [1, 3, 4, 3, 2]


def test_scores_of_an_open_size_are_written_over(machine: Any) -> None:
    """The model declares the shapes of Softmax's input and output, so the kernel may overwrite its input."""
    graph = Graph("scores")
    scores = graph.input("x", ("batch", 256)) @ graph.param("w", (256, 256))
    graph.outputs = [graph.tanh(graph.softmax(scores))]
    add(machine, "cuda", session_memory=SessionMemory(in_place=frozenset({"Softmax"})))
    assert [node.live // ROW for node in need_of(graph, batch=4).nodes] == [1, 1, 2]


def test_a_gelu_in_basic_operators_takes_the_memory_of_one_node(machine: Any) -> None:
    """ONNX Runtime makes one node of it: x / 2 * (erf(x * 0.707) + 1), as PyTorch's exporters write it."""
    graph = Graph("gelu")
    value = graph.input("x", ("batch", 256)) @ graph.param("w", (256, 256))
    erf = graph.activation("erf", value * 0.70710678)
    graph.outputs = [graph.tanh(value * (erf + 1.0) * 0.5)]
    add(machine, "cuda", session_memory=SessionMemory(arena=False))
    assert need_of(graph, batch=4).activations == 2 * ROW


def test_sizes_that_only_the_caller_knows_change_no_plan_of_buffers(machine: Any) -> None:
    """The session of a stage shares memory by the shapes of its graph, whatever sizes its inputs will have."""
    add(machine, "cuda", session_memory=SessionMemory(arena=False))
    graph = wide()
    fed = {"narrow": TensorType(DType.F32, Shape((4, 256)))}
    assert memory_need(graph, "cuda", None, {"batch": 4}, fed) == need_of(graph, batch=4)


def test_memory_follows_the_sizes_of_the_inputs(machine: Any) -> None:
    """Twice the batch has twice the activations, and a dim without a size is named."""
    add(machine, "cuda")
    assert need_of(product(), batch=64).activations == 2 * need_of(product(), batch=32).activations
    assert need_of(product()).assumed == ("batch",)
    assert need_of(product()).activations == need_of(product(), batch=32).activations


def decoder() -> Graph:
    """Return a graph that appends to the keys of a cache."""
    graph = Graph("decoder")
    tokens = graph.input("input_ids", ("batch", 1), DType.I64)
    past = graph.input("past_key_values.0.key", ("batch", 2, "past", 8))
    new = graph.reshape(graph.cast(tokens, DType.F32), ("batch", 1, 1, 1))
    present = graph.concat([past, graph.expand(new, ("batch", 2, 1, 8))], axis=2)
    graph.set_outputs([graph.reduce(present, "sum", (1, 2)), present], ["logits", "present.0.key"])
    return graph


def test_a_device_that_cannot_hold_the_graph_is_passed_over(machine: Any) -> None:
    """The reason has the figures, and the next device is taken."""
    graph = product()
    add(machine, "cpu")
    add(machine, "cuda", 3 * 256 * 256 * 4 - 1)
    assert fastest_device_for(graph) == Device.CPU
    rows: dict[str, DeviceCandidate] = {row.label: row for row in rank(graph)}
    assert "has 786,431 bytes for a session and cannot hold graph 'product'" in str(rows["cuda"].blocker)
    assert "weights 786,432" in str(rows["cuda"].blocker)
    assert rows["cpu"].blocker is None
    assert (rows["cuda"].memory_bytes or 0) > 786_432


def test_the_error_lists_a_device_that_is_too_small(machine: Any) -> None:
    """Where no other one is left."""
    add(machine, "cuda", 1000)
    with pytest.raises(NoViableDeviceError, match=r"cuda.*cannot hold graph 'product'"):
        fastest_device_for(product())


def test_nothing_is_refused_where_the_memory_is_unknown_or_nearly_enough(machine: Any) -> None:
    """A wrong refusal is worse than none: what is counted may be above the real memory by the margin."""
    graph, options = product(), CompileOptions()
    add(machine, "cuda", None)
    assert memory_shortage(graph, Device.CUDA, options, {"batch": 4096}) is None
    need = need_of(graph, batch=4096).least
    for kind, limit, refused in (("gpu", int(need / MARGIN) + 1, False), ("metal", int(need / MARGIN) - 1, True)):
        add(machine, kind, limit)
        assert (memory_shortage(graph, Device(kind), options, {"batch": 4096}) is not None) is refused


def test_a_dim_without_a_size_counts_as_one_before_a_refusal(machine: Any) -> None:
    """A size that was assumed refuses no device."""
    graph = product()
    add(machine, "cuda", need_of_one(machine, graph))
    assert memory_shortage(graph, Device.CUDA, CompileOptions()) is None
    assert memory_shortage(graph, Device.CUDA, CompileOptions(), {"batch": 1 << 16}) is not None


def need_of_one(machine: Any, graph: Graph) -> int:
    """Return the memory of a run of one row."""
    add(machine, "metal")
    return need_of(graph, "metal", batch=1).least


def test_the_keys_and_values_of_a_decoder_are_its_cache(machine: Any) -> None:
    """They grow with the tokens before."""
    add(machine, "cuda")
    need = need_of(decoder(), batch=3, past=100)
    assert need.cache == 3 * 2 * 100 * 8 * 4
    assert need_of(decoder(), batch=3, past=200).cache == 2 * need.cache
    assert need_of(product(), batch=3).cache == 0
