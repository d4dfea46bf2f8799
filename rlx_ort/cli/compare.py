"""`rlx-ort compare A [B]`: how far two models, or one model on two devices, are apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import rlx_ort
from rlx_ort.cli import options, page
from rlx_ort.cli.show import note, print_facts, print_json, print_table, progress

if TYPE_CHECKING:
    from rlx_ort.converters.bundle import ModelBundle
    from rlx_ort.parity.bisect import Divergence
    from rlx_ort.parity.compare import Comparison
    from rlx_ort.parity.metrics import Difference
    from rlx_ort.parity.opening import OrtFormatFile


@options.command("compare")
def command(
    a: Path = options.model(),
    b: Path | None = options.argument(type=options.PACKAGE, required=False),
    devices: tuple[str, ...] = options.device(
        "The device; given twice, A runs on the first and B on the second. Default: cpu.", multiple=True
    ),
    assisted: bool = options.flag("--assisted", "Let the CPU run the nodes that a device does not support."),
    inputs_path: Path | None = options.file("--inputs", "An npz file with an array for each input."),
    seed: int = options.option(
        "--seed", "The seed of the random inputs that are used without --inputs.", default=0, show_default=True
    ),
    dims: dict[str, int] = options.DIMS,
    tolerance: float | None = options.number(
        "--tolerance",
        "The largest relative L2 error that counts as equal. Default: 1e-5; 1e-3 on two different devices, "
        "5e-3 with f16 and 4e-2 with bf16 on either side.",
    ),
    with_bisect: bool = options.flag("--bisect", "If the outputs differ, find the first node that differs."),
    html: page.Page | None = page.HTML_AND_OPEN,
    as_json: bool = options.AS_JSON,
) -> None:
    """Run two models on the same inputs and print how far each output is apart.

    Without B, A is compared with itself on two devices. Exit code 8 means that they differ by more than the tolerance.
    Models run unchanged; nothing is rewritten first. A package runs with its own dims, in its precision for the device.
    """
    if len(devices) > 2:
        raise click.UsageError("--device is for A and for B, so it can be given twice")
    if b is None and len(set(devices)) < 2:
        raise click.UsageError("give a second model, or --device twice to compare A on two devices")
    from rlx_ort.deploy.names import is_package
    from rlx_ort.parity.bisect import bisect
    from rlx_ort.parity.compare import compare
    from rlx_ort.parity.metrics import Tolerance, dtypes_of, tolerance_for
    from rlx_ort.parity.opening import OrtFormatFile

    parsed = [options.permitted(name) for name in devices or ("cpu",)]
    places = (parsed[0], parsed[-1])
    chosen = rlx_ort.CompileOptions(placement=options.placement_of(not assisted))
    first = _model(a, places[0], chosen)
    second = first if b is None and not is_package(a) else _model(b or a, places[1], chosen)
    usual = tolerance_for(dtypes_of(first, second), other_device=places[0] != places[1])
    allowed = usual if tolerance is None else Tolerance(tolerance)
    types = {} if isinstance(first, OrtFormatFile) else first.input_types()
    inputs = None if inputs_path is None else options.read_inputs(inputs_path, types)
    with progress("running both"):
        comparison = compare(
            first, second, devices=places, inputs=inputs, dims=dims, tolerance=allowed, options=chosen, seed=seed
        )
    if html is not None:
        shown = comparison_document(comparison)
        page.write_comparison(html, (a, b or a), places, chosen, comparison.inputs, shown)
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
        note(f"no --inputs: using random inputs with seed {seed}" + (f"; assumed {sizes}" if sizes else ""))
    if with_bisect and unseen and not comparison.ok:
        note(f"--bisect: {unseen[0]} is in ORT format, which shows no values inside; compare the ONNX it was made from")
    if as_json:
        document: dict[str, Any] = {"a": str(a), "b": str(b or a), **comparison_document(comparison)}
        if with_bisect:
            document["bisect"] = None if divergence is None else _divergence_document(divergence)
        print_json(document)
    else:
        sides = zip(comparison.devices, comparison.placements, strict=True)
        shares = [f"{placement.requested_share:.0%} of the nodes on {label}" for label, placement in sides]
        print_facts([("A", f"{a}, {shares[0]}"), ("B", f"{b or a}, {shares[1]}"), ("tolerance", comparison.tolerance)])
        print_outputs(comparison)
        if searched:
            _print_divergence(divergence)
    if not comparison.ok:
        names = ", ".join(repr(output.name) for output in comparison.outputs if not output.ok)
        raise rlx_ort.ParityError(
            f"output {names} differs by more than the tolerance: {comparison.tolerance}", comparison
        )


def _model(path: Path, device: rlx_ort.Device, chosen: rlx_ort.CompileOptions) -> ModelBundle | OrtFormatFile:
    """Return the model of a file as it is, or that of a package as it runs on the device."""
    from rlx_ort.converters.bundle import bundle_from_graph
    from rlx_ort.deploy.names import is_package
    from rlx_ort.parity.opening import as_model

    if not is_package(path):
        with progress(f"reading {path}"):
            return as_model(path, options.trusted_links())
    graph, settings = options.read_model(path, chosen)
    return bundle_from_graph(graph, settings.on(device), str(path))


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON takes it; figures that are not finite are null."""
    return {
        "ok": comparison.ok,
        "tolerance": _picked(comparison.tolerance, "relative_l2", "cosine"),
        "inputs": {name: list(getattr(value, "shape", ())) for name, value in comparison.inputs.items()},
        "seed": comparison.seed,
        "assumed_dims": comparison.assumed,
        "devices": [
            {"device": label, "placement_share": placement.requested_share}
            for label, placement in zip(comparison.devices, comparison.placements, strict=True)
        ],
        "outputs": [
            {**_picked(output, "name", "other_name", "dtypes", "shape", "ok"), **_figures(output.found)}
            for output in comparison.outputs
        ],
    }


