"""`rlx-ort package run PACKAGE`: run a packaged model once, under its own policy, and say where it ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.packages import shared
from rlx_ort.cli.show import note, print_facts, print_json, print_table, progress

__all__ = ["command"]


@click.command("run")
@shared.package
@shared.key
@shared.sha256
@shared.min_serial
@click.option(
    "--inputs",
    "inputs_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An npz file with an array for each input; without it, the first golden case, or random inputs.",
)
@click.option(
    "--outputs",
    "outputs_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the outputs to this npz file.",
)
@click.option("--device", metavar="DEVICE", help="Run on this device, or fail.")
@options.only
@options.deny
@options.prefer
@options.dims
@options.as_json
def command(
    package: Path,
    key: Path | None,
    sha256: str | None,
    min_serial: int,
    inputs_path: Path | None,
    outputs_path: Path | None,
    device: str | None,
    only: str | None,
    deny: str | None,
    prefer: str | None,
    dims: dict[str, int],
    as_json: bool,
) -> None:
    """Run a packaged model once.

    The package's policy holds, narrowed by the options and the RLX_* variables. On a machine that has not run the
    golden cases they are run first, if the package asks for it.
    """
    from rlx_ort.cli.arrays import write_npz
    from rlx_ort.deploy.golden import admit_devices
    from rlx_ort.deploy.open import narrowed_policy, runner_of
    from rlx_ort.deploy.package import Package
    from rlx_ort.options.compile_options import CompileOptions

    with Package(package, key=key, sha256=sha256, min_serial=min_serial) as opened:
        policy = narrowed_policy(opened.index.policy, options.policy_of(only, deny, prefer))
        with runner_of(opened, policy, CompileOptions(dims=dims)) as runner, progress("running"):
            if opened.index.verify_on_first_use:
                admit_devices(opened, runner)
            feeds, origin = _feeds(opened, runner.graph, inputs_path, dims)
            refused = dict(runner.last_attempts)
            compiled = runner.compile_resolved_with_inputs(feeds, device)
            refused |= dict(runner.last_attempts)
            results = dict(zip(compiled.output_specs, compiled.run(feeds), strict=True))
            share = compiled.placement.requested_share
    arrays = {name: array for name, array in results.items() if hasattr(array, "dtype")}
    if outputs_path is not None:
        write_npz(outputs_path, arrays)
    document: dict[str, Any] = {
        "package": str(package),
        "device": compiled.device.label,
        "precision": runner.options.on(compiled.device).precision.value,
        "share": share,
        "refused": [{"device": tried.label, "reason": reason} for tried, reason in refused.items()],
        "inputs": origin,
        "outputs": [{"name": name, "dtype": str(a.dtype), "shape": list(a.shape)} for name, a in arrays.items()],
        "outputs_file": None if outputs_path is None else str(outputs_path),
    }
    if as_json:
        print_json(document)
        return
    for row in document["refused"]:
        note(f"{row['device']} refused: {row['reason']}")
    print_facts([("ran on", f"{document['device']} in {document['precision']}"), ("placement", f"{share:.0%} on it")])
    print_table(
        ("output", "dtype", "shape"), [(row["name"], row["dtype"], row["shape"]) for row in document["outputs"]]
    )


def _feeds(package: Any, graph: Any, path: Path | None, dims: dict[str, int]) -> tuple[dict[str, Any], str]:
    """Return the inputs, and what to say of where they come from."""
    from rlx_ort.cli.arrays import made_up_inputs, read_npz, to_model_types

    if path is not None:
        return to_model_types(read_npz(path), graph.inputs), str(path)
    if package.cases:
        return package.arrays(package.cases[0].inputs), "golden case 0"
    note("no --inputs and no golden case: made up random inputs")
    return made_up_inputs(graph.inputs, {**package.index.dims, **dims}, 0), "random"
