"""`rlx-ort package warm PACKAGE`: compile a package ahead of its first run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from rlx_ort.cli import options
from rlx_ort.cli.show import binary_size, emit, note, print_table, progress

if TYPE_CHECKING:
    from rlx_ort.deploy.open import WarmedDevice
    from rlx_ort.deploy.package import Package

__all__ = ["command"]


@click.command("warm")
@options.package
@click.option(
    "--device", "devices", metavar="DEVICES", help="Warm for these devices, as in cpu,cuda; default: all that may run."
)
@options.as_json
@click.pass_context
def command(context: click.Context, package: Package, devices: str | None, as_json: bool) -> None:
    """Compile a package ahead of its first run.

    Writes optimised models and what providers compile to the compile cache, where sessions that are opened later find
    it. `rlx-ort cache list` shows it. The exit code is 1 when nothing was kept for some device.
    """
    from rlx_ort.deploy.open import warm_opened
    from rlx_ort.device import parse_device_list

    chosen = None if devices is None else parse_device_list(devices)
    with progress(f"warming {package.path}"):
        rows = warm_opened(package, chosen)
    document = {"package": str(package.path), "devices": [asdict(row) for row in rows]}
    emit(document, as_json, lambda document: _print(rows))
    if not rows or any(row.problem for row in rows):
        context.exit(1)


def _print(rows: list[WarmedDevice]) -> None:
    table = []
    for row in rows:
        kept = (row.entry[:12], binary_size(row.nbytes)) if row.entry else ("-", "-")
        table.append((row.device, *kept, f"{row.seconds:.2f}", "yes" if row.starts else "no"))
    print_table(("device", "kept as", "size", "seconds", "starts from it"), table)
    for row in rows:
        if row.problem:
            note(f"{row.device}: {row.problem}")
