"""`rlx-ort package create MODEL -o OUT`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

import rlx_ort
from rlx_ort.cli import options, split
from rlx_ort.cli.show import binary_size, counted, emit, note, print_facts
from rlx_ort.storage import read_regular

_PAIR = "([^=]+)=(.*)"


def _precisions(names: str, help: str) -> Any:
    """Return the row of an option such as `cuda:f16`, whose value has a precision for the label of each device."""
    return options.mapping(
        *(names, help, "DEVICE:PRECISION", "(.+):(.+)", "cuda:f16"),
        read=lambda text: rlx_ort.Precision(text),
        name_of=lambda name: rlx_ort.parse_device(name).label,
    )


def _precision_name(text: str) -> str:
    """Return the name of a precision that indexes have; others stay, and are refused with the known ones."""
    with contextlib.suppress(ValueError):
        return rlx_ort.Precision(text).value
    return text


def _buckets(value: str | None) -> tuple[str, tuple[tuple[int, int], ...]] | None:
    """Return the dim and the half-open ranges of a text such as `tokens=1:65,65:257`."""
    if value is None:
        return None
    dim, _, text = value.partition("=")
    pairs = [part.split(":") for part in text.split(",")]
    if not dim or not all(len(pair) == 2 and all(end.isascii() and end.isdigit() for end in pair) for pair in pairs):
        raise click.BadParameter(f"{value!r} is not DIM=FROM:TO,..., as in tokens=1:65,65:257")
    return dim, tuple((int(first), int(last)) for first, last in pairs)


_SETTINGS: dict[str, Any] = {
    "name": options.option("--name", "The package's name; the model's by default.", default=""),
    "version": options.option("--version", "The package's version.", default="", metavar="TEXT"),
    "serial": options.whole("--serial", "A number that grows with each release.", default=0),
    "variants": _precisions(
        "--variant", "Give a device its own weights in a precision, as in cuda:f16; may be repeated. Default: cpu:f32."
    ),
    "precisions": _precisions(
        "--precision",
        "Run in a precision on a device, with weights that are rounded when they are loaded; may be repeated.",
    ),
    "golden": options.file(
        "--golden", "An npz file with the inputs of a golden case, whose outputs are stored.", multiple=True
    ),
    "expected": options.file(
        "--expected",
        "An npz file with the expected outputs of the --golden at the same position. Default: the CPU computes them.",
        multiple=True,
    ),
    "tolerances": options.mapping(
        "--tolerance",
        "The largest error of golden outputs in a precision, relative to the largest value, as in f16=0.02.",
        *("PRECISION=NUMBER", _PAIR, "f16=0.02", float),
        name_of=_precision_name,
    ),
    "verify_on_first_use": options.flag("--verify-on-first-use", "Run the golden inputs on each new machine."),
    "policy": options.policy(from_env=False),  # the variables of this machine are no part of a package
    "strategy": options.choice(
        "--policy", "How a device is chosen.", "cost-model benchmark adaptive", default="cost-model"
    ),
    "dims": options.DIMS,
    "buckets": options.option(
        "--buckets",
        "Ranges of lengths of a named dim that share a compiled graph, ends not included, as in tokens=1:65,65:257.",
        metavar="DIM=FROM:TO,...",
        read=_buckets,
    ),
    "license": options.option("--license", "The licence, as in Apache-2.0.", default="", metavar="SPDX"),
    "license_file": options.file("--license-file", "A file with the licence's text, to be packed."),
    "provenance": options.mapping(
        *("--provenance", "Where the model comes from; may be repeated.", "KEY=TEXT", _PAIR, "author=somebody")
    ),
    "requires": options.mapping(
        "--require",
        "The lowest version of rlx_ort or onnxruntime, as in onnxruntime=1.31; may be repeated.",
        *("NAME=VERSION", _PAIR, "onnxruntime=1.31"),
    ),
    "as_json": options.AS_JSON,
}
"""The options, of which most are fields of `Recipe`."""


@options.command("create", rows=_SETTINGS)
def create(
    model: Path = options.model(),
    target: Path = options.option(
        "-o --output", "The package to write.", type=click.Path(path_type=Path), required=True
    ),
    folder: bool = options.flag("--folder", "Write a folder; the default is one file."),
    force: bool = options.flag("--force", "Replace the file if it exists. A folder is never replaced."),
    tuned: bool = options.flag("--tuned", "Pack the variants that `rlx-ort tune` chose for the model on this machine."),
    plan: Any = options.option(
        "--split", "Pack a plan of `rlx-ort split`, for machines whose devices have its budgets.", metavar="PLAN"
    ),
    **given: Any,
) -> None:
    """Pack a model with its weights, policy and golden outputs.

    The package appears complete or not at all, and the same model and options give the same bytes.
    """
    from rlx_ort.cli.arrays import read_npz
    from rlx_ort.deploy.create import Recipe, create_package
    from rlx_ort.deploy.names import is_package
    from rlx_ort.execution.tunings import of_graph
    from rlx_ort.selection.policy import Adaptive, Benchmark, CostModel

    golden, expected, license_file = map(given.pop, ("golden", "expected", "license_file"))
    if len(expected) > len(golden):
        raise click.UsageError("each --expected belongs to a --golden")
    graph, _ = options.read_model(model, rlx_ort.CompileOptions(dims=given["dims"]))
    cases = [
        (options.read_inputs(inputs, graph.input_types), None if outputs is None else read_npz(outputs))
        for inputs, outputs in zip_longest(golden, expected)
    ]
    if not given["variants"]:
        del given["variants"]  # the recipe has a default
    as_json, policy, strategy = map(given.pop, ("as_json", "policy", "strategy"))
    picks = {"cost-model": CostModel(), "benchmark": Benchmark(5), "adaptive": Adaptive()}
    license_text = "" if license_file is None else read_regular(license_file).decode("utf-8")
    policy = replace(policy, pick=picks[strategy])
    found = of_graph(graph) if tuned else {}
    if tuned and not found:
        raise click.UsageError(f"{model} was never tuned on this machine; run `rlx-ort tune {model}` first")
    carried = split.read(plan)
    if isinstance(carried, str):
        raise click.UsageError("--split of a package is a file that `rlx-ort split --out` wrote")
    given |= {"tunings": found, "split": carried}
    recipe = Recipe(**given, policy=policy, golden=cases, license_text=license_text)
    with counted(f"packing {target}") as progress:
        digest = create_package(graph, target, recipe, folder=folder, overwrite=force, progress=progress)
    size = sum(file.stat().st_size for file in ([target] if target.is_file() else target.rglob("*")) if file.is_file())
    document = {"package": str(target), "sha256": digest, "bytes": size, "golden_cases": len(cases)}
    facts = [("written", target), ("size", binary_size(size)), ("sha256", digest), ("golden cases", len(cases))]
    emit(document, as_json, lambda document: print_facts(facts))
    if is_package(model):
        note(f"only the graph and weights of {model} are copied; give its settings and golden cases again")
    if not cases:
        note("no --golden: `package verify` and the check at first use have nothing to compare")
