"""What does not need a cluster: devices of a replica, its health, its gRPC methods, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from rlx_ort import Device, DeviceHealth, DevicePolicy, HealthState, RunError, ServingError
from rlx_ort.cli import main
from rlx_ort.providers.hardware import CoreShare
from rlx_ort.serving import ray
from rlx_ort.serving.budget import Budget
from rlx_ort.serving.host import HostOptions
from rlx_ort.serving.messages import messages
from rlx_ort.serving.options import HttpOptions, ServeOptions
from rlx_ort.serving.rpc import Servicer, generic_handlers


@pytest.mark.parametrize(("gpus", "allowed"), [(0, ["cpu"]), (1, ["cuda", "tensorrt", "cpu"])])
def test_a_replica_uses_the_gpus_that_ray_gave_it(gpus: int, allowed: list[str]) -> None:
    """Without one it keeps to the CPU; with some, kinds that see the GPUs of others are denied."""
    devices = ["cuda", "tensorrt", "webgpu", "vulkan", "cpu"]
    given = ray.granted(ServeOptions(policy=DevicePolicy.only(devices)), gpus).policy
    assert given is not None
    assert [device for device in devices if given.allows(device)] == allowed


def test_a_replica_keeps_to_the_variables_of_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a policy it is denied what Ray did not give, and what the variables deny."""
    monkeypatch.setenv("RLX_DENY_DEVICES", "qnn")
    policy = ray.granted(ServeOptions(), 0).policy
    assert policy is not None
    assert not any(policy.allows(name) for name in ("qnn", "cuda", "rocm", "webgpu"))
    assert policy.allows("cpu")


def _model(states: dict[str, HealthState]) -> Any:
    health = [DeviceHealth(Device(name), state, reason="it failed") for name, state in states.items()]
    lanes = [SimpleNamespace(device=Device(name)) for name in states]
    return SimpleNamespace(
        name="m",
        is_complete=True,
        runner=SimpleNamespace(health=lambda: health),
        scheduler=SimpleNamespace(lanes=lanes),
    )


def test_a_replica_is_healthy_while_a_device_answers() -> None:
    """Only when each device of a model is in quarantine or stuck, Ray is asked for another replica."""
    for state in (HealthState.READY, HealthState.OPENING, HealthState.ON_TRIAL):
        ray.check_devices(_model({"cuda": HealthState.QUARANTINED, "cpu": state}))
    with pytest.raises(RunError, match="no device answers for 'm': cuda is stuck: it failed; cpu is quarantined"):
        ray.check_devices(_model({"cuda": HealthState.STUCK, "cpu": HealthState.QUARANTINED}))


class _RayContext:
    """The part of Ray's context of a gRPC call that is used."""

    def __init__(self, **metadata: str) -> None:
        self.status: tuple[Any, str] = (None, "")
        self._metadata = list(metadata.items())

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def code(self) -> Any:
        return self.status[0]

    def set_code(self, code: Any) -> None:
        self.status = (code, self.status[1])

    def set_details(self, details: str) -> None:
        self.status = (self.status[0], details)


def _replica(http: HttpOptions) -> Any:
    replica = object.__new__(ray.Replica)
    replica._methods = Servicer(SimpleNamespace(ready=True, budget=Budget()), http).methods()  # type: ignore[arg-type]
    return replica


def test_ray_calls_the_methods_of_the_servicer_by_their_names() -> None:
    """Bytes go in and messages come out; a refusal is a status in Ray's context and an empty message."""
    replica = _replica(HttpOptions())
    context = _RayContext()
    found = asyncio.run(replica.ServerReady(b"", grpc_context=context))
    assert found == messages.ServerReadyResponse(ready=True)
    assert context.status == (None, "")
    found = asyncio.run(replica.Check(messages.HealthCheckRequest(service="other").SerializeToString(), context))
    assert found.SerializeToString() == b""
    assert context.status == (grpc.StatusCode.NOT_FOUND, "there is no service 'other'")


def test_messages_have_the_size_of_other_requests() -> None:
    """The limit of Ray's proxy is 2 GiB; the replica keeps the operator's."""
    context = _RayContext()
    asyncio.run(_replica(HttpOptions(most_bytes=100)).ModelInfer(bytes(101), context))
    assert context.status == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the message has 101 bytes; 100 are allowed")


def test_the_token_is_asked_for_under_ray_too() -> None:
    """Every method but those for health needs it, the stream among them."""
    replica = _replica(HttpOptions(token="secret"))

    async def stream(context: Any) -> list[Any]:
        return [message async for message in replica.ModelStreamInfer(None, context)]

    for call in (lambda context: replica.ServerMetadata(b"", context), stream):
        context = _RayContext()
        asyncio.run(call(context))
        assert context.status[0] == grpc.StatusCode.UNAUTHENTICATED
    context = _RayContext(authorization="Bearer secret")
    assert asyncio.run(replica.ServerMetadata(b"", context)).name == "rlx_ort"
    assert asyncio.run(replica.ServerLive(b"", _RayContext())).live


def test_every_method_is_added_to_rays_proxy() -> None:
    """The proxy has the paths of our own server, and a replica has a method for each."""
    added = []
    ray.add_servicer(None, SimpleNamespace(add_generic_rpc_handlers=added.extend))
    ours = generic_handlers(Servicer(SimpleNamespace()).methods())  # type: ignore[arg-type]
    assert [set(handler._method_handlers) for handler in added] == [set(handler._method_handlers) for handler in ours]
    for path in [path for handler in added for path in handler._method_handlers]:
        assert callable(getattr(ray.Replica, path.rpartition("/")[2]))


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (HostOptions(), "listens on every address"),
        (HostOptions("0.0.0.0", certificate=Path("a"), private_key=Path("b")), "without TLS"),
        (HostOptions("0.0.0.0", http_port=None), "always answer REST"),
    ],
)
def test_what_rays_proxies_cannot_keep_closed_is_refused(place: HostOptions, why: str) -> None:
    """Calls of gRPC are not open to more than was asked for."""
    with pytest.raises(ServingError, match=why):
        ray.run(["models"], None, place)


def test_replicas_are_a_number_or_a_range(tmp_path: Path) -> None:
    """Anything else is a usage error."""
    for text in ("0", "4-1", "many", "1-"):
        result = CliRunner().invoke(main, ["serve", str(tmp_path), "--ray", "--replicas", text])
        assert (result.exit_code, "neither a number of replicas" in result.output) == (2, True)


def test_replicas_that_do_not_fit_are_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would wait for more CPUs without an end; `docs/scale-out.md` begins with four for each replica."""
    monkeypatch.setitem(sys.modules, "ray", None)  # is not imported
    monkeypatch.setattr(ray, "core_share", lambda: CoreShare(2, 2, 2, None))
    with pytest.raises(ServingError, match=r"4 CPUs do not fit on this machine, which has 2.*--replica-cpus"):
        ray.run(["models"], None, HostOptions(grpc_port=None), ray.RayOptions(replicas=(1, 4), cpus=4))
