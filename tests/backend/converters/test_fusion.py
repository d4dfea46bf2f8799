"""Fused attention gives what the basic operators give: exports of frameworks, and made-up attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from model_corpus import UserModel, corpus
from onnx import TensorProto, helper, numpy_helper

import rlx_ort
from rlx_ort import CompileOptions, Graph
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.providers.claims import kernel_set
from rlx_ort.providers.cpu import CpuProvider

FUSED = CompileOptions(fusion=True)
NODES = {
    **dict.fromkeys(("bert", "distilbert", "minilm", "roberta", "mpnet", "gpt2", "vit", "wav2vec2"), 2),
    **dict.fromkeys(("swin", "segformer", "clip"), 4),
    **dict.fromkeys(("t5", "whisper"), 6),
    "detr": 6,
    "llama": 2,
}
"""Architecture -> how often it attends."""
OPEN = {"detr-torchscript-17": 2, "llama-torchscript-17": 0}
"""Exports that leave open how many heads their attention has, in some places."""
MODELS = pytest.mark.parametrize(
    "model", [each for each in corpus() if each.architecture in NODES], ids=lambda model: model.name
)


def count(graph: Graph, options: CompileOptions = FUSED) -> int:
    """Return how many nodes of the model for the CPU are fused attention."""
    model = export_model(graph, options, kernel_set(CpuProvider(), graph, options))
    return [node.op_type for node in model.nodes].count("MultiHeadAttention")


@MODELS
def test_exports_of_frameworks_keep_their_results(model: UserModel) -> None:
    """In each size, masked keys among them; and nothing changes without the option."""
    with rlx_ort.load(model.model(), options=FUSED) as runner:
        assert count(runner.graph) == OPEN.get(model.name, NODES[model.architecture])
        assert count(runner.graph, CompileOptions()) == 0
        for case, sizes in enumerate(model.cases[:2]):
            found = runner.run("cpu", model.feeds(sizes))
            for output, expected in zip(found, model.expected(case), strict=True):
                assert expected.error(output) < 1e-5


class Case(NamedTuple):
    """A made-up attention, and how it is written."""

    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    scaling: str  # "both", "scores", "divided", "none"
    mask: str  # "none", "rows", "scores", "lowest", "zero"
    guard: bool
    key_form: str  # "direct", "swapped", "joined"
    parted: bool  # q, k and v come as (B, H, S, D), with no sign of how

    @classmethod
    def of(cls, seed: int) -> Case:
        """Return one of many."""
        rng = np.random.default_rng(seed)
        batch, heads, queries, keys = (int(rng.integers(1, most)) for most in (4, 5, 40, 40))
        size = int(rng.choice([4, 8, 16]))
        value_size = size if rng.integers(2) else int(rng.choice([4, 8]))
        scaling, mask, key_form = (
            str(rng.choice(each))
            for each in (
                ["both", "scores", "divided", "none"],
                ["none", "rows", "scores", "lowest", "zero"],
                ["direct", "swapped", "joined"],
            )
        )
        return cls(
            *(batch, heads, queries, keys, size, value_size, scaling, mask),
            guard=bool(rng.integers(2)),
            key_form=key_form,
            parted=bool(rng.integers(4) == 0),
        )


class Written:
    """An ONNX graph while it is being written."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return its result."""
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name, **attributes))
        return name

    def data(self, values: Any, dtype: Any = np.float32) -> str:
        """Add a tensor and return its name."""
        name = f"data_{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name


