"""The budget of worker threads, and options that reach a provider, without an engine."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import pytest

from rlx_ort import CompileOptions, Device, DeviceUnavailableError, EngineError
from rlx_ort.providers.cuda import CudaProvider
from rlx_ort.providers.engine.opening import forbid_in_forks
from rlx_ort.providers.engine.process import ThreadBudget


class _Session:
    """What a session is to the budget: something that lives."""


def _open(budget: ThreadBudget, model: object, **settings: Any) -> tuple[_Session, Any]:
    options = CompileOptions(**settings)
    made = SimpleNamespace()
    return budget.opened(made, options, model, _Session, on_cpu=True), made


def test_the_first_session_gets_all_threads_and_the_others_what_is_left() -> None:
    """Together they never hold more, and the next one gets what a closed one gave back."""
    budget = ThreadBudget(4)
    first, made = _open(budget, object())
    assert made.intra_op_num_threads == 4
    second, made = _open(budget, object())
    assert made.intra_op_num_threads == 1
    assert budget.granted == 3
    del first
    gc.collect()
    assert budget.granted == 0
    third, made = _open(budget, object())
    assert made.intra_op_num_threads == 4
    del second, third


def test_sessions_of_one_model_count_once() -> None:
    """A session that replaces another one keeps its threads."""
    budget = ThreadBudget(4)
    model = object()
    old, _ = _open(budget, model)
    new, made = _open(budget, model)
    assert (made.intra_op_num_threads, budget.granted) == (4, 3)
    del old
    gc.collect()
    assert budget.granted == 3
    del new
    gc.collect()
    assert budget.granted == 0


def test_an_open_that_fails_keeps_nothing() -> None:
    """What was offered to a session that never came is offered again."""
    budget, model = ThreadBudget(4), object()

    def refuse() -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused") as caught:
        budget.opened(SimpleNamespace(), CompileOptions(), model, refuse, on_cpu=True)
    _, made = _open(budget, object())
    assert (made.intra_op_num_threads, caught.value.args) == (4, ("refused",))


def test_a_number_that_is_asked_for_is_granted_beside_the_budget() -> None:
    """It is the caller's own decision."""
    budget = ThreadBudget(4)
    _, made = _open(budget, object(), intra_op_threads=3)
    assert (made.intra_op_num_threads, budget.granted) == (3, 0)


def test_sessions_on_devices_take_no_workers() -> None:
    """Their work is not on the cores."""
    budget = ThreadBudget(4)
    made = SimpleNamespace()
    session = budget.opened(made, CompileOptions(), object(), _Session, on_cpu=False)
    assert session is not None
    assert (made.intra_op_num_threads, budget.granted) == (1, 0)


def test_a_shared_pool_serves_every_session() -> None:
    """With it, no session has a pool of its own; where it comes too late, each has."""
    sizes = []
    budget = ThreadBudget(4)
    budget.make_pool(SimpleNamespace(set_global_thread_pool_sizes=lambda *given: sizes.append(given)), (RuntimeError,))
    _, made = _open(budget, object())
    assert (made.use_per_session_threads, sizes) == (False, [(4, 1)])

    def late(*given: int) -> None:
        raise RuntimeError("already created")

    budget = ThreadBudget(4)
    budget.make_pool(SimpleNamespace(set_global_thread_pool_sizes=late), (RuntimeError,))
    assert not budget.shared


def test_rlx_workers_sizes_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable speaks before the share of the cores."""
    monkeypatch.setenv("RLX_WORKERS", "7")
    assert ThreadBudget().total == 7


def test_memory_limits_become_options_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit comes with an arena that does not double what it takes."""
    monkeypatch.setattr(CudaProvider, "ep_devices", lambda self, device: ())
    provider = CudaProvider()
    plain = provider.recipe(Device("cuda:1"), CompileOptions())
    assert "gpu_mem_limit" not in plain.options
    assert plain.config == {"session.use_device_allocator_for_initializers": "1"}  # beside the arena, which doubles
    assert plain.memory == ("cuda", 1)
    asked = provider.recipe(Device("cuda"), CompileOptions(device_memory_limit_bytes=1 << 30))
    assert asked.options["gpu_mem_limit"] == str(1 << 30)
    assert asked.options["arena_extend_strategy"] == "kSameAsRequested"
    assert not asked.config  # such weights would not count


def test_a_device_is_refused_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check passes in the process that opened the device and raises in one that was forked from it."""
    check = forbid_in_forks(Device("cuda"))
    check()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(DeviceUnavailableError, match="spawn"):
        check()


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5", "99999", "9" * 5000, "\u0664"])
def test_a_wrong_number_of_workers_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is read as another number, and none starts threads by the thousand."""
    monkeypatch.setenv("RLX_WORKERS", text)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with pytest.raises(EngineError, match=r"RLX_WORKERS.*from 1 to 256"):
        _ = ThreadBudget().total
