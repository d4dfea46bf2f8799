"""`rlx-ort package ...`: a model, its weights and its expected outputs, in one file that is checked before it runs.

Each subcommand is a file of `rlx_ort.cli.packages` that holds its command as `command`.
"""

from __future__ import annotations

import click

from rlx_ort.cli import Commands

_COMMANDS = ("create", "inspect", "verify", "run", "extract", "diff", "sign", "warm", "export")


@click.group("package", cls=Commands, package="rlx_ort.cli.packages", names=_COMMANDS)
def command() -> None:
    """Make, check and run model packages.

    A package is a folder NAME.ortpackage, or the same as one file, which is read in place.
    """
