"""`rlx-ort package verify PACKAGE`: every byte, the signature, and the golden outputs on devices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.show import counted, emit, note, print_facts, print_table, progress
from rlx_ort.errors import IntegrityError

if TYPE_CHECKING:
    from rlx_ort.deploy.golden import DeviceParity
    from rlx_ort.deploy.package import Package

__all__ = ["command"]


@click.command("verify")
@options.package
@click.option("--device", "devices", metavar="DEVICES", help="Run the golden cases on these devices, or on `all`.")
@options.as_json
def command(package: Package, devices: str | None, as_json: bool) -> None:
    """Check every byte of a package, its signature, and with --device the golden outputs of devices.

    The exit code is 7 when the package is broken, not signed by the key, or a device that runs gives wrong outputs.
    """
    with counted(f"hashing {package.path}") as step:
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
    emit(document, as_json, _print)
    wrong = [row for row in rows if row.outputs and not row.ok]
    if wrong:
        raise IntegrityError("; ".join(f"{row.device.label}: {row.verdict}" for row in wrong))


def _parity(package: Package, devices: str) -> list[DeviceParity]:
    from rlx_ort.deploy.golden import check_device
    from rlx_ort.deploy.open import runner_of
    from rlx_ort.device import parse_device_list
    from rlx_ort.options.compile_options import CompileOptions, PlacementRule
    from rlx_ort.providers.registry import available_devices
    from rlx_ort.selection.policy import DevicePolicy

    if not package.cases:
        note("the package has no golden cases; make it with --golden")
        return []
    policy = DevicePolicy.from_env()
    if devices.strip().lower() == "all":
        chosen = [device for device in available_devices() if policy.allows(device)]
    else:
        chosen = parse_device_list(devices)
    rows = []
    with runner_of(package, policy, CompileOptions(placement=PlacementRule.ASSISTED)) as runner:
        for device in chosen:
            with progress(f"running golden cases on {device.label}"):
                rows.append(check_device(package, runner, device))
    return rows


def _row(row: DeviceParity) -> dict[str, Any]:
    worst = row.worst
    error = None if worst is None or not math.isfinite(worst.error) else worst.error
    return {
        "device": row.device.label,
        "precision": row.precision,
        "verdict": "right" if row.ok else "wrong" if row.outputs else "not run",
        "tolerance": row.tolerance,
        "worst_error": error,
        "worst_output": None if worst is None else worst.name,
        "reason": row.verdict,
    }


def _print(document: dict[str, Any]) -> None:
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
