"""What OpenVINO makes of its options and models, read from its results; its log is all that would say so otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort import Device, Graph, Session
from rlx_ort.options.compile_options import CacheUse, CompileOptions, Precision
from rlx_ort.providers.registry import default_registry

OPENVINO = Device("openvino")
RNG = np.random.default_rng(7)
X, W = (RNG.normal(size=(256, 256)).astype(np.float32) for _ in range(2))
EXACT = X.astype(np.float64) @ W


@pytest.fixture(autouse=True)
def here() -> None:
    """Skip where OpenVINO does not work."""
    found = default_registry().availability(OPENVINO)
    if not found.available:
        pytest.skip(f"no OpenVINO: {found.reason}")


def product(options: CompileOptions) -> npt.NDArray[Any]:
    """Return X @ W as OpenVINO computes it."""
    graph = Graph("product")
    graph.outputs = [graph.input("x", X.shape) @ graph.param("w", W.shape, data=W)]
    return np.asarray(Session(OPENVINO, options).compile(graph).run({"x": X})[0])


def error(options: CompileOptions) -> float:
    return float(np.abs(product(options) - EXACT).max() / np.abs(EXACT).max())


@pytest.mark.parametrize("precision", [Precision.F32, Precision.TF32])
def test_f32_is_f32(precision: Precision) -> None:
    """The plugin ignores `precision` and took bf16, which costs 1e-2, where the processor has it."""
    assert error(CompileOptions(precision=precision)) < 1e-5


def test_less_than_f32_is_what_the_caller_asked_for() -> None:
    """The model is computed in bf16, not only stored in it: the result is further from exact than f32's."""
    options = CompileOptions(provider_options={"precision": "BF16"})
    assert error(CompileOptions()) < 1e-5
    assert error(options) < 3e-2  # f32 again on a processor without bf16


def test_the_callers_load_config_is_read() -> None:
    """A property that OpenVINO does not have is an error of OpenVINO's, which shows that it arrived."""
    options = CompileOptions(provider_options={"load_config": json.dumps({"CPU": {"NO_SUCH_PROPERTY": "1"}})})
    with pytest.raises(Exception, match="NO_SUCH_PROPERTY"):
        product(options)


def test_what_openvino_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache's folder reaches it, and it writes there."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    product(CompileOptions(cache=CacheUse.ON))
    assert list(tmp_path.rglob("*.blob"))


@pytest.mark.parametrize("order", ["abc", "bac", "acb"])
def test_an_input_that_nothing_reads_does_not_take_the_place_of_another(order: str) -> None:
    """OpenVINO drops it, and then takes the inputs that are left by their old places."""
    graph = Graph("unread")
    values = {name: graph.input(name, [3]) for name in order}
    graph.outputs = [values["a"] - values["c"]]
    feeds = {name: np.full(3, number, np.float32) for name, number in (("a", 10), ("b", 3), ("c", 1))}
    np.testing.assert_array_equal(Session(OPENVINO).compile(graph).run(feeds)[0], [9, 9, 9])
