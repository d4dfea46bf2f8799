"""Sessions that hold few copies of weights at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rlx_ort import CompileOptions, Graph, OptimizationLevel
from rlx_ort.converters.bundle import bundle_from_graph
from rlx_ort.converters.transforms.half_precision import to_precision
from rlx_ort.parity.opening import open_model

LAYERS = 6


def ran(folder: Path, low_memory: bool) -> tuple[np.ndarray, list[str]]:
    """Run a chain of f16 products, and return the answer and the operators in the order they ran."""
    rng = np.random.default_rng(0)
    graph = Graph("chain")
    x = graph.input("x", [2, 32])
    for layer in range(LAYERS):
        data = (rng.standard_normal((32, 32)) / 6).astype(np.float32)
        x = x @ graph.param(f"w{layer}", data.shape, data=data)
    graph.outputs = [x]
    bundle, _ = to_precision(bundle_from_graph(graph), "f16")
    options = CompileOptions(
        optimization=OptimizationLevel.OFF, low_memory=low_memory, profile_prefix=str(folder / f"low{low_memory}")
    )
    with open_model(bundle, "cpu", options) as opened:
        [answer] = opened.run({"x": np.ones((2, 32), np.float32)})
    [profile] = folder.glob(f"low{low_memory}*.json")
    events = json.loads(profile.read_text(encoding="utf-8"))
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    return np.asarray(answer), [event["args"]["op_name"] for event in kernels]


def test_weights_are_cast_one_after_the_other(tmp_path: Path) -> None:
    """Each right before its product, where by default all are there at once; the answer is the same."""
    answer, order = ran(tmp_path, low_memory=True)
    expected, default = ran(tmp_path, low_memory=False)
    np.testing.assert_array_equal(answer, expected)
    assert order.count("MatMul") == default.count("MatMul") == LAYERS
    between = np.diff([index for index, name in enumerate(order) if name == "MatMul"])
    assert between.max() <= 4  # the cast of the weight, and of what goes from product to product
    assert default.index("MatMul") >= LAYERS
