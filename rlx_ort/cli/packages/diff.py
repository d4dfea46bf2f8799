"""`rlx-ort package diff A B`: what two packages have in common and where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.packages.inspect import described
from rlx_ort.cli.show import note, print_json, print_table

if TYPE_CHECKING:
    from rlx_ort.deploy.package import Package

__all__ = ["command"]

_PACKAGE = click.Path(exists=True, path_type=Path)
_OWN = ("package", "form", "files", "sha256", "tensors")


@click.command("diff")
@click.argument("first", type=_PACKAGE)
@click.argument("second", type=_PACKAGE)
@options.as_json
def command(first: Path, second: Path, as_json: bool) -> None:
    """Compare two packages by their indexes: settings, files and tensors. The exit code is 1 when they differ."""
    from rlx_ort.deploy.package import Package

    with Package(first) as one, Package(second) as other:
        rows = [*_settings(one, other), *_parts(one, other)]
        document = {"first": str(first), "second": str(second), "same": one.sha256 == other.sha256, "differences": rows}
    if as_json:
        print_json(document)
    elif rows:
        columns = ("what", "name", "first", "second")
        print_table(columns, [["-" if row[key] is None else row[key] for key in columns] for row in rows])
    else:
        note("the packages are the same")
    if rows:
        click.get_current_context().exit(1)


def _settings(one: Package, other: Package) -> list[dict[str, Any]]:
    left, right = described(one), described(other)
    keys = [key for key in left if key not in _OWN and left[key] != right[key]]
    return [{"what": "setting", "name": key, "first": left[key], "second": right[key]} for key in keys]


def _parts(one: Package, other: Package) -> list[dict[str, Any]]:
    rows = []
    for what, left, right in (
        ("file", one.index.files, other.index.files),
        ("tensor", one.index.tensors, other.index.tensors),
    ):
        first, second = _digests(left), _digests(right)
        for name in sorted({*first, *second}):
            if first.get(name) != second.get(name):
                rows.append({"what": what, "name": name, "first": first.get(name), "second": second.get(name)})
    return rows


def _digests(entries: Mapping[str, Any]) -> dict[str, str]:
    return {name: entry.sha256[:16] for name, entry in entries.items()}
