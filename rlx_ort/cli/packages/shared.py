"""Arguments and options that the subcommands of `package` share."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["key", "min_serial", "package", "sha256"]

package = click.argument("package", type=click.Path(exists=True, path_type=Path))
"""A package, folder or file."""

key = click.option(
    "--key",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="RLX_PACKAGE_KEY",
    help="A PEM file with the public key that must have signed the package. Default: RLX_PACKAGE_KEY.",
)

sha256 = click.option("--sha256", metavar="HEX", help="The digest the package must have, as `inspect` prints it.")

min_serial = click.option(
    "--min-serial", default=0, type=click.IntRange(min=0), help="Refuse packages with a lower serial number."
)
