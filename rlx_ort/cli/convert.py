"""`rlx-ort convert SRC DST`: a model into another format, opset or precision, checked before it gets there."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

import click

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.compare import comparison_document, print_outputs
from rlx_ort.cli.show import binary_size, emit, note, print_facts, print_json, steps

if TYPE_CHECKING:
    from rlx_ort.conversion.convert import ConversionReport, ConvertOptions, ModelFacts
    from rlx_ort.converters.sources.weights import Renames

_SUFFIXES = (".onnx", ".json", ".ort")
_SHOWN = 6
_STEP_FACTS = {
    "params": (
        ("weights taken", "loaded"),
        ("inputs that are weights now", "became_weights"),
        ("not in the file", "missing"),
        ("not in the model", "unused"),
    ),
    "cut": (("inputs", "inputs"), ("outputs", "outputs")),
    "dims": (("dims still open", "still_open"),),
    "opset": (("nodes rewritten", "rewritten"),),
    "simplify": (("removed", "removed_ops"), ("computed ahead", "folded")),
    "fuse": (("fused attention", "attention"),),
    "precision": (
        ("kept in f32", "kept_ops"),
        ("weights too large for f16", "overflowing"),
        ("clamped numbers", "clamped"),
    ),
    "quantize": (("quantised", "quantized_ops"), ("calibration samples", "samples")),
}
"""Step -> labels and fields of its report that are printed, beyond size, nodes, opset and dtypes."""


def _names(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of options that may be repeated and may hold commas."""
    return tuple(name for value in values for name in value.split(",") if name)


def _file_name(value: str | None) -> str | None:
    """Return the name of a file beside the target; one with a folder or drive is refused on every system."""
    if value is not None and (value in ("", "..") or PureWindowsPath(value).name != value):
        raise click.BadParameter(f"{value!r} is not the name of a file; it is written beside the target")
    return value


def _renames(values: tuple[str, ...]) -> Renames | None:
    """Return the renames of a file or of patterns; None where neither is given."""
    if not values:
        return None
    from rlx_ort.converters.sources import Renames, load_renames

    if len(values) == 1 and Path(values[0]).is_file():
        return load_renames(values[0])
    pairs = [value.rpartition("=") for value in values]
    for (pattern, equals, _), value in zip(pairs, values, strict=True):
        if not (pattern and equals):
            raise click.BadParameter(f"{value!r} is neither a file nor PATTERN=NAME")
    return Renames.of(patterns=[(pattern, name) for pattern, _, name in pairs])


