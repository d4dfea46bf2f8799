"""What all ways to run share: the active extent, clones, the end of a graph, and the budget of threads."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from sample_models.step_graphs import W, assert_same, step_graph, step_inputs

from rlx_ort import Device, RlxError, Session


def test_a_clone_has_a_state_of_its_own(device: Device) -> None:
    """Handles are copied: what one does to its state, the other does not see."""
    compiled = Session(device).compile(step_graph())
    (inputs,) = step_inputs()
    compiled.bind_gpu_handle("out0", inputs["out0"])
    compiled.set_gpu_handle_feed("out0", 0)
    twin = compiled.clone()
    expected = compiled.run({"x": inputs["x"]})[0]
    np.testing.assert_array_equal(twin.read_gpu_handle("out0"), inputs["out0"])
    assert_same(device, twin.run({"x": inputs["x"]})[0], expected)


def test_a_closed_graph_gives_typed_errors_on_every_path() -> None:
    """After close, every way to run is a typed error."""
    compiled = Session("cpu").compile(step_graph())
    (inputs,) = step_inputs()
    compiled.run_slots(list(inputs.values()))
    compiled.close()
    for call in (
        lambda: compiled.run(inputs),
        lambda: compiled.run_slots(list(inputs.values())),
        lambda: compiled.run_raw(inputs),
        lambda: compiled.run_dlpack(inputs),
        lambda: compiled.bind_gpu_handle("out0", inputs["out0"]),
        lambda: asyncio.run(compiled.run_async(inputs)),
    ):
        with pytest.raises(RlxError, match="closed"):
            call()


def test_sessions_share_one_budget_of_threads() -> None:
    """All sessions together hold no more workers than there are cores for, and give them back."""
    from rlx_ort.providers.engine.process import budget
    from rlx_ort.providers.hardware import core_share

    before = budget().granted
    graphs = [Session("cpu").compile(step_graph()) for _ in range(4)]
    assert budget().granted <= max(core_share().threads - 1, before)
    for compiled in graphs:
        compiled.set_param("w", W * 2)
        compiled.run(step_inputs()[0])
    assert budget().granted <= max(core_share().threads - 1, before)
    for compiled in graphs:
        compiled.close()
    assert budget().granted <= before
