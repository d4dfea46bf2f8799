"""Sizes at which a kernel of a device has no room are refused before they reach it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rlx_ort import ConversionError, EngineError, Session
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.cuda import CudaProvider

TEXT = """
<ir_version: 9, opset_import: ["": 20]> g (float[n, 1, length] x) => (y)
<float[1, 1, 4] w = {{1, 2, 3, 4}}> {{ y = Conv {attributes} (x, w) }}
"""


@pytest.fixture(autouse=True)
def _limits_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the CPU the limits of small sizes that CUDA has."""
    small = [limit for limit in CudaProvider.limits if limit.small]
    monkeypatch.setattr(CpuProvider, "limits", (*CpuProvider.limits, *small))


def convolution(attributes: str = "") -> CompiledGraph:
    """Return a convolution with a window of four, of inputs of any length."""
    return Session("cpu").compile(from_onnx(onnx.parser.parse_model(TEXT.format(attributes=attributes))))


@pytest.mark.parametrize(
    ("attributes", "least"), [("", 4), ("<pads = [1, 0]>", 3), ("<dilations = [2]>", 7), ('<auto_pad = "VALID">', 4)]
)
def test_a_window_beyond_its_input_is_refused_each_time(attributes: str, least: int) -> None:
    """Whatever ran before; an input of its length has one result."""
    compiled = convolution(attributes)
    for _ in range(2):
        with pytest.raises(EngineError, match="operands that do not fit"):
            compiled.run({"x": np.ones((2, 1, least - 1), np.float32)})
        assert compiled.run({"x": np.ones((2, 1, least), np.float32)})[0].shape == (2, 1, 1)


def test_padding_that_leaves_room_at_any_size_asks_nothing() -> None:
    """One element has room."""
    assert convolution("<pads = [2, 1]>").run({"x": np.ones((1, 1, 1), np.float32)})[0].shape == (1, 1, 1)


def test_a_window_that_is_fed_is_judged_with_each_of_its_sizes() -> None:
    """One that fitted says nothing of a longer one."""
    text = '<ir_version: 9, opset_import: ["": 20]> g (float[1,1,n] x, float[1,1,k] w) => (y) { y = Conv (x, w) }'
    compiled = Session("cpu").compile(from_onnx(onnx.parser.parse_model(text)))
    x = np.ones((1, 1, 3), np.float32)
    assert compiled.run({"x": x, "w": np.ones((1, 1, 3), np.float32)})[0].shape == (1, 1, 1)
    with pytest.raises(EngineError, match="operands that do not fit"):
        compiled.run({"x": x, "w": np.ones((1, 1, 4), np.float32)})


@pytest.mark.parametrize(("form", "fitting"), [("Conv", 4), ("Conv <group = 2>", 8), ("ConvTranspose", 2)])
def test_other_channels_than_a_window_has_are_refused_each_time(form: str, fitting: int) -> None:
    """Fewer and more, whatever ran before."""
    text = (
        '<ir_version: 9, opset_import: ["": 20]> g (float[1, channels, 3] x) => (y) '
        f"<float[2, 4, 1] w = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{ y = {form} (x, w) }}"
    )
    compiled = Session("cpu").compile(from_onnx(onnx.parser.parse_model(text)))
    for channels in (fitting - 1, fitting + 1, fitting - 1, fitting + 1):
        with pytest.raises(EngineError, match="operands that do not fit"):
            compiled.run({"x": np.ones((1, channels, 3), np.float32)})
        assert compiled.run({"x": np.ones((1, fitting, 3), np.float32)})[0].shape[0] == 1


def test_groups_that_do_not_divide_the_channels_are_no_model() -> None:
    """A kernel of CUDA would end the process."""
    text = (
        '<ir_version: 9, opset_import: ["": 20]> g (float[1, 3, 3] x) => (y) '
        "<float[3, 1, 1] w = {1, 2, 3}> { y = ConvTranspose <group = 2> (x, w) }"
    )
    with pytest.raises(ConversionError, match="3 input channels in 2 groups"):
        from_onnx(onnx.parser.parse_model(text))