def written(case: Case) -> onnx.ModelProto:
    """Return a model of an attention."""
    g = Written()
    heads = {"q": case.size, "k": case.size, "v": case.value_size}

    def parted(name: str, perm: list[int]) -> str:
        if case.parted:
            order = [[0, 2, 1, 3][axis] for axis in perm]
            return name if order == [0, 1, 2, 3] else g.op("Transpose", name, perm=order)
        shape = g.data([0, 0, case.heads, heads[name]], np.int64)
        return g.op("Transpose", g.op("Reshape", name, shape), perm=perm)

    q, v = parted("q", [0, 2, 1, 3]), parted("v", [0, 2, 1, 3])
    if case.key_form == "direct":
        k = parted("k", [0, 2, 3, 1])
    elif case.key_form == "swapped":
        k = g.op("Transpose", parted("k", [0, 2, 1, 3]), perm=[0, 1, 3, 2])
    else:
        whole = parted("k", [0, 2, 1, 3])
        shape = g.op("Shape", whole)
        lead, length, size = (
            g.op("Slice", shape, g.data([at], np.int64), g.data([end], np.int64))
            for at, end in ((0, 2), (2, 3), (3, 4))
        )
        flat = g.op("Reshape", whole, g.op("Concat", g.data([-1], np.int64), length, size, axis=0))
        turned = g.op("Transpose", flat, perm=[0, 2, 1])
        k = g.op("Reshape", turned, g.op("Concat", lead, size, length, axis=0))
    if case.scaling == "both":
        q, k = g.op("Mul", q, g.data(0.6)), g.op("Mul", k, g.data([0.6]))
    scores = g.op("MatMul", q, k)
    if case.scaling == "scores":
        scores = g.op("Mul", scores, g.data(0.3))
    if case.scaling == "divided":
        scores = g.op("Div", scores, g.data(2.5))
    hidden = {"rows": -np.inf, "lowest": -3.4028235e38}.get(case.mask)
    if hidden is not None:
        scores = g.op("Add", scores, g.op("Where", "mask", g.data(0), g.data(hidden)))
    if case.mask == "scores":
        scores = g.op("Add", scores, "bias")
    if case.mask == "zero":
        everywhere = g.data(np.ones((1, 1, case.queries, 1)), np.bool_)
        scores = g.op("Add", scores, g.op("Where", everywhere, g.data(0), g.data(-np.inf)))
    weights = g.op("Softmax", scores, axis=-1)
    if case.guard:
        weights = g.op("Where", g.op("IsNaN", weights), g.data(0), weights)
    mixed = g.op("Transpose", g.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    shape = g.data([0, 0, case.heads * case.value_size], np.int64)
    g.nodes.append(helper.make_node("Reshape", [mixed, shape], ["y"], "last"))

    def declared(name: str, length: str) -> onnx.ValueInfoProto:
        width = case.heads * heads[name]
        dims = ["batch", case.heads, length, heads[name]] if case.parted else ["batch", length, width]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)

    inputs = [declared("q", "queries"), declared("k", "keys"), declared("v", "keys")]
    if case.mask in ("rows", "lowest"):
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", 1, 1, "keys"]))
    if case.mask == "scores":
        inputs.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [1, case.heads, "queries", "keys"]))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "queries", case.heads * case.value_size])
    graph = helper.make_graph(g.nodes, "attention", inputs, [result], g.tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def attended(case: Case, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return the result in f64."""
    q, k, v = (feeds[name].astype(np.float64) for name in "qkv")
    if not case.parted:
        q, k, v = (each.reshape(*each.shape[:2], case.heads, -1).transpose(0, 2, 1, 3) for each in (q, k, v))
    scale = {"both": 0.36, "scores": 0.3, "divided": 0.4, "none": 1.0}[case.scaling]
    scores = q @ k.transpose(0, 1, 3, 2) * scale
    if "bias" in feeds:
        scores += feeds["bias"]
    if "mask" in feeds:
        scores = np.where(feeds["mask"], scores, -np.inf if case.mask == "rows" else -1e300)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if case.guard:
        weights = np.nan_to_num(weights)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(case.batch, case.queries, -1)


@pytest.mark.parametrize("seed", range(40))
def test_made_up_attention_is_what_float64_gives(seed: int) -> None:
    """Of random sizes, scales, masks and forms; a row that sees no key stays zero, uniform or NaN."""
    case, rng = Case.of(seed), np.random.default_rng(seed + 1000)
    lengths = {"q": case.queries, "k": case.keys, "v": case.keys}
    feeds: dict[str, np.ndarray] = {}
    for name, length in lengths.items():
        size = case.value_size if name == "v" else case.size
        shape = [case.heads, length, size] if case.parted else [length, case.heads * size]
        feeds[name] = rng.normal(size=(case.batch, *shape)).astype(np.float32)
    if case.mask in ("rows", "lowest"):
        feeds["mask"] = rng.random((case.batch, 1, 1, case.keys)) < 0.7
        feeds["mask"][0] = False
    if case.mask == "scores":
        feeds["bias"] = rng.normal(size=(1, case.heads, case.queries, case.keys)).astype(np.float32)
    graph = from_onnx(written(case))
    assert count(graph) == 1, case
    with rlx_ort.load(written(case).SerializeToString(), options=FUSED) as runner:
        (found,) = runner.run("cpu", feeds)
    np.testing.assert_allclose(found, attended(case, feeds), rtol=2e-5, atol=2e-5, err_msg=str(case))


MASKS = {
    "none": None,
    "all": ("queries", "keys"),
    "pairs": ("queries", "keys"),
    "rows": ("batch", 1, 1, "keys"),
    "bias": ("heads", "queries", "keys"),
    "hidden": ("batch", 1, "queries", "keys"),
    "lowest": ("batch", "heads", 1, "keys"),
    "queries": ("queries", 1),
}
"""Masks of made-up `Attention` nodes -> their shapes. `all` hides nothing, and `queries` is as long as the keys by
broadcasting; both stay as they are from opset 24 on, where a mask that is shorter than the keys hides the rest."""


@pytest.mark.parametrize("seed", range(60))
def test_attention_of_onnx_is_what_float64_gives(seed: int) -> None:
    """In its two layouts, with each mask, scale and size; a query that sees no key gives zeros, as ONNX has it."""
    rng = np.random.default_rng(seed)
    mask = list(MASKS)[seed % len(MASKS)]
    opset = 23 if mask in ("queries", "all") else int(rng.choice([23, 24]))
    batch, heads, queries, keys = (int(rng.integers(1, most)) for most in (4, 5, 40, 40))
    size, value_size = (int(rng.choice([4, 8, 16])) for _ in range(2))
    flat, causal = bool(rng.integers(2)), mask in ("none", "all") and bool(rng.integers(2))
    keys = queries if causal else keys
    g = Written()
    attributes: dict[str, Any] = {"is_causal": 1} if causal else {}
    scale = float(rng.uniform(0.1, 2)) if rng.integers(2) else None
    attributes |= {"q_num_heads": heads, "kv_num_heads": heads} if flat else {}
    attributes |= {} if scale is None else {"scale": scale}
    names = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
    lengths = {"q": "queries", "k": "queries" if causal else "keys", "v": "queries" if causal else "keys"}
    feeds: dict[str, np.ndarray] = {}
    inputs = []
    for name, length in lengths.items():
        width = value_size if name == "v" else size
        dims = ["batch", length, heads * width] if flat else ["batch", heads, length, width]
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
        feeds[name] = rng.normal(size=[names.get(str(each), each) for each in dims]).astype(np.float32)
    added: np.ndarray | float = 0.0
    if mask == "all":
        every = g.data(np.ones((queries, keys)), np.bool_)
    elif (dims := MASKS[mask]) is not None:
        shape = [names.get(str(each), each) for each in dims]
        shown = rng.random(shape) < 0.7
        shown[0] = shown[0] & (mask == "bias")
        hidden = {"hidden": -np.inf, "lowest": -3.4028235e38}.get(mask)
        feeds["mask"] = shown if hidden is None else np.where(shown, 0, hidden).astype(np.float32)
        if mask == "bias":
            feeds["mask"] = rng.normal(size=shape).astype(np.float32)
        kind = helper.np_dtype_to_tensor_dtype(feeds["mask"].dtype)
        dims = tuple(heads if each == "heads" else each for each in dims)
        inputs.append(helper.make_tensor_value_info("mask", kind, dims))
        added = np.where(shown, 0, -np.inf) if kind == TensorProto.BOOL else feeds["mask"].astype(np.float64)
    mask_input = [every] if mask == "all" else ["mask"] * ("mask" in feeds)
    g.nodes.append(helper.make_node("Attention", ["q", "k", "v", *mask_input], ["y"], "attention", **attributes))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(g.nodes, "attention", inputs, [result], g.tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)

    q, k, v = (feeds[name].astype(np.float64) for name in "qkv")
    if flat:
        q, k, v = (each.reshape(*each.shape[:2], heads, -1).transpose(0, 2, 1, 3) for each in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * (size**-0.5 if scale is None else scale) + added
    if causal:
        scores = np.where(np.tri(queries, dtype=bool), scores, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.nan_to_num(weights / weights.sum(-1, keepdims=True)) @ v
    if flat:
        expected = expected.transpose(0, 2, 1, 3).reshape(batch, queries, -1)
    assert count(from_onnx(model)) == 1
    with rlx_ort.load(model.SerializeToString(), options=FUSED) as runner:
        (found,) = runner.run("cpu", feeds)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
