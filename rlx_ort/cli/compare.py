"""`rlx-ort compare A [B]`: how far two models, or one model on two devices, are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.parity import comparison_document, divergence_document, print_divergence, print_outputs, tolerance_of
from rlx_ort.cli.show import note, print_facts, print_json, progress
from rlx_ort.errors import ParityError

__all__ = ["command"]


@click.command("compare")
@click.argument("a", type=options.FILE)
@click.argument("b", type=options.FILE, required=False)
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="DEVICE",
    help="Where to run; give it twice for A on the first and B on the second. Default: cpu.",
)
@click.option("--assisted", is_flag=True, help="Let the CPU run what a device does not take.")
@click.option("--inputs", "inputs_path", type=options.FILE, help="An npz file with an array for each input.")
@click.option("--seed", default=0, show_default=True, help="Of the random inputs that are made up without --inputs.")
@options.dims
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="The largest relative L2 error that counts as equal. Default: 1e-5; 1e-3 on two different devices, "
    "5e-3 with f16 and 4e-2 with bf16 on either side.",
)
@click.option("--bisect", "with_bisect", is_flag=True, help="If they differ, name the first node that does.")
@options.as_json
def command(
    a: Path,
    b: Path | None,
    devices: tuple[str, ...],
    assisted: bool,
    inputs_path: Path | None,
    seed: int,
    dims: dict[str, int],
    tolerance: float | None,
    with_bisect: bool,
    as_json: bool,
) -> None:
    """Run two models on the same inputs and print how far each output is apart.

    Without B, A is compared with itself on two devices. Exit code 8 means that they differ by more than the tolerance.
    Models run unchanged; nothing is rewritten first.
    """
    if len(devices) > 2:
        raise click.UsageError("--device is for A and for B, so it can be given twice")
    if b is None and len(set(devices)) < 2:
        raise click.UsageError("give a second model, or --device twice to compare A on two devices")
    from rlx_ort.device import parse_device
    from rlx_ort.options.compile_options import CompileOptions, PlacementRule
    from rlx_ort.parity.bisect import bisect
    from rlx_ort.parity.compare import compare
    from rlx_ort.parity.metrics import dtypes_of, tolerance_for
    from rlx_ort.parity.opening import OrtFormatFile, as_model

    parsed = [parse_device(name) for name in devices or ("cpu",)]
    places = (parsed[0], parsed[-1])
    chosen = CompileOptions(placement=PlacementRule.ASSISTED if assisted else PlacementRule.STRICT)
    with progress(f"reading {a}"):
        first = as_model(a)
        second = first if b is None else as_model(b)
    allowed = tolerance_of(tolerance) or tolerance_for(dtypes_of(first, second), other_device=places[0] != places[1])
    inputs = _inputs(inputs_path, first)
    with progress("running both"):
        comparison = compare(
            first, second, devices=places, inputs=inputs, dims=dims, tolerance=allowed, options=chosen, seed=seed
        )
    divergence = None
    unseen = [str(model.path) for model in (first, second) if isinstance(model, OrtFormatFile)]
    searched = with_bisect and not comparison.ok and not unseen
    if searched:
        with progress("looking for the first node that differs"):
            divergence = bisect(
                first, second, comparison.inputs, devices=places, tolerance=comparison.tolerance, options=chosen
            )
    if inputs is None:
        sizes = ", ".join(f"{name}={size}" for name, size in comparison.assumed.items())
        note(f"no --inputs: random ones with seed {seed}" + (f"; assumed {sizes}" if sizes else ""))
    if with_bisect and unseen and not comparison.ok:
        note(f"--bisect: {unseen[0]} is in ORT format, which shows no values inside; compare the ONNX it was made from")
    if as_json:
        document: dict[str, Any] = {"a": str(a), "b": str(b or a), **comparison_document(comparison)}
        if with_bisect:
            document["bisect"] = divergence_document(divergence)
        print_json(document)
    else:
        sides = zip(comparison.devices, comparison.placements, strict=True)
        shares = [f"{placement.requested_share:.0%} of the nodes on {label}" for label, placement in sides]
        print_facts([("A", f"{a}, {shares[0]}"), ("B", f"{b or a}, {shares[1]}"), ("tolerance", comparison.tolerance)])
        print_outputs(comparison)
        if searched:
            print_divergence(divergence)
    if not comparison.ok:
        names = ", ".join(repr(output.name) for output in comparison.outputs if not output.ok)
        raise ParityError(f"output {names} differs by more than was allowed: {comparison.tolerance}", comparison)


def _inputs(path: Path | None, model: Any) -> dict[str, Any] | None:
    """Return the arrays of an npz file, in the types of the model where npz has no such type."""
    if path is None:
        return None
    from rlx_ort.cli.arrays import read_npz, to_declared_types

    types = model.input_types() if hasattr(model, "input_types") else {}
    return to_declared_types(read_npz(path), types)
