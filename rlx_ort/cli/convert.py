"""`rlx-ort convert SRC DST`: between ONNX and the IR's JSON."""

from __future__ import annotations

from pathlib import Path

import click

from rlx_ort.cli.models import read_model
from rlx_ort.cli.show import note, progress
from rlx_ort.errors import ConversionError

__all__ = ["command"]


@click.command("convert")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace the target if it exists.")
def command(source: Path, target: Path, force: bool) -> None:
    """Convert a model between ONNX and JSON.

    SOURCE is told by its content, TARGET by its suffix: .onnx or .json.

    The target appears complete or not at all; large weights go to a file beside it.
    """
    suffix = target.suffix.lower()
    if suffix not in (".onnx", ".json"):
        raise click.UsageError(f"{target} has to end in .onnx or .json, which say what to write")
    # the JSON form keeps its large tensors in a file beside it; save_onnx looks after its own
    written = [target] if suffix == ".onnx" else [target, target.with_suffix(".safetensors")]
    for file in written:
        if file.exists() and not force:
            raise ConversionError(f"{file} exists and was left as it is; give --force to replace it")
    graph = read_model(source)
    with progress(f"writing {target}"):
        if suffix == ".onnx":
            from rlx_ort.converters.files import save_onnx

            save_onnx(graph, target, overwrite=force)
        else:
            from rlx_ort.ir.serde import save_json

            save_json(graph, target)
    note(f"wrote {target}")
