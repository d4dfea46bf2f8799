"""Attention and rotary embedding against the reference interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from interpreter import evaluate
from interpreter.layers import rotate
from op_tests.harness import Array, check, rand, run

from rlx_ort import CompileOptions, Device, Graph, KernelDispatch, KernelDispatchPolicy, RunError, Session
from rlx_ort.converters.to_onnx.exporter import export_model

H, D = 2, 4


def qkv(queries: int, keys: int, batch: int = 2) -> tuple[Array, Array, Array]:
    return rand(batch, queries, H * D), rand(batch, keys, H * D, seed=1), rand(batch, keys, H * D, seed=2)


OPEN = [["b", "q", H * D], ["b", "k", H * D], ["b", "k", H * D]]
KINDS = ["none", "causal", "sliding:0", "sliding:2"]


@pytest.mark.parametrize("declared", [[], OPEN], ids=["static", "open"])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 5), (5, 2), (1, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_mask_kinds(kind: str, queries: int, keys: int, declared: list[Any], device: Device) -> None:
    """Causal and sliding masks are bottom-right aligned for any two lengths, also when these are known at run time."""
    arrays = qkv(queries, keys)
    check(device, lambda g, q, k, v: g.attention_kind(q, k, v, H, D, kind), *arrays, shapes=declared)


def test_window_keeps_w_plus_one_keys() -> None:
    """`sliding:2` sees the query's own place and two before it."""
    zeros = np.zeros((1, 5, H * D), np.float32)
    values = np.broadcast_to(np.arange(5, dtype=np.float32)[None, :, None], (1, 5, H * D)).copy()
    (result,) = run(Device.CPU, lambda g, q, k, v: g.attention_kind(q, k, v, H, D, "sliding:2"), zeros, zeros, values)
    np.testing.assert_allclose(result[0, :, 0], [0, 0.5, 1, 2, 3], rtol=1e-6)


def test_query_that_sees_nothing_averages_all_values(device: Device) -> None:
    """With more queries than keys and a short window, late queries are fully masked: a uniform average."""
    q, k, v = qkv(5, 2)
    (result,) = run(device, lambda g, q, k, v: g.attention_kind(q, k, v, H, D, "sliding:1"), q, k, v)
    np.testing.assert_allclose(result[:, 3:], np.broadcast_to(v.mean(1, keepdims=True), (2, 2, H * D)), atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.int32])
def test_custom_mask_hides_keys(dtype: type, device: Device) -> None:
    """A (B, K) mask hides keys below 0.5 from every query; a row of zeros averages all of v."""
    mask = np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]], dtype)
    shapes = [*OPEN, ["b", "k"]]
    check(device, lambda g, q, k, v, m: g.attention(q, k, v, m, H, D), *qkv(3, 5), mask, shapes=shapes)


def test_custom_mask_has_its_border_at_one_half() -> None:
    """0.5 is kept, what is below is masked."""
    mask = np.array([[0.5, 0.49999, 1.0]], np.float32)
    check(Device.CPU, lambda g, q, k, v, m: g.attention(q, k, v, m, H, D), *qkv(2, 3, batch=1), mask)


@pytest.mark.parametrize("shape", [(2, H, 3, 5), (1, 1, 3, 5), (3, 5)])
def test_bias_is_added_to_the_scores(shape: tuple[int, ...], device: Device) -> None:
    """A full bias, and one that broadcasts."""
    check(device, lambda g, q, k, v, b: g.attention_bias(q, k, v, b, H, D), *qkv(3, 5), rand(*shape))


@pytest.mark.parametrize(("scale", "softcap"), [(0.3, None), (None, 0.5), (2.0, 1.5)])
def test_scale_and_softcap(scale: float | None, softcap: float | None, device: Device) -> None:
    """The cap comes after the scale and before the mask, so a masked score is not capped."""
    build = lambda g, q, k, v: g.attention_kind(q, k, v, H, D, "causal", scale=scale, softcap=softcap)  # noqa: E731
    check(device, build, *qkv(4, 4))


@pytest.mark.parametrize("declared", [[], [["q", 8], ["k", 8], ["k", 8]]])
def test_rank_2_has_no_batch(declared: list[Any], device: Device) -> None:
    """(S, H*D), with each kind of mask tensor."""
    arrays = [x[0] for x in qkv(3, 5)]
    check(device, lambda g, q, k, v: g.attention_kind(q, k, v, H, D, "causal"), *arrays, shapes=declared)
    if not declared:
        mask = np.array([[1, 1, 0, 1, 0]], np.float32)
        check(device, lambda g, q, k, v, m: g.attention(q, k, v, m, H, D), *arrays, mask)
        check(device, lambda g, q, k, v, b: g.attention_bias(q, k, v, b, H, D), *arrays, rand(1, H, 3, 5))


def test_rank_4_with_heads_first(device: Device) -> None:
    """(B, H, S, D) in and out."""
    arrays = [rand(2, H, 3, D, seed=seed) for seed in range(3)]
    shapes = [["b", H, "s", D]] * 3
    check(device, lambda g, q, k, v: g.attention_kind(q, k, v, H, D, "causal"), *arrays, shapes=shapes)


