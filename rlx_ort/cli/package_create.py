"""`rlx-ort package create MODEL -o OUT`."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.options import read_model
from rlx_ort.cli.show import binary_size, counted, emit, note, print_facts
from rlx_ort.storage import read_regular

if TYPE_CHECKING:
    from rlx_ort.options.compile_options import Precision
    from rlx_ort.selection.policy import DevicePolicy


def _precisions(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Precision]:
    """Return device label -> precision of texts such as `cuda:f16`."""
    from rlx_ort.device import parse_device
    from rlx_ort.options.compile_options import Precision

    precisions: dict[str, Precision] = {}
    for text in values:
        device, colon, precision = text.rpartition(":")
        if not colon or precision not in [item.value for item in Precision]:
            known = ", ".join(item.value for item in Precision)
            raise click.BadParameter(f"{text!r} is not DEVICE:PRECISION with one of {known}", ctx, param)
        label = parse_device(device).label
        if label in precisions:
            raise click.BadParameter(f"{label} is given twice", ctx, param)
        precisions[label] = Precision(precision)
    return precisions


def _pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise click.BadParameter(f"{text!r} is not KEY=TEXT", ctx, param)
        if pairs.setdefault(key, value) != value:
            raise click.BadParameter(f"{key!r} is given twice, as {pairs[key]!r} and {value!r}", ctx, param)
    return pairs


def _numbers(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    try:
        return {key: float(value) for key, value in _pairs(ctx, param, values).items()}
    except ValueError as err:
        raise click.BadParameter(f"{err}; it is PRECISION=NUMBER, as in f16=0.02", ctx, param) from err


def _buckets(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[str, tuple[tuple[int, int], ...]] | None:
    """Return the dim and the half-open ranges of a text such as `tokens=1:65,65:257`."""
    if value is None:
        return None
    dim, _, text = value.partition("=")
    pairs = [part.split(":") for part in text.split(",")]
    if not dim or not all(len(pair) == 2 and all(end.isascii() and end.isdigit() for end in pair) for pair in pairs):
        raise click.BadParameter(f"{value!r} is not DIM=FROM:TO,..., as in tokens=1:65,65:257", ctx, param)
    return dim, tuple((int(first), int(last)) for first, last in pairs)


@click.command("create")
@options.model
@click.option("-o", "--output", "target", required=True, type=click.Path(path_type=Path), help="The package to write.")
@click.option("--folder", is_flag=True, help="Write a folder; the default is one file.")
@click.option("--force", is_flag=True, help="Replace the file if it exists. A folder is never replaced.")
@click.option("--name", default="", help="The package's name; the model's by default.")
@click.option("--version", default="", metavar="TEXT", help="The package's version.")
@click.option("--serial", default=0, type=click.IntRange(min=0), help="A number that grows with each release.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="DEVICE:PRECISION",
    callback=_precisions,
    help="Give a device its own weights in a precision, as in cuda:f16; may be repeated. Default: cpu:f32.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    metavar="DEVICE:PRECISION",
    callback=_precisions,
    help="Run in a precision on a device, with weights that are rounded when they are loaded; may be repeated.",
)
@click.option("--golden", type=options.FILE, multiple=True, help="An npz file with inputs whose outputs are kept.")
@click.option(
    "--expected",
    type=options.FILE,
    multiple=True,
    help="An npz file with the outputs for the --golden of the same place; by default the CPU computes them.",
)
@click.option(
    "--tolerance",
    "tolerances",
    multiple=True,
    metavar="PRECISION=NUMBER",
    callback=_numbers,
    help="The largest error of golden outputs in a precision, relative to the largest value, as in f16=0.02.",
)
@click.option("--verify-on-first-use", is_flag=True, help="Run the golden inputs on each new machine.")
@options.policy(from_env=False)  # the variables of this machine are no part of a package
@click.option(
    "--policy",
    "strategy",
    type=click.Choice(["cost-model", "benchmark", "adaptive"]),
    default="cost-model",
    help="How a device is chosen.",
)
@options.dims
@click.option(
    "--buckets",
    metavar="DIM=FROM:TO,...",
    callback=_buckets,
    help="Ranges of lengths of a named dim that share a compiled graph, ends not included, as in tokens=1:65,65:257.",
)
@click.option("--license", "license_id", default="", metavar="SPDX", help="The licence, as in Apache-2.0.")
@click.option("--license-file", type=options.FILE, help="A file with the licence's text, to be packed.")
@click.option(
    "--provenance",
    multiple=True,
    metavar="KEY=TEXT",
    callback=_pairs,
    help="Where the model comes from; may be repeated.",
)
@click.option(
    "--require",
    multiple=True,
    metavar="NAME=VERSION",
    callback=_pairs,
    help="The lowest version of rlx_ort or onnxruntime, as in onnxruntime=1.31; may be repeated.",
)
@options.as_json
def create(
    model: Path,
    target: Path,
    folder: bool,
    force: bool,
    strategy: str,
    policy: DevicePolicy,
    golden: tuple[Path, ...],
    expected: tuple[Path, ...],
    license_id: str,
    license_file: Path | None,
    require: dict[str, str],
    as_json: bool,
    **rest: Any,
) -> None:
    """Pack a model with its weights, policy and golden outputs.

    The package appears complete or not at all, and the same model and options give the same bytes.
    """
    from rlx_ort.cli.arrays import read_npz, to_model_types
    from rlx_ort.deploy.create import Recipe, create_package
    from rlx_ort.deploy.names import is_package
    from rlx_ort.selection.policy import Adaptive, Benchmark, CostModel

    if len(expected) > len(golden):
        raise click.UsageError("each --expected belongs to a --golden")
    graph = read_model(model, rest["dims"])
    cases = [
        (to_model_types(read_npz(inputs), graph.inputs), None if outputs is None else read_npz(outputs))
        for inputs, outputs in zip_longest(golden, expected)
    ]
    picks = {"cost-model": CostModel(), "benchmark": Benchmark(5), "adaptive": Adaptive()}
    if not rest["variants"]:
        del rest["variants"]  # the recipe has a default
    recipe = Recipe(
        **rest,
        policy=replace(policy, pick=picks[strategy]),
        golden=cases,
        license=license_id,
        license_text="" if license_file is None else read_regular(license_file).decode("utf-8"),
        requires=require,
    )
    with counted(f"packing {target}") as progress:
        digest = create_package(graph, target, recipe, folder=folder, force=force, progress=progress)
    size = sum(file.stat().st_size for file in ([target] if target.is_file() else target.rglob("*")) if file.is_file())
    document = {"package": str(target), "sha256": digest, "bytes": size, "golden_cases": len(cases)}
    facts = [("written", target), ("size", binary_size(size)), ("sha256", digest), ("golden cases", len(cases))]
    emit(document, as_json, lambda document: print_facts(facts))
    if is_package(model):
        note(f"of {model} the graph and its weights were taken, not its settings and golden cases: give them again")
    if not cases:
        note("no --golden: `package verify` and the check at first use have nothing to compare")
