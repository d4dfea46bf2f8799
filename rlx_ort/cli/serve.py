"""`rlx-ort serve MODEL...`: answer requests of the Open Inference Protocol over REST and gRPC."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from rlx_ort.cli import options
from rlx_ort.cli.show import note
from rlx_ort.errors import install_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlx_ort.selection.policy import DevicePolicy
    from rlx_ort.serving.host import HostOptions
    from rlx_ort.serving.options import ServeOptions

_OPEN_FILES = 8192
_PORT = click.IntRange(-1, 65535)


def _range_of(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, int]:
    least, dash, most = text.partition("-")
    try:
        limits = int(least), int(most if dash else least)
    except ValueError:
        limits = (0, 0)
    if not 1 <= limits[0] <= limits[1]:
        raise click.BadParameter(f"{text!r} is no number of replicas, as 2, or range, as 1-4", ctx, param)
    return limits


@dataclass(frozen=True)
class _Options:
    """The options of the command: one field each."""

    host: str = options.field("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
    http_port: int = options.field(
        "--http", default=8000, show_default=True, type=_PORT, help="For REST; -1: none, 0: any free port."
    )
    grpc_port: int = options.field(
        "--grpc", default=8001, show_default=True, type=_PORT, help="For gRPC; -1: none, 0: any free port."
    )
    max_batch: int = options.field(
        "--max-batch", default=256, show_default=True, type=click.IntRange(min=1), help="Rows that run together."
    )
    batch_unproven: tuple[str, ...] = options.field(
        "--batch-unproven",
        multiple=True,
        metavar="NAME",
        help="Batch this model though its rows are not proved independent; * for all; may be repeated.",
    )
    max_delay: float = options.field(
        "--max-delay", default=0.0, type=click.FloatRange(min=0), help="Milliseconds to wait for more rows."
    )
    queue: int = options.field(
        "--queue", default=1024, show_default=True, type=click.IntRange(min=1), help="Requests that may wait."
    )
    timeout: float | None = options.field(
        "--timeout", type=click.FloatRange(min=0), help="Seconds that a request may wait."
    )
    precision: str = options.field(
        "--precision",
        default="f32",
        show_default=True,
        type=click.Choice(["f32", "tf32", "f16", "bf16"]),
        help="Compute the f32 parts of ONNX files in it.",
    )
    signed_only: bool = options.field("--signed-only", is_flag=True, help="Serve signed packages only; needs --key.")
    token_env: str | None = options.field(
        "--token-env", metavar="NAME", help="The variable with the token that clients must send."
    )
    allow_host: tuple[str, ...] = options.field(
        "--allow-host", multiple=True, metavar="NAME", help="Another host name of this server; may be repeated."
    )
    tls_cert: Path | None = options.field(
        "--tls-cert", type=options.FILE, help="A PEM file with the certificate; needs --tls-key."
    )
    tls_key: Path | None = options.field(
        "--tls-key", type=options.FILE, help="A PEM file with the private key of --tls-cert."
    )
    most_bytes: int = options.field(
        "--most-bytes", default=64 << 20, show_default=True, type=click.IntRange(min=1), help="Largest request."
    )
    most_held_bytes: int = options.field(
        "--most-held-bytes",
        default=1 << 30,
        show_default=True,
        type=click.IntRange(min=1 << 20),
        help="Memory of all requests and answers at a time.",
    )
    fronts: int | None = options.field(
        "--fronts",
        type=click.IntRange(min=0),
        help="Processes that read and answer HTTP beside the server's; by default one for 4 cores, from 8 cores on.",
    )
    load_limit: float = options.field(
        "--load-limit",
        default=600.0,
        show_default=True,
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds that a version of a model may take to open and run.",
    )
    repository_control: bool = options.field(
        "--repository-control", is_flag=True, help="Let clients load and unload models."
    )
    access_log: bool = options.field(
        "--access-log", is_flag=True, help="Write a line of JSON on stderr for each request."
    )
    traces: bool = options.field(
        "--traces", is_flag=True, help="Send spans of OpenTelemetry, to where OTEL_* variables point."
    )
    on_ray: bool = options.field(
        "--ray", is_flag=True, help="Serve on the Ray cluster of RAY_ADDRESS, or on one made here."
    )
    replicas: tuple[int, int] = options.field(
        "--replicas", default="1", metavar="N[-M]", callback=_range_of, help="With --ray: how many; 1-4 scales."
    )
    replica_cpus: float = options.field(
        "--replica-cpus", default=1.0, type=click.FloatRange(min=0), help="With --ray: CPUs and threads of each."
    )
    replica_gpus: float = options.field(
        "--replica-gpus", default=0.0, type=click.FloatRange(min=0), help="With --ray: GPUs of each."
    )


@click.command("serve")
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@options.table(_Options)
@options.policy(device_too=True)
@options.key
@click.pass_context
def command(
    ctx: click.Context, models: tuple[Path, ...], given: _Options, policy: DevicePolicy, key: Path | None
) -> None:
    """Serve models to clients of the Open Inference Protocol, as Triton's.

    MODEL is an ONNX file, a package, or a folder of them; NAME/VERSION/model.onnx in a folder is a version. Batches and
    devices are chosen by predicted times. Without --host, only this machine is answered.
    """
    if (given.tls_cert is None) != (given.tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together")
    if given.signed_only and key is None:
        raise click.UsageError("--signed-only needs --key, the public key that signed the packages")
    if given.http_port < 0 and given.grpc_port < 0:
        raise click.UsageError("neither --http nor --grpc is left to listen on")
    token = None
    if given.token_env is not None:
        token = os.environ.get(given.token_env)
        if not token:
            raise click.UsageError(f"the variable {given.token_env} is not set, and --token-env names it")
    gc.disable()  # imports create no garbage
    try:
        from rlx_ort.serving import access, tracing
        from rlx_ort.serving import host as hosting
        from rlx_ort.serving.options import SWITCH_S, HttpOptions, ServeOptions
        from rlx_ort.serving.repository import Repository
        from rlx_ort.serving.scheduler import BatchOptions
    except ImportError as err:
        gc.enable()
        raise click.ClickException(f"serving needs more packages ({err}); {install_command('serve')}") from err

    sys.setswitchinterval(SWITCH_S)
    if ctx.get_parameter_source("only") is ParameterSource.DEFAULT:
        policy = _narrowed(policy)
    batch = BatchOptions(given.max_batch, given.max_delay / 1e3, given.queue, given.timeout)
    served = ServeOptions(
        policy,
        batch,
        None if key is None else str(key),
        given.signed_only,
        precision=given.precision,
        batch_unproven=frozenset(given.batch_unproven),
        load_limit_s=given.load_limit,
        most_held_bytes=given.most_held_bytes,
    )
    hosts = frozenset(map(str.lower, given.allow_host)) or None
    limits = HttpOptions(
        given.most_bytes,
        token,
        given.repository_control,
        hosts=hosts,
        access_log=given.access_log,
        traces=given.traces,
    )
    on_all = given.host == "0.0.0.0"  # noqa: S104  # it is compared with
    if given.on_ray and not on_all and ctx.get_parameter_source("grpc_port") is ParameterSource.DEFAULT:
        given = replace(given, grpc_port=-1)
        note("no gRPC: under Ray it listens on every address; --host 0.0.0.0 allows that")
    place = hosting.HostOptions(
        given.host,
        None if given.http_port < 0 else given.http_port,
        None if given.grpc_port < 0 else given.grpc_port,
        given.tls_cert,
        given.tls_key,
        limits,
        fronts=hosting.front_count() if given.fronts is None else given.fronts,
    )

    if given.on_ray:
        gc.enable()
        _serve_on_ray(models, served, place, given.replicas, given.replica_cpus, given.replica_gpus)
        return
    if given.access_log:
        access.to_stderr()
    if given.traces:
        tracing.export_spans()

    def listening(http: str | None, rpc: str | None) -> None:
        scheme = "https" if given.tls_cert else "http"
        note(", ".join([f"REST on {scheme}://{http}"] * bool(http) + [f"gRPC on {rpc}"] * bool(rpc)))

    async def run() -> None:
        _allow_connections()
        repository = Repository(models, served)

        def loaded() -> None:
            names = [model.described_devices(policy.allow or ()) for model in repository.models()]
            gc.freeze()
            gc.enable()
            failed = sum(not entry.loaded for entry in repository.entries.values())
            note(f"ready: {', '.join(names) or 'no model'}" + (f"; {failed} failed" if failed else ""))
            if served.batch.max_batch > 1:
                for model in repository.models():
                    if model.unbatched_because:
                        note(f"{model.name} runs one request at a time: {model.unbatched_because}")

        await hosting.serve(repository, place, on_listening=listening, on_loaded=loaded)

    import asyncio  # 50 ms, which `rlx-ort --help` need not take

    try:
        asyncio.run(run())
    finally:
        gc.enable()


def _narrowed(policy: DevicePolicy) -> DevicePolicy:
    """Return the policy with the devices of RLX_DEVICE_CHAIN, else of RLX_DEVICE, as the only ones.

    Raises:
        NoViableDeviceError: RLX_DEVICE names a device that the other variables or options do not allow.
    """
    from rlx_ort.errors import NoViableDeviceError
    from rlx_ort.selection.policy import device_chain_from_env, device_from_env

    chain, device = device_chain_from_env(), device_from_env()
    if chain:
        return replace(policy, allow=tuple(each for each in chain if policy.allows(each))).with_prefer(chain)
    if device is None:
        return policy
    if (refusal := policy.refusal(device)) is not None:
        message = "RLX_DEVICE names a device that may not be used; change it, or give --device:"
        raise NoViableDeviceError(message, [(device, refusal)])
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

    def ready(http: str | None, rpc: str | None) -> None:
        note(f"ready: REST on {http}" + (f", gRPC on {rpc}" if rpc else ""))

    ray.run(models, served, place, ray.RayOptions(replicas, cpus, gpus), on_ready=ready)


def _allow_connections() -> None:
    """Raise the limit of open files, each connection being one, where a shell's default is low."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _OPEN_FILES)), hard))
