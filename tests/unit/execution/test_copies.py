"""What happens to runners, compiled graphs and options that are copied or pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort import CompileOptions, DeviceParseError, DevicePolicy, Graph, GraphDevices, RunError

COPIES = [copy.copy, copy.deepcopy, pickle.dumps]
ONES = np.ones((4, 3), np.float32)


@pytest.mark.parametrize("make", COPIES)
def test_a_runner_and_what_it_compiled_are_not_copied(
    providers: Any, matmul_graph: Callable[..., Graph], make: Callable[[Any], Any]
) -> None:
    """A copy would share the sessions, so it is refused, and the original runs on."""
    runner = GraphDevices(matmul_graph(ONES))
    compiled = runner.compile("cpu")
    for each in (runner, compiled):
        with pytest.raises(RunError, match="neither copied nor pickled"):
            make(each)
    np.testing.assert_array_equal(compiled.run({"x": np.ones((2, 4), np.float32)})[0], np.full((2, 3), 4))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_options_are_copied_and_pickled(make: Callable[[Any], Any]) -> None:
    """The copy is equal, also where a field is a mapping."""
    options = CompileOptions(precision="tf32", precisions={"cuda:1": "f16"}, dims={"n": 3})  # type: ignore[arg-type,dict-item]  # values of the enum
    assert make(options) == options
    assert make(CompileOptions()) == CompileOptions()


def test_a_pick_is_a_strategy_with_whole_runs() -> None:
    """Names, fractions and None are refused when the policy is made."""
    with pytest.raises(DeviceParseError, match="a pick is a strategy"):
        DevicePolicy(pick="benchmark")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(DeviceParseError, match="whole number"):
        DevicePolicy().with_benchmark_pick(2.5)  # type: ignore[arg-type]  # what is tested


def test_no_denial_is_none() -> None:
    """None denies and prefers nothing."""
    assert DevicePolicy(deny=None, prefer=None) == DevicePolicy()  # type: ignore[arg-type]  # what is tested


def test_the_two_names_of_amd_hardware_deny_each_other() -> None:
    """A denied card is not reached under its other name."""
    assert not DevicePolicy(deny=("rocm",)).allows("amdgpu")  # type: ignore[arg-type]  # names are taken
    assert not DevicePolicy(deny=("amdgpu",)).allows("rocm")  # type: ignore[arg-type]  # names are taken
