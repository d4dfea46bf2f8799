"""Serving on a Ray cluster: replicas of the same ASGI application and gRPC methods, behind the proxies of Ray Serve.

Ray places, scales, restarts and drains the replicas; this module hands it the application and the limits. What Ray's
proxies do not do, such as limits for slow clients, is listed in `docs/scale-out.md`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.errors import MissingExtraError, RunError, ServingError, install_command
from rlx_ort.providers.hardware import core_share
from rlx_ort.resilience.quarantine import HealthState
from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.serving import access, tracing
from rlx_ort.serving.host import HostOptions
from rlx_ort.serving.messages import messages
from rlx_ort.serving.models import ServedModel, device_lines
from rlx_ort.serving.options import ENDING, HttpOptions, ServeOptions
from rlx_ort.serving.repository import Repository
from rlx_ort.serving.rest import create_app
from rlx_ort.serving.rpc import Servicer, generic_handlers

NAME = "rlx_ort"
"""The name of the application and of its deployment."""
OWN_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
"""Variables for a cluster that is started here, unless they are set.

Before it lets the first driver in, Ray starts an idle worker for each CPU, and waits for ever for those that do not
start: https://github.com/ray-project/ray/issues/40131. Without them, Ray reports workers that do not start.
"""

_GPU_KINDS = ("cuda", "rocm", "gpu", "directx", "metal", "opengl", "amdgpu")
_UNHIDDEN_KINDS = ("gpu", "directx", "opengl")  # Ray hides GPUs from CUDA and ROCm alone
_LOOK_BACK_S = 15.0  # Ray wants more than the 10 s between its measurements
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104  # compared with, not listened on


@dataclass(frozen=True)
class RayOptions:
    """How many replicas there are, and the share of each.

    Attributes:
        replicas: the fewest and the most replicas.
        cpus: CPUs of a replica, which are the threads of its sessions.
        gpus: GPUs of a replica; without one it uses the CPU alone.
        queue: requests per replica, waiting ones included, that replicas are added or removed for.
        most_requests: the most requests that a replica has at a time; the others wait at Ray's proxies.
        scale_up_s, scale_down_s: how long the queue must be longer or shorter before replicas are added or removed.
        archive: the URI of a zip file, such as `s3://...` or `https://...`, that each node downloads once. It has one
            folder at its top; sources are then paths in this folder.
    """

    replicas: tuple[int, int] = (1, 1)
    cpus: float = 1.0
    gpus: float = 0.0
    queue: float = 32.0
    most_requests: int = 256
    scale_up_s: float = 5.0
    scale_down_s: float = 300.0
    archive: str | None = None


class Replica:
    """A process that Ray starts: the models, on the devices that Ray gave it, behind HTTP and gRPC.

    Args:
        sources: those of the `Repository`.
        options: how the models are served.
        http: the rights of clients.

    Raises:
        ServingError: no model can be loaded.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, sources: Sequence[str], options: ServeOptions, http: HttpOptions
    ) -> None:
        ray, _ = _libraries()
        assigned = ray.get_runtime_context().get_assigned_resources()
        environment.set_override("WORKERS", str(max(int(assigned.get("CPU", 1)), 1)))
        if http.access_log:
            access.to_stderr()
        if http.traces:
            tracing.export_spans()
        self._http = http
        self._repository = Repository([Path(source) for source in sources], granted(options, len(ray.get_gpu_ids())))
        await self._repository.load_all()
        if not any(self._repository.models()):
            reasons = [f"{name}: {entry.reason}" for name, entry in self._repository.entries.items()]
            raise ServingError("no model can be loaded: " + "; ".join(reasons), 503)
        self._methods = Servicer(self._repository, http).methods()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application, which Ray asks for after the constructor and ends before the process."""
        return create_app(self._repository, self._http, load=False, close=True)

    async def device_lines(self) -> list[str]:
        """Return the devices of the models as `rlx_ort.serving.models.device_lines` does."""
        return device_lines(list(self._repository.models()))

    async def check_health(self) -> None:
        """Raise if a model has no device left; Ray then replaces this replica."""
        for model in self._repository.models():
            check_devices(model)

    async def ModelStreamInfer(self, requests: Any, grpc_context: Any) -> AsyncIterator[Any]:  # noqa: N802  # gRPC's name
        """Answer the requests of a gRPC stream."""
        with contextlib.suppress(_Aborted):
            async for message in self._methods["ModelStreamInfer"].stream_stream(requests, _Context(grpc_context)):
                yield message


def _unary(name: str) -> Callable[..., Any]:
    async def answer(self: Replica, data: bytes, grpc_context: Any) -> Any:
        try:
            return await self._methods[name].stream_unary(data, _Context(grpc_context))
        except _Aborted:
            return messages.ServerLiveResponse()  # of no bytes; the status is in Ray's context

    return answer


def _libraries() -> tuple[Any, Any]:
    """Return the modules `ray` and `ray.serve`, which nothing else imports."""
    try:
        import ray
        from ray import serve
    except ImportError as err:
        raise MissingExtraError(f"Ray cannot be imported: {err}\n  {install_command('ray')}") from err
    return ray, serve


_METHODS = [*(name.removesuffix("Request") for name in vars(messages) if name.endswith("Request"))]
_METHODS[_METHODS.index("HealthCheck")] = "Check"
for _name in _METHODS:
    setattr(Replica, _name, _unary(_name))


def _require_cores(scale: RayOptions) -> None:
    """Refuse replicas that do not fit on this machine, for which Ray would wait without an end."""
    share = core_share()
    here = min(share.host_logical, share.quota or share.host_logical)
    if scale.cpus * scale.replicas[0] > here:
        raise ServingError(
            f"{scale.replicas[0]} replica(s) of {scale.cpus:g} CPUs do not fit on this machine, which has {here:g}; "
            "give --replicas and --replica-cpus that fit, or the RAY_ADDRESS of a larger cluster"
        )


def add_servicer(servicer: object, server: Any) -> None:
    """Add the gRPC methods to the server of Ray's proxy, which passes their bytes on to the replicas."""
    methods = {name: grpc.unary_unary_rpc_method_handler(_never) for name in _METHODS}
    stream = grpc.stream_stream_rpc_method_handler(_never)
    server.add_generic_rpc_handlers(generic_handlers({**methods, "ModelStreamInfer": stream}))


