"""Tensors of the real PyTorch go in and come out, in every dtype and layout that torch shares."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort import Device, DType, Graph, GraphDevices, InputError, Session
from rlx_ort.execution.inputs import InputPlan
from rlx_ort.providers.engine.runtime import runtime_version

torch = pytest.importorskip("torch")

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.cat([x, x], 1)[:, ::2],
    "offset": lambda x: torch.cat([x, x])[1:3],
    "expanded": lambda x: x[:1].expand(3, 4),
    "empty": lambda x: x[:0],
    "negated lazily": lambda x: torch._neg_view(x),
    "detached": lambda x: x.clone().requires_grad_().detach(),
}


def _graph(dtype: str = "f32", *, doubled: bool = False) -> Graph:
    """Return a graph of one input x of any number of rows, which it doubles or hands on."""
    graph = Graph("doubled" if doubled else "handed on")
    x = graph.input("x", ["rows", 4], dtype)
    graph.outputs = [x + x if doubled else x]
    return graph


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_goes_in_and_comes_out(dtype: str) -> None:
    """What torch reads of the output equals the input, also where numpy has no such dtype."""
    tensor = torch.arange(8).reshape(2, 4).to(DTYPES[dtype])
    if dtype.startswith("f8") and (runtime_version() or ()) < (1, 32):
        pytest.skip("ONNX Runtime takes float8 tensors of other libraries from 1.32 on")
    with Session("cpu").compile(_graph(dtype)) as compiled:
        [read] = compiled.run({"x": tensor})
        [shared] = compiled.run_dlpack({"x": tensor})
        back = torch.from_dlpack(shared)
    assert read.dtype == DType(dtype).numpy
    assert back.dtype == tensor.dtype
    assert torch.equal(back.double(), tensor.double())
    np.testing.assert_array_equal(read.astype(np.float64), tensor.double().numpy())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_layout_is_read_right(dtype: str, layout: str) -> None:
    """Strides, offsets and lazy signs are honoured; numpy shares the one dtype, ONNX Runtime the other."""
    tensor = LAYOUTS[layout](torch.arange(1, 9).reshape(2, 4).to(DTYPES[dtype]))
    with Session("cpu").compile(_graph(dtype)) as compiled:
        [back] = map(torch.from_dlpack, compiled.run_dlpack({"x": tensor}))
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_inputs_and_outputs_on_the_cpu_are_not_copied(dtype: str) -> None:
    """The engine gets torch's memory, and torch that of the output, which outlives the session and the tensor."""
    tensor = torch.arange(8).reshape(2, 4).to(DTYPES[dtype])
    graph = _graph(dtype)
    fed = InputPlan({value.name: value.type for value in graph.inputs}).feeds({"x": tensor})
    assert fed["x"].ctypes.data == tensor.data_ptr()
    with Session("cpu").compile(graph) as compiled:
        [shared] = compiled.run_dlpack({"x": tensor})
    back = torch.from_dlpack(shared)
    assert back.data_ptr() == torch.from_dlpack(shared).data_ptr()
    del compiled, shared, tensor
    gc.collect()
    assert back.flatten().tolist() == list(range(8))


def test_a_shared_input_lives_as_long_as_what_was_made_of_it() -> None:
    """The memory of a bf16 tensor, shared by ONNX Runtime, is not freed with the last name for it."""
    kind = _graph("bf16").inputs[0].type
    fed = InputPlan({"x": kind}).feeds({"x": torch.full((1000, 4), 3, dtype=torch.bfloat16)})
    gc.collect()
    scratch = torch.zeros((1000, 4), dtype=torch.bfloat16)  # where freed memory would be used again
    assert (fed["x"].astype(np.float32) == 3).all()
    assert not scratch.any()


@pytest.mark.parametrize(
    ("tensor", "remedy"),
    [
        (torch.ones(2, 4, requires_grad=True), r"detach\(\)"),
        (torch.nn.Parameter(torch.ones(2, 4)), r"detach\(\)"),
        (torch.ones(2, 4).to_sparse(), "strided"),
        (torch.ones(2, 4, device="meta"), "meta"),
        (torch.ones(2, 4, dtype=torch.float64), "f64|float64"),
    ],
    ids=["requires grad", "parameter", "sparse", "meta", "wider"],
)
def test_what_cannot_be_shared_is_an_input_error(tensor: Any, remedy: str) -> None:
    """The message names the input, and what to do where torch knows it."""
    with Session("cpu").compile(_graph()) as compiled, pytest.raises(InputError, match=rf"'x'.*({remedy})"):
        compiled.run({"x": tensor})


def test_a_runner_takes_tensors_everywhere(device: Device) -> None:
    """By `run`, by name, awaited, left on the device and chosen automatically, on every device."""
    tensor = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    expected = (tensor + tensor).numpy()
    with GraphDevices(_graph(doubled=True)) as runner:
        results = [
            runner.run(device, {"x": tensor}),
            runner(x=tensor),
            asyncio.run(runner.run_async({"x": tensor}, device)),
            [found.numpy() for found in runner.run_dlpack({"x": tensor}, device)],
            runner.run_fastest({"x": tensor}),
            runner.run_try([device], {"x": tensor})[1],
        ]
    for [found] in results:
        np.testing.assert_array_equal(found, expected)


def test_slots_and_handles_take_tensors(device: Device) -> None:
    """The buffers of a compiled graph are filled from them, and a handle keeps a copy of one."""
    tensor = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    expected = (tensor + tensor).numpy()
    with Session(device).compile(_graph(doubled=True)) as compiled:
        np.testing.assert_array_equal(compiled.run_slots([tensor])[0], expected)
        compiled.bind_handle("x", tensor)
        tensor.zero_()
        np.testing.assert_array_equal(compiled.run({})[0], expected)
