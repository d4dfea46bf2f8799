"""`rlx-ort serve MODEL...`: answer requests of the Open Inference Protocol over REST and gRPC."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import note
from rlx_ort.errors import MissingExtraError, install_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlx_ort.serving.host import HostOptions
    from rlx_ort.serving.models import ServedModel
    from rlx_ort.serving.options import ServeOptions

_OPEN_FILES = 8192
_OF_HTTP, _OF_GRPC = ("uvicorn", "httptools", "prometheus_client"), ("google.protobuf", "grpc")
_PORT = options.Whole(-1, 65535)


def _range_of(text: str) -> tuple[int, int]:
    least, dash, most = text.partition("-")
    try:
        limits = int(least), int(most if dash else least)
    except ValueError:
        limits = (0, 0)
    if not 1 <= limits[0] <= limits[1]:
        raise click.BadParameter(f"{text!r} is neither a number of replicas, such as 2, nor a range, such as 1-4")
    return limits


@options.command("serve")
def command(
    models: tuple[Path, ...] = options.argument(nargs=-1, required=True, type=options.PACKAGE),
    host: str = options.option("--host", "The address to listen on.", default="127.0.0.1"),
    http_port: int = options.option(
        "--http --http-port", "For REST; -1: none, 0: any free port.", default=8000, type=_PORT
    ),
    grpc_port: int = options.option(
        "--grpc --grpc-port", "For gRPC; -1: none, 0: any free port.", default=8001, type=_PORT
    ),
    max_batch: int = options.whole("--max-batch", "Rows that run together.", least=1, default=256),
    batch_unproven: tuple[str, ...] = options.option(
        "--batch-unproven",
        "Batch this model though its rows are not proved independent; * for all; may be repeated.",
        multiple=True,
        metavar="NAME",
    ),
    max_delay: float = options.seconds("--max-delay", "Milliseconds to wait for more rows.", unit="ms", default=0.0),
    queue: int = options.whole("--queue", "Requests that may wait.", least=1, default=1024),
    timeout: float | None = options.seconds("--timeout", "Seconds that a request may wait."),
    precision: str = options.choice(
        "--precision", "Compute the f32 parts of ONNX files in it.", options.PRECISIONS, default="f32"
    ),
    signed_only: bool = options.flag("--signed-only", "Serve signed packages only; needs --key."),
    token_env: str | None = options.option(
        "--token-env", "The variable with the token that clients must send.", metavar="NAME"
    ),
    allow_host: tuple[str, ...] = options.option(
        "--allow-host", "Another host name of this server; may be repeated.", multiple=True, metavar="NAME"
    ),
    tls_cert: Path | None = options.file("--tls-cert", "A PEM file with the certificate; needs --tls-key."),
    tls_key: Path | None = options.file("--tls-key", "A PEM file with the private key of --tls-cert."),
    most_bytes: int = options.whole("--most-bytes", "Largest request.", least=1, default=64 << 20),
    most_held_bytes: int = options.whole(
        "--most-held-bytes", "Memory of all requests and answers at a time.", least=1 << 20, default=1 << 30
    ),
    fronts: int | None = options.whole(
        "--fronts",
        "Processes that read and answer HTTP beside the server's; by default one for 4 cores, from 8 cores on.",
    ),
    load_limit: float = options.seconds(
        "--load-limit", "Seconds that a version of a model may take to open and run.", least=0.001, default=600.0
    ),
    repository_control: bool = options.flag("--repository-control", "Let clients load and unload models."),
    access_log: bool = options.flag("--access-log", "Write a line of JSON on stderr for each request."),
    traces: bool = options.flag("--traces", "Send spans of OpenTelemetry, to where OTEL_* variables point."),
    on_ray: bool = options.flag("--ray", "Serve on the Ray cluster of RAY_ADDRESS, or on one made here."),
    replicas: tuple[int, int] = options.option(
        "--replicas",
        "With --ray: how many; 1-4 scales.",
        default="1",
        show_default=False,
        metavar="N[-M]",
        read=_range_of,
    ),
    replica_cpus: float = options.number(
        "--replica-cpus", "With --ray: CPUs and threads of each.", default=1.0, show_default=False
    ),
    replica_gpus: float = options.number("--replica-gpus", "With --ray: GPUs of each.", default=0.0),
    policy: rlx_ort.DevicePolicy = options.policy(device_too=True),
    key: Path | None = options.KEY,
) -> None:
    """Serve models to clients of the Open Inference Protocol, as Triton's.

    MODEL is an ONNX file, a package, or a folder of them; NAME/VERSION/model.onnx in a folder is a version. Batches and
    devices are chosen by predicted times. Without --host, only this machine is answered.
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together")
    if signed_only and key is None:
        raise click.UsageError("--signed-only needs --key, the public key that signed the packages")
    if http_port < 0 and grpc_port < 0:
        raise click.UsageError("neither --http nor --grpc is left to listen on")
    token = None
    if token_env is not None:
        token = os.environ.get(token_env)
        if not token:
            raise click.UsageError(f"the variable {token_env} is not set, and --token-env names it")
    gc.disable()  # imports create no garbage
    try:
        _check_installed(*_OF_HTTP * (http_port >= 0), *_OF_GRPC * (grpc_port >= 0))
        from rlx_ort.serving import access, tracing
        from rlx_ort.serving import host as hosting
        from rlx_ort.serving.models import device_lines
        from rlx_ort.serving.options import SWITCH_S, HttpOptions, ServeOptions
        from rlx_ort.serving.repository import Repository
        from rlx_ort.serving.scheduler import BatchOptions
    except ImportError as err:
        gc.enable()
        raise _lacking(err) from err

    sys.setswitchinterval(SWITCH_S)
    given = click.get_current_context().get_parameter_source
    if given("only") is ParameterSource.DEFAULT:
        policy = _narrowed(policy)
    batch = BatchOptions(max_batch, max_delay / 1e3, queue, timeout)
    served = ServeOptions(
        policy,
        batch,
        None if key is None else str(key),
        signed_only,
        precision=precision,
        batch_unproven=frozenset(batch_unproven),
        load_limit_s=load_limit,
        most_held_bytes=most_held_bytes,
    )
    hosts = frozenset(map(str.lower, allow_host)) or None
    limits = HttpOptions(most_bytes, token, repository_control, hosts=hosts, access_log=access_log, traces=traces)
    on_all = host == "0.0.0.0"  # noqa: S104  # it is compared with
    if on_ray and not on_all and given("grpc_port") is ParameterSource.DEFAULT:
        grpc_port = -1
        note("no gRPC: under Ray it listens on every address; --host 0.0.0.0 allows that")
    place = hosting.HostOptions(
        host,
        None if http_port < 0 else http_port,
        None if grpc_port < 0 else grpc_port,
        tls_cert,
        tls_key,
        limits,
        fronts=hosting.front_count() if fronts is None else fronts,
    )

    if on_ray:
        gc.enable()
        _serve_on_ray(models, served, place, replicas, replica_cpus, replica_gpus)
        return
    if access_log:
        access.to_stderr()
    if traces:
        tracing.export_spans()

    def listening(http: str | None, rpc: str | None) -> None:
        scheme = "https" if tls_cert else "http"
        note(", ".join([f"REST on {scheme}://{http}"] * bool(http) + [f"gRPC on {rpc}"] * bool(rpc)))

    failed: list[str] = []

    async def run() -> None:
        _allow_connections()
        repository, stop = Repository(models, served), asyncio.Event()
        opening: list[asyncio.Future[None]] = []

        async def completed(model: ServedModel) -> None:
            await model.completed()
            if model in repository.models():
                _note_devices("opened in full", device_lines([model]))

        def loaded() -> None:
            gc.freeze()
            gc.enable()
            found = list(repository.models())
            lost = [name for name, entry in repository.entries.items() if not entry.loaded]
            if not found and not repository_control and not stop.is_set():
                failed.extend(lost)
                stop.set()
                return
            _note_devices("ready", device_lines(found), f"; {len(lost)} failed" if lost else "")
            for model in found:
                if served.batch.max_batch > 1 and model.unbatched_because:
                    note(f"{model.name} runs one request at a time: {model.unbatched_because}")
                if not model.is_complete:
                    opening.append(asyncio.ensure_future(completed(model)))

        await hosting.serve(repository, place, on_listening=listening, on_loaded=loaded, stop=stop)

    import asyncio  # 50 ms, which `rlx-ort --help` need not take

    try:
        asyncio.run(run())
    except ImportError as err:
        raise _lacking(err) from err
    finally:
        gc.enable()
    if failed:
        raise rlx_ort.ServingError(
            f"no model could be loaded ({', '.join(failed)}); the reasons are above. With --repository-control the "
            "server keeps running, so that clients can load one"
        )


