"""`rlx-ort package ...`: a model, its weights and its expected outputs, in one file that is checked before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import rlx_ort
from rlx_ort.cli import Commands, options
from rlx_ort.cli.run import print_run, refusals, written
from rlx_ort.cli.show import binary_size, counted, duration, emit, note, print_digests, print_table, progress

if TYPE_CHECKING:
    from rlx_ort.deploy.open import WarmedDevice
    from rlx_ort.deploy.package import Package

_NAMES = ("create", "inspect", "verify", "run", "extract", "diff", "sign", "warm", "export")
_FILES = dict.fromkeys(("inspect", "verify", "diff"), "package_check") | {"create": "package_create"}


@click.group(
    "package", cls=Commands, where={name: f"rlx_ort.cli.{_FILES.get(name, 'package')}:{name}" for name in _NAMES}
)
def command() -> None:
    """Make, check and run model packages.

    A package is a folder NAME.ortpackage, or the same as one file, which is read in place.
    """


@options.command("run")
def run(
    package: Package = options.OPEN_PACKAGE,
    inputs: Path | None = options.inputs("the first golden case, or random inputs"),
    outputs: Path | None = options.OUTPUTS,
    device: str | None = options.device("Run on this device, or fail."),
    policy: rlx_ort.DevicePolicy = options.policy(),
    dims: dict[str, int] = options.DIMS,
    as_json: bool = options.AS_JSON,
) -> None:
    """Run a packaged model once.

    The package's policy holds, narrowed by the options and the RLX_* variables. On a machine that has not run the
    golden cases they are run first, if the package asks for it.
    """
    from rlx_ort.deploy.golden import admit_devices
    from rlx_ort.deploy.open import narrowed_policy, runner_of
    from rlx_ort.providers.engine.compiled.models import watched

    allowed = narrowed_policy(package.index.policy, policy)
    with runner_of(package, allowed, rlx_ort.CompileOptions(dims=dims)) as runner, progress("running"):
        if package.index.verify_on_first_use:
            admit_devices(package, runner)
        feeds, origin = _feeds(package, runner.graph, inputs, dims)
        refused = dict(runner.last_attempts)
        with watched() as from_cache:
            compiled = runner.compile_resolved_with_inputs(feeds, device)
        refused |= dict(runner.last_attempts)
        results = dict(zip(compiled.output_specs, compiled.run(feeds), strict=True))
        share = compiled.placement.requested_share
    if from_cache:
        with progress(f"reading {package.path}"):
            package.copy.check()  # the session came from the cache, so the package's weights were not read
    document: dict[str, Any] = {
        "package": str(package.path),
        "device": compiled.device.label,
        "precision": runner.options.on(compiled.device).precision.value,
        "share": share,
        "weights": "compile cache" if from_cache else "package",
        **refusals(refused.items()),
        "inputs": origin,
        **written(results, outputs),
    }
    facts = [("ran on", f"{document['device']} in {document['precision']}"), ("placement", f"{share:.0%} on it")]
    if from_cache:
        facts.append(("weights", "entries of the compile cache; the keys of a package work as well"))
    emit(document, as_json, lambda document: print_run(document, facts))


def _feeds(
    package: Package, graph: rlx_ort.Graph, path: Path | None, dims: dict[str, int]
) -> tuple[Mapping[str, Any], str]:
    """Return the inputs, and where they come from."""
    if path is not None:
        return options.read_inputs(path, graph.input_types), str(path)
    if package.cases:
        return package.arrays(package.cases[0].inputs), "golden case 0"
    feeds, assumed = options.random_inputs(graph, {**package.index.dims, **dims})
    note("no --inputs and no golden case: random inputs are used")
    options.note_assumed("run", assumed)
    return feeds, "random"


@options.command("extract")
def extract(
    package: Package = options.OPEN_PACKAGE,
    target: Path = options.option("-o --output", "Where to write it.", type=click.Path(path_type=Path), required=True),
    as_file: bool = options.flag("--file", "Write one file; the default is a folder."),
    force: bool = options.flag("--force", "Replace the file if it exists. A folder is never replaced."),
    as_json: bool = options.AS_JSON,
) -> None:
    """Write a package in the other form, every byte checked before; a signature stays valid.

    Nothing needs to be extracted to run a package: its file is read in place.
    """
    from rlx_ort.deploy.write import write_package

    with counted(f"writing {target}", package.index.total_bytes) as step:
        package.check_all()
        write_package(target, package.contents(), folder=not as_file, overwrite=force, progress=step)
    emit({"package": str(target), "sha256": package.sha256, "files": len(package.names)}, as_json)
    note(f"wrote {target}")


@options.command("sign")
def sign(
    package: Path = options.argument(type=options.PACKAGE),
    key: Path = options.file("--key", "A PEM file with an EC private key (P-256, P-384 or P-521).", required=True),
    password_env: str | None = options.option(
        "--password-env", "The environment variable that holds the key's password.", metavar="NAME"
    ),
    as_json: bool = options.AS_JSON,
) -> None:
    """Check every byte of a package and sign it.

    Needs the extra `sign`; works offline. A signature that is there is replaced.
    """
    import os

    from rlx_ort.deploy.package import Package, sign_package

    password = None if password_env is None else os.environ.get(password_env)
    if password_env is not None and not password:
        raise click.UsageError(f"the variable {password_env} is not set")
    with Package(package) as opened, progress(f"signing {package}"):
        sign_package(opened, key, password)
        digest = opened.sha256
    emit({"package": str(package), "sha256": digest, "signed": True}, as_json)
    note(f"signed {package}; verify it with: rlx-ort package verify {package} --key PUBLIC_KEY")


@options.command("warm")
def warm(
    package: Package = options.OPEN_PACKAGE,
    devices: str | None = options.devices(
        "--device --devices", "Warm for these devices, such as cpu,cuda. Default: all that are allowed."
    ),
    as_json: bool = options.AS_JSON,
) -> None:
    """Compile a package ahead of its first run.

    Writes optimised models and the kernels that providers compile to the compile cache, where sessions that are opened
    later find them. `rlx-ort cache list` shows them. The exit code is 1 when nothing was kept for some device, and 3
    when it does not work here.
    """
    from rlx_ort.deploy.open import warm_opened

    chosen = None if devices is None else options.each_once(rlx_ort.parse_device_list(devices), package)
    with progress(f"warming {package.path}"):
        rows = warm_opened(package, chosen)
    document = {"package": str(package.path), "devices": [asdict(row) for row in rows]}
    emit(document, as_json, lambda document: _print_warmed(rows))
    failed = [row.device for row in rows if row.problem]
    if failed or not rows:
        click.get_current_context().exit(1 if all(map(rlx_ort.is_available, failed)) else 3)


def _print_warmed(rows: list[WarmedDevice]) -> None:
    table = []
    for row in rows:
        size = binary_size(row.nbytes) if row.entry else "-"
        table.append((row.device, size, duration(row.seconds * 1e9), "yes" if row.starts else "no"))
    print_table(("device", "kept", "time", "starts from it"), table)
    print_digests([(row.entry, row.device) for row in rows if row.entry])
    for row in rows:
        if row.problem:
            note(f"{row.device}: {row.problem}")


@options.command("export")
def export(
    package: Package = options.OPEN_PACKAGE,
    target: Path = options.argument(metavar="DIR", type=click.Path(file_okay=False, path_type=Path)),
    form: str = options.choice("--format", "What to write.", "triton onnx", required=True),
    name: str | None = options.option("--name", "The model's name; that of the package by default."),
    max_batch: int = options.whole("--max-batch", "Triton: the largest batch; 0 turns batching off.", default=8),
    instances: int = options.whole("--instances", "Triton: instances on each processor.", least=1, default=1),
    kind: str = options.choice("--kind", "Triton: which processors.", "auto cpu gpu", default="auto"),
    unproven: bool = options.flag(
        "--batch-unproven",
        "Triton: batch requests even if rows are not proved independent; rows may then change each other's results.",
    ),
    force: bool = options.flag("--force", "Replace an existing target."),
    as_json: bool = options.AS_JSON,
) -> None:
    """Write the model of a package for another server or tool, every byte of it checked before.

    `triton` makes a model of a Triton repository, with config.pbtxt and the weights once; docs/triton.md has what was
    tested. `onnx` makes NAME.onnx and NAME.onnx.data. The policy, golden cases and signature stay behind.
    """
    from rlx_ort.deploy.names import check_model_name
    from rlx_ort.deploy.open import runner_of
    from rlx_ort.deploy.triton import batching, export_triton

    called = name or package.index.name
    check_model_name(called)
    dim, why = None, ""
    with progress(f"writing {target}"), runner_of(package) as runner:
        package.check_all()
        graph, given = runner.graph, runner.options
        if form == "triton":
            made = export_triton(
                graph,
                target,
                called,
                max_batch=max_batch,
                instances=instances,
                kind=kind,
                options=given,
                overwrite=force,
                batch_unproven=unproven,
            )
            if max_batch:
                dim, why = batching(graph, given, unproven=unproven)
        else:
            made = target / f"{called}.onnx"
            try:
                target.mkdir(parents=True, exist_ok=True)
            except OSError as err:
                raise rlx_ort.WriteError(f"{target} cannot be written: {err.strerror}; check its rights") from err
            rlx_ort.save_onnx(graph, made, external_data=bool(graph.params), overwrite=force, options=given)
    document = {"written": str(made), "format": form, "batched_along": dim}
    emit({**document, "not_batched": why} if why else document, as_json)
    note(f"wrote {made}")
    if form == "triton":
        note(f"requests are batched along {dim!r}" if dim else f"requests are not batched{why and f': {why}'}")