class _InputsFile(click.Path):
    """The type of --inputs: a file. The names of values, which were its meaning once, get the option they go to."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail with the option to use instead."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as err:
            hint = "--inputs is an npz file to verify on; to keep a part of the model, use --cut-inputs NAMES"
            raise click.BadParameter(f"{err.message} {hint}", ctx, param) from err


_CHANGES: dict[str, Any] = {
    "precision": options.choice(
        "--precision", "Compute f32 parts in this precision.", "f16 bf16 mixed / fp16 float16 half bfloat16 int8 int4"
    ),
    "keep": options.option(
        "--keep",
        "Operators or nodes that --precision keeps in f32; names of nodes that --quantize skips.",
        multiple=True,
        read=_names,
        metavar="OPS",
    ),
    "quantize": options.choice(
        "--quantize", "Quantise to fewer bits.", "int8-dynamic int8-static int4-weights / int8 int4"
    ),
    "calibration": options.file("--calibration", "For int8-static: an npz file with samples for each input."),
    "opset": options.whole("--opset", "Move to this ai.onnx opset.", least=1),
    "ir_version": options.whole("--ir-version", "Declare this IR version.", least=1),
    "dims": options.DIMS,
    "free": options.mapping(
        "--free",
        "Open a fixed dim under this name, by default the first of every input. The result is run on two sizes.",
        *("NAME[=INPUT[AXIS],...]", "([^=]+)=?(.*)", "batch=x[0],y[0]"),
        read=lambda places: [place for place in places.split(",") if place],
    ),
    "simplify": options.flag("--simplify", "Fold constants, remove no-ops, infer shapes."),
    "fuse": options.flag("--fuse", "Write attention and rotary embeddings as ONNX Runtime's fused operators."),
    **{
        side: options.option(
            f"--cut-{side}",
            f"Extract a submodel: the values that become its {side}.",
            multiple=True,
            read=_names,
            metavar="NAMES",
        )
        for side in ("inputs", "outputs")
    },
    "params": options.file("--params", "Take weights from a file: safetensors or its index, npz, GGUF, ONNX."),
    "cast": options.flag("--cast", "Convert floats of --params to the model's float type."),
    "renames": options.option(
        "--rename",
        "How names in --params become names of the model: a JSON or TOML file, or a regular expression and what a "
        r"match becomes, as in 'model\.(.*)=\1'. Patterns may be repeated.",
        multiple=True,
        metavar="FILE|PATTERN=NAME",
        read=_renames,
    ),
    "detach": options.option(
        "--detach",
        "Write the weights to this safetensors file beside an ONNX target, which refers to it.",
        metavar="NAME",
        read=_file_name,
    ),
    "external_data": options.option(
        "--external-data/--one-file",
        "Whether weights go to a file beside the model. Default: above 1 GiB.",
        default=None,
    ),
    "device": options.device("Optimise for this device; the target then runs there only."),
    "tolerance": options.number("--tolerance", "The largest relative L2 error. Default: by the precision."),
    "verify_inputs": options.option(
        "--inputs --verify-inputs",
        "Verify with the arrays of this npz file instead of random inputs.",
        cls=options.Aliased,
        type=_InputsFile(exists=True, dir_okay=False, path_type=Path),
    ),
    "no_verify": options.flag("--no-verify", "Do not run source and result to compare them."),
    "overwrite": options.flag("--force", "Replace the target if it exists."),
    "as_json": options.AS_JSON,
}
"""The options, of which most are fields of `ConvertOptions`."""


@options.command("convert", rows=_CHANGES)
def command(
    source: Path = options.model(), target: Path = options.argument(type=options.WRITTEN), **given: Any
) -> None:
    """Convert a model, and check the result against the source.

    SOURCE is recognised by its content: ONNX, the JSON of a graph, a program exported by PyTorch (.pt2), or a package,
    which is taken with its dims. TARGET has the format of its suffix: .onnx, .json or .ort.

    Both are run on the same inputs before the target appears, complete or not at all. Exit code 8 means that they
    differ by more than the tolerance.
    """
    if target.suffix.lower() not in _SUFFIXES:
        raise click.UsageError(f"{target} must end in one of {', '.join(_SUFFIXES)}; the suffix selects the format")
    from rlx_ort.conversion.convert import convert
    from rlx_ort.converters.bundle import bundle_from_graph
    from rlx_ort.deploy.names import is_package

    as_json = given.pop("as_json")
    try:
        chosen = _options(given)
        model = bundle_from_graph(*options.read_model(source), str(source)) if is_package(source) else source
        with steps() as (begin, count):
            report = convert(model, target, chosen, on_step=begin, on_bytes=count)
    except rlx_ort.ParityError as err:
        if as_json and err.comparison is not None:
            print_json({"source": str(source), "target": None, "verification": comparison_document(err.comparison)})
        raise
    emit(_document(report), as_json, lambda document: _print(report))


def _options(given: dict[str, Any]) -> ConvertOptions:
    """Return the options of the conversion; those that exclude each other are refused before anything is read."""
    from rlx_ort.conversion.convert import ConvertOptions

    if given["precision"] and given["quantize"]:
        raise click.UsageError("--precision and --quantize exclude each other; convert twice")
    if given["quantize"] == "int8-static" and given["calibration"] is None:
        raise click.UsageError("--quantize int8-static needs --calibration, an npz file with samples for each input")
    if given["renames"] and given["params"] is None:
        raise click.UsageError("--rename is about the names in --params, which is not given")
    if given["cast"] and given["params"] is None:
        raise click.UsageError("--cast is about the weights in --params, which is not given")
    no_verify, inputs, tolerance, device = map(given.pop, ("no_verify", "verify_inputs", "tolerance", "device"))
    if no_verify and (inputs is not None or tolerance is not None):
        raise click.UsageError("--no-verify excludes --inputs and --tolerance")
    if no_verify and given["free"]:
        raise click.UsageError("--no-verify excludes --free, which is checked by running two sizes")
    from rlx_ort.cli.arrays import read_npz
    from rlx_ort.parity.metrics import Tolerance

    calibration = given.pop("calibration")
    return ConvertOptions(
        **given,
        tolerance=None if tolerance is None else Tolerance(tolerance),
        device=None if device is None else options.permitted(device),
        calibration=None if calibration is None else read_npz(calibration),
        verify=not no_verify,
        verify_inputs=None if inputs is None else read_npz(inputs),
        trusted_links=options.trusted_links(),
    )


def _document(report: ConversionReport) -> dict[str, Any]:
    return {
        "source": report.source,
        "target": report.files,
        "target_bytes": report.file_bytes,
        "before": _facts(report.before),
        "after": _facts(report.after),
        "steps": report.steps,
        "seconds": report.seconds,
        "verification": None if report.comparison is None else comparison_document(report.comparison),
        "verified": report.comparison is not None,
        "unverified": report.unverified or None,
        "emulated": report.emulated or None,
    }


def _facts(facts: ModelFacts) -> dict[str, Any]:
    document = dataclasses.asdict(facts)
    return {"bytes": document.pop("nbytes"), **document}


def _print(report: ConversionReport) -> None:
    before, after = report.before, report.after
    facts: list[tuple[str, object]] = [
        ("written", ", ".join(str(file) for file in report.files)),
        ("size", f"{binary_size(before.nbytes)} -> {binary_size(report.file_bytes)}"),
        ("nodes", _change(before.nodes, after.nodes)),
        ("opset", _change(before.opset, after.opset)),
        ("weights", _change(_dtypes(before), _dtypes(after))),
    ]
    for name, step in report.steps.items():
        shown = [(label, _shown(getattr(step, attribute))) for label, attribute in _STEP_FACTS.get(name, ())]
        facts += [(label, text) for label, text in shown if text]
    print_facts(facts)
    if report.comparison is None:
        note(f"not verified: {report.unverified}")
        return
    comparison = report.comparison
    print_outputs(comparison)
    sizes = ", ".join(f"{name}={size}" for name, size in comparison.assumed.items())
    inputs = "the given inputs" if comparison.seed is None else f"random inputs, seed {comparison.seed}"
    note(f"verified on {inputs}" + (f" with {sizes}" if sizes else "") + f": {comparison.tolerance}")
    if report.emulated:
        note(report.emulated)


def _change(before: object, after: object) -> str:
    return str(after) if before == after else f"{before} -> {after}"


def _dtypes(facts: ModelFacts) -> str:
    return ", ".join(f"{dtype} {binary_size(size)}" for dtype, size in facts.weight_bytes.items()) or "none"


def _shown(fact: Any) -> object:
    """Return a fact of a step as text, long lists shortened; empty if there is nothing to show."""
    if callable(fact):
        fact = fact()
    if isinstance(fact, Mapping):
        fact = [f"{value} {name}" if isinstance(value, int) else name for name, value in fact.items()]
    if not isinstance(fact, Collection) or isinstance(fact, str):
        return fact
    shown = list(fact)[:_SHOWN]
    return ", ".join(shown) + (f" and {len(fact) - _SHOWN} more" if len(fact) > _SHOWN else "")
