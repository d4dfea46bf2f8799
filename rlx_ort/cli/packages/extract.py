"""`rlx-ort package extract PACKAGE -o OUT`: the folder form of a package, or with --file the one-file form."""

from __future__ import annotations

from pathlib import Path

import click

from rlx_ort.cli import options
from rlx_ort.cli.packages import shared
from rlx_ort.cli.show import note, print_json

__all__ = ["command"]


@click.command("extract")
@shared.package
@click.option("-o", "--output", "target", required=True, type=click.Path(path_type=Path), help="Where to write it.")
@click.option("--file", "as_file", is_flag=True, help="Write one file; the default is a folder.")
@click.option("--force", is_flag=True, help="Replace the file if it exists. A folder is never replaced.")
@shared.key
@shared.sha256
@shared.min_serial
@options.as_json
def command(
    package: Path,
    target: Path,
    as_file: bool,
    force: bool,
    key: Path | None,
    sha256: str | None,
    min_serial: int,
    as_json: bool,
) -> None:
    """Write a package in the other form, every byte checked before; a signature stays valid.

    Nothing needs to be extracted to run a package: its file is read in place.
    """
    from rlx_ort.cli.packages.progress import counted
    from rlx_ort.deploy.package import Package
    from rlx_ort.deploy.write import write_package

    with (
        Package(package, key=key, sha256=sha256, min_serial=min_serial) as opened,
        counted(f"writing {target}") as step,
    ):
        opened.check_all()
        write_package(target, opened.contents(), folder=not as_file, force=force, progress=step)
        document = {"package": str(target), "sha256": opened.sha256, "files": len(opened.names)}
    if as_json:
        print_json(document)
    note(f"wrote {target}")
