"""Models on several devices of which one fails: every request is answered, and the device is used again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from fault_provider import LOST, FaultProvider
from sample_packages.packages import make
from served_models import ON_CPU, WEIGHT, save_product

from rlx_ort import Device, DevicePolicy, EngineError, Graph, HealthState, is_available, register_provider
from rlx_ort.deploy.create import Recipe, create_package
from rlx_ort.device import DeviceKind, register_kind
from rlx_ort.options.split_plan import SplitPlan, Stage
from rlx_ort.providers.base import Availability
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.registry import default_registry
from rlx_ort.serving.models import ServedModel, device_lines
from rlx_ort.serving.options import ServeOptions
from rlx_ort.serving.protocol import InferRequest
from rlx_ort.serving.repository import Repository


async def asked(model: ServedModel, rows: int) -> Device:
    """Return the device that answered a request, whose answer is checked."""
    x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
    found = await model.infer(InferRequest({"x": x}))
    np.testing.assert_allclose(next(iter(found.outputs.values())), x @ WEIGHT, rtol=1e-5, atol=1e-5)
    return found.device


async def test_a_device_that_fails_is_replaced_and_used_again(fault: FaultProvider, tmp_path: Path) -> None:
    """The CPU answers while it fails; once its probe has passed it answers, and its health is good."""
    save_product(tmp_path / "product.onnx")
    repository = Repository([tmp_path], ServeOptions(policy=DevicePolicy.only(["fault", "cpu"])))
    await repository.load_all()
    model = repository.find("product")
    lanes = {lane.device: lane for lane in model.scheduler.lanes}
    lanes[Device.CPU].expected_ns = lambda rows: 1e12  # type: ignore[method-assign]  # the other one is chosen
    assert await asked(model, 1) == Device("fault")
    fault.dead = LOST
    for rows in range(1, 9):
        assert await asked(model, rows) == Device.CPU
    assert model.statistics.failovers["fault"] >= 1
    health = {row.device: row.state for row in model.runner.health()}
    assert health[Device("fault")] is HealthState.QUARANTINED
    fault.dead = ""
    until_s = time.monotonic() + 10
    while await asked(model, 2) != Device("fault"):
        assert time.monotonic() < until_s
        await asyncio.sleep(0.05)
    health = {row.device: row.state for row in model.runner.health()}
    assert health[Device("fault")] is HealthState.READY
    await repository.close()


async def test_a_package_with_a_plan_is_served_in_its_stages(fault: FaultProvider, tmp_path: Path) -> None:
    """As one place that all of its devices belong to; requests are joined there."""
    graph = Graph("two")
    x = graph.input("x", ["rows", 4])
    graph.outputs = [graph.neg(graph.matmul(x, graph.param("w", data=WEIGHT, shape=WEIGHT.shape), name="product"))]
    stages = (Stage(Device.CPU, "product"), Stage(Device("fault"), graph.nodes[-1].name))
    create_package(graph, tmp_path / "two.ortpackage", Recipe(split=SplitPlan(stages)))
    repository = Repository([tmp_path / "two.ortpackage"], ServeOptions(policy=DevicePolicy.only(["fault", "cpu"])))
    await repository.load_all()
    model = repository.find("two")
    assert device_lines([model]) == ["two on cpu, fault"]
    before, waiting = fault.runs, threading.Event()
    fault.script = lambda number: None if waiting.wait(10) else EngineError("no requests wait")
    inputs = [np.full((1, 4), number, np.float32) for number in range(8)]
    requests = [asyncio.ensure_future(model.infer(InferRequest({"x": each}))) for each in inputs]
    while not fault.inside:  # the first run is held; the other requests are in it or wait behind it
        await asyncio.sleep(0.001)
    waiting.set()
    answers = await asyncio.gather(*requests)
    for given, answer in zip(inputs, answers, strict=True):
        np.testing.assert_allclose(next(iter(answer.outputs.values())), -(given @ WEIGHT), rtol=1e-5, atol=1e-5)
    assert before < fault.runs
    assert max(model.statistics.batches) > 1
    await repository.close()


async def test_the_configuration_says_why_a_device_is_not_used(fault: FaultProvider, tmp_path: Path) -> None:
    """Every allowed device is in it: as one that runs the model, or with the reason why it does not."""
    save_product(tmp_path / "product.onnx")
    fault.dead = LOST
    repository = Repository([tmp_path], ServeOptions(policy=DevicePolicy.only(["fault", "cpu"])))
    await repository.load_all()
    found = await repository.find("product").config()
    assert [group["name"] for group in found["instance_group"]] == ["cpu"]
    assert LOST in found["parameters"]["not_used.fault"]["string_value"]
    await repository.close()


async def test_devices_that_work_here_and_do_not_run_a_model_are_told_unasked(
    fault: FaultProvider, tmp_path: Path
) -> None:
    """For a named device that is missing, denied or known by another name, the server gives the reason."""
    save_product(tmp_path / "product.onnx")
    assert is_available("fault")
    fault.dead = LOST
    for policy, wanted in (
        (DevicePolicy().with_deny(["webgpu"]), ["fault"]),
        (DevicePolicy().with_deny(["webgpu"]).with_prefer(["webgpu", "cpu"]), ["webgpu", "fault"]),
    ):
        repository = Repository([tmp_path], ServeOptions(policy=policy))
        await repository.load_all()
        found = dict(repository.find("product").unused_devices())
        assert [device.label for device in found] == wanted
        assert LOST in found[Device("fault")]
        await repository.close()


@pytest.fixture
def cards() -> Iterator[list[str]]:
    """Register two numbered GPUs and one whose provider picks the card. All three compute on the CPU."""
    kinds: dict[str, Literal["numbered", "any"]] = {"card": "numbered", "other-card": "numbered", "any-card": "any"}
    for kind, gpu in kinds.items():
        register_kind(DeviceKind(kind, kind, gpu=gpu))
        provider = FaultProvider(CpuProvider())
        provider.kinds = (kind,)
        provider.probe = lambda device: Availability(True, hardware=device.label)  # type: ignore[method-assign]
        register_provider(provider)
    yield list(kinds)
    for kind in kinds:
        del default_registry()._by_kind[kind]


async def test_a_gpu_that_its_provider_chooses_serves_no_model_beside_another(cards: list[str], tmp_path: Path) -> None:
    """It may be the other's, and each would slow the other down."""
    save_product(tmp_path / "product.onnx")
    repository = Repository([tmp_path], ServeOptions(policy=DevicePolicy.only([*cards, "cpu"])))
    await repository.load_all()
    model = repository.find("product")
    assert {lane.device.label for lane in model.scheduler.lanes} == {"card", "other-card", "cpu"}
    assert "chooses the GPU itself" in dict(model.left_out)[Device("any-card")]
    await repository.close()


async def test_a_package_is_served_by_workers_that_do_not_spin(tmp_path: Path) -> None:
    """They would take the cores from the event loop, and from the other models."""
    repository = Repository([make(tmp_path / "small.ortpackage")], ON_CPU)
    await repository.load_all()
    assert repository.find("small").runner.options.spinning is False
    await repository.close()


@pytest.mark.parametrize("rows", [1, 4])
async def test_the_first_request_starts_no_thread_and_predicts_nothing(tmp_path: Path, rows: int) -> None:
    """The thread of the device has run, and all sizes are predicted, before the model is ready."""
    save_product(tmp_path / "product.onnx")
    repository = Repository([tmp_path], ON_CPU)
    await repository.load_all()
    model = repository.find("product")
    lane: Any = model.scheduler.lanes[0]
    lane.runs_inline = lambda *_: False
    predicted, threads = lane._predict.cache_info().misses, set(threading.enumerate())
    assert await asked(model, rows) == Device.CPU
    assert lane._predict.cache_info().misses == predicted > 1
    assert set(threading.enumerate()) <= threads
    await repository.close()