def _check_installed(*names: str) -> None:
    """Raise the `ImportError` of the first library that is not there, before anything is loaded."""
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _lacking(error: ImportError) -> MissingExtraError:
    """Return the error of a command that needs the extra; one about a module of our own is raised as it is."""
    if (error.name or "").startswith("rlx_ort"):
        raise error
    return MissingExtraError(f"serving needs more packages ({error}); {install_command('serve')}")


def _note_devices(title: str, lines: Sequence[str], more: str = "") -> None:
    """Print the devices that run each model, and why others do not."""
    note(f"{title}: {lines[0] or 'no model'}{more}")
    for line in lines[1:]:
        note(line)


def _narrowed(policy: rlx_ort.DevicePolicy) -> rlx_ort.DevicePolicy:
    """Return the policy with the devices of RLX_DEVICE_CHAIN, else of RLX_DEVICE, as the only ones.

    Raises:
        NoViableDeviceError: RLX_DEVICE names a device that the other variables or options do not allow.
    """
    chain, device = rlx_ort.device_chain_from_env(), rlx_ort.device_from_env()
    if chain:
        return replace(policy, allow=tuple(each for each in chain if policy.allows(each))).with_prefer(chain)
    if device is None:
        return policy
    if (refusal := policy.refusal(device)) is not None:
        message = "RLX_DEVICE names a device that may not be used; change it, or give --device:"
        raise rlx_ort.NoViableDeviceError(message, [(device, refusal)])
    return replace(policy, allow=(device,))


def _serve_on_ray(
    models: Sequence[Path],
    served: ServeOptions,
    place: HostOptions,
    replicas: tuple[int, int],
    cpus: float,
    gpus: float,
) -> None:
    from rlx_ort.serving import ray

    def ready(http: str | None, rpc: str | None, devices: Sequence[str]) -> None:
        _note_devices(f"ready: REST on {http}" + (f", gRPC on {rpc}" if rpc else ""), devices)

    ray.run(models, served, place, ray.RayOptions(replicas, cpus, gpus), on_ready=ready)


def _allow_connections() -> None:
    """Raise the limit of open files, each connection being one, where a shell's default is low."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _OPEN_FILES)), hard))
