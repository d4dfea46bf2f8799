"""How far outputs are apart, as JSON and as a table, for `convert` and `compare`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlx_ort.cli.show import print_facts, print_table

if TYPE_CHECKING:
    from rlx_ort.parity.bisect import Divergence
    from rlx_ort.parity.compare import Comparison
    from rlx_ort.parity.metrics import Difference, Tolerance

__all__ = ["comparison_document", "divergence_document", "print_divergence", "print_outputs", "tolerance_of"]


def tolerance_of(relative: float | None) -> Tolerance | None:
    """Return the tolerance of `--tolerance`, None if it is not given."""
    from rlx_ort.parity.metrics import Tolerance

    return None if relative is None else Tolerance(relative)


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON takes it; figures that are not finite are null."""
    return {
        "ok": comparison.ok,
        "tolerance": {"relative_l2": comparison.tolerance.relative_l2, "cosine": comparison.tolerance.cosine},
        "inputs": {name: list(getattr(value, "shape", ())) for name, value in comparison.inputs.items()},
        "seed": comparison.seed,
        "assumed_dims": dict(comparison.assumed),
        "devices": [
            {"device": label, "placement_share": placement.requested_share}
            for label, placement in zip(comparison.devices, comparison.placements, strict=True)
        ],
        "outputs": [
            {
                "name": output.name,
                "other_name": output.other_name,
                "dtypes": list(output.dtypes),
                "shape": list(output.shape),
                "ok": output.ok,
                **_figures(output.found),
            }
            for output in comparison.outputs
        ],
    }


def divergence_document(divergence: Divergence | None) -> dict[str, Any] | None:
    """Return what a bisection found as JSON takes it."""
    if divergence is None:
        return None
    return {
        "node": divergence.node,
        "op_type": divergence.op_type,
        "output": divergence.output,
        "other_node": divergence.other_node,
        "other_output": divergence.other_output,
        "relative_l2_before": _finite(divergence.before),
        "causes": list(divergence.causes),
        "unmatched_before": list(divergence.between),
        "values_compared": divergence.compared,
        "only_when_optimized": divergence.optimized,
        **_figures(divergence.found),
    }


def print_outputs(comparison: Comparison) -> None:
    """Print a row of figures for each output."""
    rows = []
    for output in comparison.outputs:
        found = output.found
        name = output.name if output.name == output.other_name else f"{output.name} = {output.other_name}"
        dtype = output.dtypes[0] if len(set(output.dtypes)) == 1 else " / ".join(output.dtypes)
        cells = [name, dtype, "x".join(map(str, output.shape)) or "scalar"]
        if found.shapes is not None:
            cells += [f"the shape is {list(found.shapes[1])}", "-", "-"]
        elif found.nonfinite:
            cells += [f"{found.nonfinite} not finite on one side", "-", "-"]
        else:
            cells += [f"{found.max_abs:.3g}", f"{found.relative_l2:.3g}", f"{found.cosine:.7f}"]
        if found.differing:
            cells[-1] += f" ({found.differing} of {found.elements} differ)"
        rows.append([*cells, "ok" if output.ok else "DIFFERS"])
    print_table(("output", "dtype", "shape", "max abs", "relative L2", "cosine", ""), rows)


def print_divergence(divergence: Divergence | None) -> None:
    """Print the first node that differs, and why if that is known."""
    if divergence is None:
        print_facts([("first node that differs", "none: every value inside is within the tolerance")])
        return
    found = divergence.found
    facts: list[tuple[str, object]] = [
        ("first node that differs", f"{divergence.node} ({divergence.op_type})"),
        ("its output", divergence.output),
    ]
    if (divergence.other_node, divergence.other_output) != (divergence.node, divergence.output):
        facts.append(("in the other model", f"{divergence.other_node}, output {divergence.other_output}"))
    if found.shapes is not None:
        facts.append(("difference", f"shape {list(found.shapes[0])} against {list(found.shapes[1])}"))
    else:
        figures = f"relative L2 {found.relative_l2:.3g}, max abs {found.max_abs:.3g}, {divergence.before:.3g} before it"
        facts.append(("difference", figures))
    facts += [("cause", cause) for cause in divergence.causes] or [("cause", "same operator, attributes and weights")]
    if divergence.between:
        shown = ", ".join(divergence.between[:5]) + (", ..." if len(divergence.between) > 5 else "")
        facts.append(("or one of", f"{shown}, which have no counterpart in the other model"))
    if divergence.optimized:
        facts.append(("seen only", "when ONNX Runtime optimises the models: each node by itself agrees"))
    facts.append(("values compared", divergence.compared))
    print_facts(facts)


def _figures(found: Difference) -> dict[str, Any]:
    return {
        **{name: _finite(getattr(found, name)) for name in ("max_abs", "relative_l2", "cosine")},
        **{name: getattr(found, name) for name in ("nonfinite", "differing", "elements")},
        "shapes": None if found.shapes is None else [list(shape) for shape in found.shapes],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