def test_rank_4_with_the_sequence_first(device: Device) -> None:
    """(B, S, H, D) in and out, where S is not the number of heads."""
    arrays = rand(2, 3, H, D), rand(2, 5, H, D, seed=1), rand(2, 5, H, D, seed=2)
    check(device, lambda g, q, k, v: g.attention_kind(q, k, v, H, D, "none"), *arrays)


def test_rank_4_is_heads_first_where_both_readings_fit() -> None:
    """With S == H the second dimension counts as heads."""
    check(Device.CPU, lambda g, x: g.attention_kind(x, x, x, H, D, "none"), rand(1, H, H, D))


def test_half_precision_survives_a_full_mask() -> None:
    """f16 cannot hold -1e9; a fully masked row is still a uniform average."""
    q, k, v = (x.astype(np.float16) for x in qkv(2, 3, batch=1))
    mask = np.zeros((1, 3), np.float32)
    (result,) = run(Device.CPU, lambda g, q, k, v, m: g.attention(q, k, v, m, H, D), q, k, v, mask)
    np.testing.assert_allclose(result.astype(np.float64), np.broadcast_to(v.mean(1), (1, 2, H * D)), atol=2e-3)


def test_causal_attention_of_one_length_has_a_constant_mask() -> None:
    """A static causal mask costs no nodes beyond one Where."""
    g = Graph("g")
    x = g.input("x", ["b", 4, 8])
    g.outputs = [g.attention_kind(x, x, x, H, D, "causal")]
    types = [node.op_type for node in export_model(g).nodes]
    assert types.count("Where") == 1
    assert not {"Range", "Shape"} & set(types)


@pytest.mark.parametrize("kind", ["causal", "sliding:1"])
def test_a_written_mask_opens_in_plain_onnx_runtime_with_its_lengths_fixed(kind: str) -> None:
    """A named dim may be fixed by an option of the session, too, in place of the sizes of the inputs."""
    g = Graph("g")
    q, k = g.input("q", [1, "queries", H * D]), g.input("k", [1, "keys", H * D])
    g.set_outputs([g.attention_kind(q, k, k, H, D, kind)], ["y"])
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("queries", 3)
    options.add_free_dimension_override_by_name("keys", 5)
    model = export_model(g).model.SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {"q": rand(1, 3, H * D).astype(np.float32), "k": rand(1, 5, H * D, seed=1).astype(np.float32)}
    (result,) = session.run(None, feeds)
    (expected,) = evaluate(g.bind({"queries": 3, "keys": 5}), feeds)
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_rot", [2, 4, 8])
@pytest.mark.parametrize("declared", [[], [["b", "s", 16], ["s", 4], ["s", 4]]], ids=["static", "open"])
def test_rope(n_rot: int, interleaved: bool, declared: list[Any], device: Device) -> None:
    """Only the first n_rot elements of a head turn, by the first n_rot / 2 columns."""
    arrays = rand(2, 3, 16), rand(3, 4), rand(3, 4, seed=1)
    build = lambda g, x, c, s: g.rope_n(x, c, s, 8, n_rot, interleaved=interleaved)  # noqa: E731
    check(device, build, *arrays, shapes=declared)


@pytest.mark.parametrize("declared", [[], [["s", 16]], [["s", 16], ["t", 4], ["t", 4]]], ids=["static", "open", "two"])
def test_rope_takes_the_first_rows_of_longer_tables(declared: list[Any], device: Device) -> None:
    """Row s belongs to place s; further rows are for longer sequences. x may lack the batch."""
    check(device, lambda g, x, c, s: g.rope(x, c, s, 8), rand(3, 16), rand(7, 4), rand(7, 4, seed=1), shapes=declared)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("named", "policy"),
    [
        (True, KernelDispatchPolicy.FORCE_COMMON),
        (False, KernelDispatchPolicy.FORCE_COMMON),
        (False, KernelDispatchPolicy.FORCE_NATIVE),  # whose kernel takes tables of one known size
    ],
)
def test_rope_without_a_row_for_each_place_is_refused(
    rows: int, named: bool, policy: KernelDispatchPolicy, device: Device
) -> None:
    """One row is not used for every place, and no kernel reads beyond the table."""
    graph = Graph("short")
    tables = [graph.input(name, ["rows" if named else rows, 4]) for name in ("cos", "sin")]
    graph.outputs = [graph.rope(graph.input("x", [2, "s", 16]), *tables, 8)]
    compiled = Session(device, CompileOptions(kernel_dispatch=KernelDispatch(policy))).compile(graph)
    feeds = {"x": rand(2, 5, 16), "cos": rand(rows, 4), "sin": rand(rows, 4)}
    for _ in range(2):
        with pytest.raises(RunError):
            compiled.run(feeds)
        x = feeds["x"][:, :rows].copy()
        wanted = rotate(x, feeds["cos"], feeds["sin"], 8, 8, interleaved=False)
        np.testing.assert_allclose(compiled.run(feeds | {"x": x})[0], wanted, atol=1e-5)


def test_rope_with_tables_for_each_sequence(device: Device) -> None:
    """Tables of rank 3 belong to the sequences of the batch."""
    tables = rand(2, 3, 4), rand(2, 3, 4, seed=1)
    check(device, lambda g, x, c, s: g.rope(x, c, s, 8), rand(2, 3, 16), *tables)
