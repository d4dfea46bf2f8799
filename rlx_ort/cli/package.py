"""`rlx-ort package ...`: a model, its weights and what they must give, in one file that is checked before it runs.

Each subcommand is a file of `rlx_ort.cli.packages` that holds its command as `command`.
"""

from __future__ import annotations

import importlib
from typing import cast

import click

__all__ = ["command"]

_COMMANDS = ("create", "inspect", "verify", "run", "extract", "diff", "sign", "warm", "export")


class _Commands(click.Group):
    """A group whose commands are modules of `rlx_ort.cli.packages`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which a newcomer needs them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return its command."""
        if cmd_name not in _COMMANDS:
            return None
        return cast(click.Command, importlib.import_module(f"rlx_ort.cli.packages.{cmd_name}").command)


@click.group("package", cls=_Commands)
def command() -> None:
    """Make, check and run model packages.

    A package is a folder NAME.ortpackage, or the same as one file, which is read in place.
    """