def _divergence_document(divergence: Divergence) -> dict[str, Any]:
    return {
        **_picked(divergence, "node", "op_type", "output", "other_node", "other_output"),
        "relative_l2_before": _finite(divergence.before),
        "causes": divergence.causes,
        "unmatched_before": divergence.between,
        "values_compared": divergence.compared,
        "only_when_optimized": divergence.optimized,
        **_figures(divergence.found),
    }


def print_outputs(comparison: Comparison) -> None:
    """Print a row of figures for each output."""
    rows = []
    for output in comparison.outputs:
        difference = output.found
        name = output.name if output.name == output.other_name else f"{output.name} = {output.other_name}"
        dtype = output.dtypes[0] if len(set(output.dtypes)) == 1 else " / ".join(output.dtypes)
        cells = [name, dtype, "x".join(map(str, output.shape)) or "scalar"]
        if difference.shapes is not None:
            cells += [f"the shape is {list(difference.shapes[1])}", "-", "-"]
        elif difference.nonfinite:
            cells += [f"{difference.nonfinite} not finite on one side", "-", "-"]
        else:
            cells += [f"{difference.max_abs:.3g}", f"{difference.relative_l2:.3g}", f"{difference.cosine:.7f}"]
        if difference.differing:
            cells[-1] += f" ({difference.differing} of {difference.elements} differ)"
        rows.append([*cells, "ok" if output.ok else "DIFFERS"])
    print_table(("output", "dtype", "shape", "max abs", "relative L2", "cosine", ""), rows)


def _print_divergence(divergence: Divergence | None) -> None:
    if divergence is None:
        print_facts([("first node that differs", "none: every value inside is within the tolerance")])
        return
    facts: list[tuple[str, object]] = [
        ("first node that differs", f"{divergence.node} ({divergence.op_type})"),
        ("its output", divergence.output),
    ]
    if (divergence.other_node, divergence.other_output) != (divergence.node, divergence.output):
        facts.append(("in the other model", f"{divergence.other_node}, output {divergence.other_output}"))
    before = "" if divergence.found.shapes is not None else f"; relative L2 {divergence.before:.3g} before it"
    facts.append(("difference", f"{divergence.found}{before}"))
    facts += [("cause", cause) for cause in divergence.causes] or [("cause", "same operator, attributes and weights")]
    if divergence.between:
        shown = ", ".join(divergence.between[:5]) + (", ..." if len(divergence.between) > 5 else "")
        facts.append(("or one of", f"{shown}, which have no counterpart in the other model"))
    if divergence.optimized:
        facts.append(("seen only", "when ONNX Runtime optimises the models: each node by itself agrees"))
    facts.append(("values compared", divergence.compared))
    print_facts(facts)


def _figures(difference: Difference) -> dict[str, Any]:
    return {
        **{name: _finite(getattr(difference, name)) for name in ("max_abs", "relative_l2", "cosine")},
        **_picked(difference, "nonfinite", "differing", "elements", "shapes"),
    }


def _picked(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
