"""Tensors stay where they are between graphs, and between libraries."""

from __future__ import annotations

import numpy as np
import pytest
from sample_models.step_graphs import assert_same, step_graph, step_inputs

from rlx_ort import Device, Session
from rlx_ort.providers.engine.binding import DeviceTensor


def test_outputs_stay_on_the_device_for_other_graphs(device: Device) -> None:
    """What `run_dlpack` returns goes into another run as it is."""
    compiled = Session(device).compile(step_graph())
    (inputs,) = step_inputs()
    expected = compiled.run(inputs)
    tensors = compiled.run_dlpack(inputs)
    assert all(isinstance(tensor, DeviceTensor) for tensor in tensors)
    assert_same(device, tensors[0].numpy(), expected[0])
    again = compiled.run({"x": inputs["x"], "out0": tensors[0]})[0]
    assert_same(device, again, compiled.run({"x": inputs["x"], "out0": expected[0]})[0])


def test_the_cpu_shares_tensors_through_dlpack() -> None:
    """Numpy reads an output in place, and any object with `__dlpack__` is an input."""
    compiled = Session("cpu").compile(step_graph())
    (inputs,) = step_inputs()
    (tensor, _) = compiled.run_dlpack(inputs)
    shared = np.from_dlpack(tensor)
    np.testing.assert_array_equal(shared, compiled.run(inputs)[0])
    assert np.shares_memory(shared, np.from_dlpack(tensor))


def test_torch_tensors_go_in_and_come_out_without_a_copy() -> None:
    """A CPU tensor of torch is an input without a copy, and torch reads an output in place."""
    torch = pytest.importorskip("torch")
    compiled = Session("cpu").compile(step_graph())
    (inputs,) = step_inputs()
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    np.testing.assert_array_equal(compiled.run(given)[0], compiled.run(inputs)[0])
    tensor = compiled.run_dlpack(given)[0]
    assert torch.from_dlpack(tensor).data_ptr() == torch.from_dlpack(tensor).data_ptr()
    np.testing.assert_array_equal(torch.from_dlpack(tensor).numpy(), compiled.run(inputs)[0])


@pytest.mark.webgpu
def test_webgpu_tensors_refuse_dlpack_and_say_how_to_read_them() -> None:
    """WebGPU's buffers have no address to share."""
    compiled = Session("webgpu").compile(step_graph())
    with pytest.raises(BufferError, match=r"numpy\(\)"):
        np.from_dlpack(compiled.run_dlpack(step_inputs()[0])[0])
