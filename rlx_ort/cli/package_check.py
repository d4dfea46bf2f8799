"""`rlx-ort package inspect`, `verify` and `diff`: the contents of a package, whether it is intact, how two differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import binary_size, counted, emit, note, print_facts, print_table, progress

if TYPE_CHECKING:
    from rlx_ort.deploy.golden import DeviceParity
    from rlx_ort.deploy.package import Package

_BY_NAME = {"files": "file", "tensors": "tensor"}


@options.command("inspect")
def inspect(package: Package = options.OPEN_PACKAGE, as_json: bool = options.AS_JSON) -> None:
    """Show the contents of a package.

    Structure, names, sizes and small files are checked; large weights are not read. `verify` reads everything.
    """
    emit(_described(package), as_json, _print_contents)


def _described(package: Package) -> dict[str, Any]:
    index = package.index
    policy, files = index.policy, sorted(index.files.items())
    return {
        "package": str(package.path),
        "form": "folder" if package.is_folder else "file",
        **{key: getattr(index, key) for key in ("name", "version", "serial", "license", "verify_on_first_use")},
        **{key: dict(getattr(index, key)) for key in ("provenance", "requires", "dims", "tolerances")},
        "sha256": package.sha256,
        "signature": package.signature_state,
        "policy": {
            "allow": None if policy.allow is None else [device.label for device in policy.allow],
            **{verb: [device.label for device in getattr(policy, verb)] for verb in ("deny", "prefer")},
            "pick": type(policy.pick_strategy()).__name__.lower(),
        },
        "buckets": None if index.buckets is None else {"dim": index.buckets[0], "ranges": list(index.buckets[1])},
        "variants": [
            {"name": name, "device": item.device, "precision": item.precision.value, "own_weights": bool(item.rounded)}
            for name, item in index.variants.items()
        ],
        "golden_cases": len(index.cases),
        "tensors": len(index.tensors),
        "files": [{"name": name, "bytes": each.size, "sha256": each.sha256} for name, each in files],
    }


def _print_contents(document: dict[str, Any]) -> None:
    policy = document["policy"]
    rules = [f"only {', '.join(policy['allow'])}"] if policy["allow"] is not None else []
    rules += [f"{verb} {', '.join(policy[verb])}" for verb in ("deny", "prefer") if policy[verb]]
    facts = [
        ("package", f"{document['package']} ({document['form']})"),
        ("name", " ".join(filter(None, (document["name"], document["version"], f"serial {document['serial']}")))),
        ("sha256", document["sha256"]),
        ("signature", document["signature"]),
        ("license", document["license"] or "not stated"),
        ("policy", f"{'; '.join(rules) or 'any device'}, by {policy['pick']}"),
        ("dims", ", ".join(f"{name}={size}" for name, size in document["dims"].items()) or "none fixed"),
        ("golden cases", f"{document['golden_cases']}{', run at first use' * document['verify_on_first_use']}"),
    ]
    facts += [(f"provenance {key}", text) for key, text in document["provenance"].items()]
    facts += [(f"requires {key}", text) for key, text in document["requires"].items()]
    print_facts(facts)
    rows = [(row["name"], row["device"], row["precision"], row["own_weights"]) for row in document["variants"]]
    print_table(("variant", "device", "precision", "own weights"), rows)
    files = [(row["name"], binary_size(row["bytes"]), row["sha256"][:16]) for row in document["files"]]
    print_table(("file", "size", "sha256"), files)


@options.command("verify")
def verify(
    package: Package = options.OPEN_PACKAGE,
    devices: str | None = options.devices("--device --devices", "Run the golden cases on these devices, or on `all`."),
    as_json: bool = options.AS_JSON,
) -> None:
    """Check every byte of a package, its signature, and with --device the golden outputs of devices.

    The exit code is 7 when the package is broken, not signed by the key, or a device gives wrong outputs, and 3 when a
    named device cannot run it.
    """
    with counted(f"hashing {package.path}", package.index.total_bytes) as step:
        package.check_all(step)
    rows = [] if devices is None else _parity(package, devices)
    document = {
        "package": str(package.path),
        "sha256": package.sha256,
        "signature": package.signature_state,
        "files": len(package.index.files),
        "tensors": len(package.index.tensors),
        "golden_cases": len(package.cases),
        "devices": [_row(row) for row in rows],
    }
    emit(document, as_json, _print_verdicts)
    wrong = [row for row in rows if row.outputs and not row.ok]
    if wrong:
        raise rlx_ort.IntegrityError("; ".join(f"{row.device.label}: {row.verdict}" for row in wrong))
    idle = [row for row in rows if not row.outputs]
    if idle and not _is_all(devices):
        raise rlx_ort.DeviceError("; ".join(f"{row.device.label}: {row.verdict}" for row in idle))


def _is_all(devices: str | None) -> bool:
    return devices is not None and devices.strip().lower() == "all"


def _parity(package: Package, devices: str) -> list[DeviceParity]:
    from rlx_ort.deploy.golden import check_device
    from rlx_ort.deploy.open import runner_of

    if not package.cases:
        note("the package has no golden cases; make it with --golden")
        return []
    policy = rlx_ort.DevicePolicy.from_env()
    if _is_all(devices):
        chosen = options.each_once(filter(policy.allows, rlx_ort.available_devices()), package, named=False)
    else:
        chosen = options.each_once(rlx_ort.parse_device_list(devices), package)
    rows = []
    assisted = rlx_ort.CompileOptions(placement=rlx_ort.PlacementRule.ASSISTED)
    with runner_of(package, policy, assisted) as runner:
        for device in chosen:
            with progress(f"running golden cases on {device.label}"):
                rows.append(check_device(package, runner, device))
    return rows


def _row(row: DeviceParity) -> dict[str, Any]:
    worst = row.worst
    return {
        "device": row.device.label,
        "precision": row.precision,
        "verdict": "right" if row.ok else "wrong" if row.outputs else "not run",
        "tolerance": row.tolerance,
        "worst_error": None if worst is None or not math.isfinite(worst.error) else worst.error,
        "worst_output": None if worst is None else worst.name,
        "reason": row.verdict,
    }


def _print_verdicts(document: dict[str, Any]) -> None:
    what = f"all of {document['files']} files and {document['tensors']} tensors are what was packed"
    shown = [(key, document[key]) for key in ("package", "sha256", "signature")]
    print_facts([shown[0], ("bytes", what), *shown[1:]])
    if document["devices"]:
        columns = ("device", "precision", "verdict", "worst_error", "tolerance", "worst_output", "reason")
        rows = [
            [
                "-" if row[key] is None else f"{row[key]:.3g}" if isinstance(row[key], float) else row[key]
                for key in columns
            ]
            for row in document["devices"]
        ]
        print_table([column.replace("_", " ") for column in columns], rows)


@options.command("diff")
def diff(
    first: Path = options.argument(type=options.PACKAGE),
    second: Path = options.argument(type=options.PACKAGE),
    key: Path | None = options.KEY,
    as_json: bool = options.AS_JSON,
) -> None:
    """Compare two packages by their indexes: settings, files, tensors, and whether they are signed.

    Large files are compared by the digests that the indexes promise; `verify` reads the bytes. The exit code is 1 when
    the packages differ.
    """
    from rlx_ort.deploy.package import Package

    with Package(first, key=key) as one, Package(second, key=key) as other:
        rows = list(_differences(one, other))
        document = {"first": str(first), "second": str(second), "same": not rows, "differences": rows}
    emit(document, as_json, _print_differences)
    if rows:
        click.get_current_context().exit(1)


def _print_differences(document: dict[str, Any]) -> None:
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
