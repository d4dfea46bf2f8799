"""`rlx-ort package export PACKAGE --format triton|onnx DIR`: the model for another server or tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlx_ort.cli import options
from rlx_ort.cli.show import note, print_json, progress

if TYPE_CHECKING:
    from rlx_ort.deploy.package import Package


@click.command("export")
@options.package
@click.argument("target", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--format", "form", type=click.Choice(["triton", "onnx"]), required=True, help="What to write.")
@click.option("--name", help="The model's name; that of the package by default.")
@click.option(
    "--max-batch",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Triton: the most rows that it puts together, 0 for none.",
)
@click.option(
    "--instances", type=click.IntRange(min=1), default=1, show_default=True, help="Triton: instances on each processor."
)
@click.option(
    "--kind",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    show_default=True,
    help="Triton: which processors.",
)
@click.option("--force", is_flag=True, help="Replace an existing target.")
@options.as_json
def command(
    package: Package,
    target: Path,
    form: str,
    name: str | None,
    max_batch: int,
    instances: int,
    kind: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write the model of a package for another server or tool, every byte of it checked before.

    `triton` makes a model of a Triton repository, with config.pbtxt and the weights once; docs/triton.md has what was
    tested. `onnx` makes NAME.onnx and NAME.onnx.data. The policy, golden cases and signature stay behind.
    """
    from rlx_ort.converters.files import save_onnx
    from rlx_ort.deploy.names import check_model_name
    from rlx_ort.deploy.open import runner_of
    from rlx_ort.deploy.triton import batch_dim, export_triton

    called = name or package.index.name
    check_model_name(called)
    with progress(f"writing {target}"), runner_of(package) as runner:
        package.check_all()
        graph, given = runner.graph, runner.options
        if form == "triton":
            written = export_triton(
                graph, target, called, max_batch=max_batch, instances=instances, kind=kind, options=given, force=force
            )
        else:
            target.mkdir(parents=True, exist_ok=True)
            written = target / f"{called}.onnx"
            save_onnx(graph, written, external_data=bool(graph.params), overwrite=force, options=given)
        dim = batch_dim(graph) if form == "triton" and max_batch else None
    if as_json:
        print_json({"written": str(written), "format": form, "batched_along": dim})
    note(f"wrote {written}")
    if form == "triton":
        note(f"requests are batched along {dim!r}" if dim else "requests are not batched")
