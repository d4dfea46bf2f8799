"""`rlx-ort package extract PACKAGE -o OUT`: the folder form of a package, or with --file the one-file form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlx_ort.cli import options
from rlx_ort.cli.show import counted, note, print_json

if TYPE_CHECKING:
    from rlx_ort.deploy.package import Package


@click.command("extract")
@options.package
@click.option("-o", "--output", "target", required=True, type=click.Path(path_type=Path), help="Where to write it.")
@click.option("--file", "as_file", is_flag=True, help="Write one file; the default is a folder.")
@click.option("--force", is_flag=True, help="Replace the file if it exists. A folder is never replaced.")
@options.as_json
def command(package: Package, target: Path, as_file: bool, force: bool, as_json: bool) -> None:
    """Write a package in the other form, every byte checked before; a signature stays valid.

    Nothing needs to be extracted to run a package: its file is read in place.
    """
    from rlx_ort.deploy.write import write_package

    with counted(f"writing {target}") as step:
        package.check_all()
        write_package(target, package.contents(), folder=not as_file, force=force, progress=step)
    if as_json:
        print_json({"package": str(target), "sha256": package.sha256, "files": len(package.names)})
    note(f"wrote {target}")