async def _never(request: object, context: object) -> None:
    raise ServingError("Ray's proxy replaces this function")


class _Aborted(Exception):  # noqa: N818  # it ends a call, as in gRPC
    pass


class _Context:
    """The context of a call as our servicer uses it, on Ray's, which has no `abort`."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.invocation_metadata, self.peer, self.code = context.invocation_metadata, context.peer, context.code

    async def abort(self, code: grpc.StatusCode, details: str, metadata: object = ()) -> None:
        self._context.set_code(code)
        self._context.set_details(details)
        raise _Aborted


def granted(options: ServeOptions, gpus: int) -> ServeOptions:
    """Return the options of a replica that has so many GPUs: devices that Ray keeps for others are denied."""
    denied = [Device(kind) for kind in (_UNHIDDEN_KINDS if gpus else _GPU_KINDS)]
    return replace(options, policy=(options.policy or DevicePolicy.from_env()).with_deny(denied))


def check_devices(model: ServedModel) -> None:
    """Check that a device of a model answers, or is expected to.

    Raises:
        RunError: each of them is in quarantine or stuck.
    """
    if not model.is_complete:
        return
    health = {each.device: each for each in model.runner.health()}
    devices = [health[lane.device] for lane in model.scheduler.lanes if lane.device in health]
    if devices and all(each.state in (HealthState.QUARANTINED, HealthState.STUCK) for each in devices):
        reasons = "; ".join(f"{each.device.label} is {each.state.value}: {each.reason}" for each in devices)
        raise RunError(f"no device answers for {model.name!r}: {reasons}")


def build(
    sources: Sequence[Path | str],
    options: ServeOptions | None = None,
    http: HttpOptions | None = None,
    scale: RayOptions | None = None,
    *,
    drain_s: float = 30.0,
) -> Any:
    """Return a Ray Serve application, for `ray.serve.run` or as one of several in a configuration of `serve deploy`.

    Args:
        sources: model files, packages and folders of them; paths on each node, or in `scale.archive`.
        options: how the models are served.
        http: the rights of clients. They cannot load and unload models, since one replica would do it: run the
            application again instead, which replaces the replicas one after the other.
        scale: how many replicas there are, and the share of each.
        drain_s: how long accepted requests may take once a replica ends, in seconds.

    Raises:
        ServingError: Ray is not installed, or `http` allows repository control.
    """
    _, serve = _libraries()
    options, http, scale = options or ServeOptions(), http or HttpOptions(), scale or RayOptions()
    if http.repository_control:
        raise ServingError("under Ray each replica has its own models; deploy again instead of --repository-control")
    actor: dict[str, Any] = {"num_cpus": scale.cpus, "num_gpus": scale.gpus}
    if scale.archive is None:
        sources = [Path(source).absolute() for source in sources]
    else:
        actor["runtime_env"] = {"working_dir": scale.archive}
    fewest, most = scale.replicas
    deployed = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        ray_actor_options=actor,
        max_ongoing_requests=scale.most_requests,
        max_queued_requests=options.batch.queue_limit,
        logging_config={"enable_access_log": http.access_log},
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        graceful_shutdown_timeout_s=drain_s,
        autoscaling_config={
            "min_replicas": fewest,
            "max_replicas": most,
            "target_ongoing_requests": scale.queue,
            "upscale_delay_s": scale.scale_up_s,
            "downscale_delay_s": scale.scale_down_s,
            "look_back_period_s": _LOOK_BACK_S,
        },
    )
    return deployed.bind([str(source) for source in sources], options, http)


def run(
    sources: Sequence[Path | str],
    options: ServeOptions | None = None,
    place: HostOptions | None = None,
    scale: RayOptions | None = None,
    *,
    on_ready: Callable[[str | None, str | None, list[str]], object] = lambda *_: None,
    stop: threading.Event | None = None,
) -> None:
    """Serve on the cluster of `RAY_ADDRESS`, else on one of this machine alone, until SIGINT, SIGTERM or `stop`.

    Args:
        sources: model files, packages and folders of them.
        options: how the models are served.
        place: where Ray's proxies listen. Their gRPC side has no TLS and listens on every address.
        scale: how many replicas there are, and the share of each.
        on_ready: called with the REST and the gRPC address once the first replicas have loaded their models, and with
            the lines of one of them on its devices.
        stop: ends it when it is set.

    Raises:
        ServingError: Ray is not installed, gRPC would be open to more than was asked for, or no replica starts.
    """
    place, stop = place or HostOptions(), stop or threading.Event()
    if place.grpc_port is not None and (place.host not in _ANY_ADDRESS or place.certificate is not None):
        raise ServingError(
            "Ray's gRPC proxy listens on every address, without TLS: leave gRPC out (--grpc -1), or allow it "
            "(--host 0.0.0.0, without TLS)"
        )
    if place.http_port is None:
        raise ServingError("Ray's proxies always answer REST; give --http a port")
    joined = sys.modules.get("ray") is not None and _libraries()[0].is_initialized()
    if not (joined or os.environ.get("RAY_ADDRESS")):
        _require_cores(scale or RayOptions())  # before Ray is imported, which takes seconds
    ray, serve = _libraries()
    app = build(sources, options, place.guarded, scale, drain_s=place.drain_s)
    for name, value in OWN_CLUSTER.items():
        os.environ.setdefault(name, value)
    started = not ray.is_initialized()
    if started:
        own = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
        ray.init(logging_level="warning", log_to_driver=False, **own)
    try:
        files = (place.certificate, place.private_key)
        certificate, key = (None if file is None else str(file.absolute()) for file in files)
        rest = {"host": place.host, "port": place.http_port, "ssl_certfile": certificate, "ssl_keyfile": key}
        rpc = {"port": place.grpc_port, "grpc_servicer_functions": [f"{__name__}.add_servicer"]}
        with _signals(signal.default_int_handler):  # Ray's own handler of SIGTERM would abort
            try:
                serve.start(
                    proxy_location="EveryNode",
                    http_options=rest,
                    grpc_options=None if place.grpc_port is None else {**rpc, "enable_reflection": False},
                    logging_config={"enable_access_log": False},
                )
            except ray.exceptions.RayError as err:
                raise ServingError(f"Ray could not start Ray Serve: {err}") from err
            try:
                replicas = serve.run(app, name=NAME, route_prefix="/")
            except RuntimeError as err:
                raise ServingError(f"Ray could not start the replicas: {_reason(serve) or err}") from err
        rpc_address = None if place.grpc_port is None else f"{place.host}:{place.grpc_port}"
        on_ready(f"{place.host}:{place.http_port}", rpc_address, replicas.device_lines.remote().result())
        with _signals(lambda *_: stop.set()):
            while not stop.wait(1):  # on Windows a wait without an end takes no signal
                pass
        serve.delete(NAME)
    finally:
        if started:
            if not os.environ.get("RAY_ADDRESS"):
                serve.shutdown()
            ray.shutdown()


def _reason(serve: Any) -> str:
    """Return the last line of Ray's report of the application's replicas."""
    deployments = serve.status().applications[NAME].deployments.values()
    lines = [line for deployment in deployments for line in deployment.message.splitlines() if line.strip()]
    return lines[-1] if lines else ""


@contextlib.contextmanager
def _signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle the signals that end a server, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, handler) for number in ENDING]
    try:
        yield
    finally:
        for number, previous in zip(ENDING, before, strict=True):
            signal.signal(number, previous)
