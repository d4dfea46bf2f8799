"""`rlx-ort package run PACKAGE`: run a packaged model once, under its own policy, and print where it ran."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.run import print_run, refusals, written
from rlx_ort.cli.show import emit, note, progress

if TYPE_CHECKING:
    from rlx_ort.deploy.package import Package
    from rlx_ort.ir.graph import Graph
    from rlx_ort.selection.policy import DevicePolicy


@click.command("run")
@options.package
@options.run_once("the first golden case, or random inputs")
def command(
    package: Package,
    inputs_path: Path | None,
    outputs_path: Path | None,
    device: str | None,
    policy: DevicePolicy,
    dims: dict[str, int],
    as_json: bool,
) -> None:
    """Run a packaged model once.

    The package's policy holds, narrowed by the options and the RLX_* variables. On a machine that has not run the
    golden cases they are run first, if the package asks for it.
    """
    from rlx_ort.deploy.golden import admit_devices
    from rlx_ort.deploy.open import narrowed_policy, runner_of
    from rlx_ort.options.compile_options import CompileOptions

    allowed = narrowed_policy(package.index.policy, policy)
    with runner_of(package, allowed, CompileOptions(dims=dims)) as runner, progress("running"):
        if package.index.verify_on_first_use:
            admit_devices(package, runner)
        feeds, origin = _feeds(package, runner.graph, inputs_path, dims)
        refused = dict(runner.last_attempts)
        compiled = runner.compile_resolved_with_inputs(feeds, device)
        refused |= dict(runner.last_attempts)
        results = dict(zip(compiled.output_specs, compiled.run(feeds), strict=True))
        share = compiled.placement.requested_share
    document: dict[str, Any] = {
        "package": str(package.path),
        "device": compiled.device.label,
        "precision": runner.options.on(compiled.device).precision.value,
        "share": share,
        **refusals(refused.items()),
        "inputs": origin,
        **written(results, outputs_path),
    }
    facts = [("ran on", f"{document['device']} in {document['precision']}"), ("placement", f"{share:.0%} on it")]
    emit(document, as_json, lambda document: print_run(document, facts))


def _feeds(package: Package, graph: Graph, path: Path | None, dims: dict[str, int]) -> tuple[dict[str, Any], str]:
    """Return the inputs, and where they come from."""
    from rlx_ort.cli.arrays import made_up_inputs, read_npz, to_model_types

    if path is not None:
        return to_model_types(read_npz(path), graph.inputs), str(path)
    if package.cases:
        return package.arrays(package.cases[0].inputs), "golden case 0"
    note("no --inputs and no golden case: made up random inputs")
    return made_up_inputs(graph.inputs, {**package.index.dims, **dims}, 0), "random"
