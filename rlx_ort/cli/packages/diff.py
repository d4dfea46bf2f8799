"""`rlx-ort package diff A B`: what two packages have in common and where they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.show import emit, note, print_table

if TYPE_CHECKING:
    from rlx_ort.deploy.package import Package

_PACKAGE = click.Path(exists=True, path_type=Path)
_BY_NAME = {"files": "file", "tensors": "tensor"}


@click.command("diff")
@click.argument("first", type=_PACKAGE)
@click.argument("second", type=_PACKAGE)
@options.key
@options.as_json
def command(first: Path, second: Path, key: Path | None, as_json: bool) -> None:
    """Compare two packages by their indexes: settings, files, tensors, and whether they are signed.

    Large files are compared by the digests that the indexes promise; `verify` reads the bytes. The exit code is 1 when
    the packages differ.
    """
    from rlx_ort.deploy.package import Package

    with Package(first, key=key) as one, Package(second, key=key) as other:
        rows = list(_differences(one, other))
        document = {"first": str(first), "second": str(second), "same": not rows, "differences": rows}
    emit(document, as_json, _print)
    if rows:
        click.get_current_context().exit(1)


def _print(document: dict[str, Any]) -> None:
    if not document["differences"]:
        note("the packages are the same")
        return
    columns = ("what", "name", "first", "second")
    rows = [["-" if row[key] is None else row[key] for key in columns] for row in document["differences"]]
    print_table(columns, rows)


def _differences(one: Package, other: Package) -> Iterator[dict[str, Any]]:
    """Yield a row for each entry of the two indexes that differs, settings first."""
    left, right = json.loads(one.index.to_bytes()), json.loads(other.index.to_bytes())
    for key in sorted({*left, *right} - {*_BY_NAME}):
        yield from _rows("setting", key, left.get(key), right.get(key))
    if one.signature != other.signature:
        signed = ["signed" if package.is_signed else None for package in (one, other)]
        yield {"what": "signature", "name": "signature", "first": signed[0], "second": signed[1]}
    for key, what in _BY_NAME.items():
        for name in sorted({*left[key], *right[key]}):
            first, second = left[key].get(name), right[key].get(name)
            if first != second:
                yield {"what": what, "name": name, "first": _digest(first, second), "second": _digest(second, first)}


def _rows(what: str, name: str, first: Any, second: Any) -> Iterator[dict[str, Any]]:
    """Yield the leaves in which two values differ, named by the way to them."""
    if first == second:
        return
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}):
            yield from _rows(what, f"{name}.{key}", first.get(key), second.get(key))
    else:
        yield {"what": what, "name": name, "first": first, "second": second}


def _digest(entry: dict[str, Any] | None, other: dict[str, Any] | None) -> str | None:
    """Return how an entry differs from another: by its digest, or else by its other fields."""
    if entry is None:
        return None
    if other is None or entry["sha256"] != other["sha256"]:
        return str(entry["sha256"][:16])
    return ", ".join(f"{key} {entry[key]}" for key in entry if entry[key] != other[key])
