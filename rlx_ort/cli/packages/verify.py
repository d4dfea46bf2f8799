"""`rlx-ort package verify PACKAGE`: every byte, the signature, and the golden outputs on devices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.packages import shared
from rlx_ort.cli.show import note, print_facts, print_json, print_table, progress
from rlx_ort.errors import IntegrityError

if TYPE_CHECKING:
    from rlx_ort.deploy.golden import DeviceParity
    from rlx_ort.deploy.package import Package
    from rlx_ort.device import Device
    from rlx_ort.selection.policy import DevicePolicy

__all__ = ["command"]


@click.command("verify")
@shared.package
@shared.key
@shared.sha256
@shared.min_serial
@click.option("--device", "devices", metavar="DEVICES", help="Run the golden cases on these devices, or on `all`.")
@options.as_json
def command(
    package: Path, key: Path | None, sha256: str | None, min_serial: int, devices: str | None, as_json: bool
) -> None:
    """Check every byte of a package, its signature, and with --device what devices make of its golden inputs.

    The exit code is 7 when the package is broken, not signed by the key, or a device that runs gives wrong outputs.
    """
    from rlx_ort.cli.packages.progress import counted
    from rlx_ort.deploy.package import Package

    with Package(package, key=key, sha256=sha256, min_serial=min_serial) as opened:
        with counted(f"hashing {package}") as step:
            opened.check_all(step)
        rows = [] if devices is None else _parity(opened, devices)
        document = {
            "package": str(package),
            "sha256": opened.sha256,
            "signature": "verified" if key is not None else "present, not checked" if opened.is_signed else "none",
            "files": len(opened.index.files),
            "tensors": len(opened.index.tensors),
            "golden_cases": len(opened.cases),
            "devices": [_row(row) for row in rows],
        }
    if as_json:
        print_json(document)
    else:
        _print(document)
    wrong = [row for row in rows if row.outputs and not row.ok]
    if wrong:
        raise IntegrityError("; ".join(f"{row.device.label}: {row.verdict}" for row in wrong))


def _parity(package: Package, devices: str) -> list[DeviceParity]:
    from rlx_ort.deploy.golden import check_device
    from rlx_ort.deploy.open import runner_of
    from rlx_ort.device import parse_device_list
    from rlx_ort.options.compile_options import CompileOptions, PlacementRule
    from rlx_ort.selection.policy import DevicePolicy

    if not package.cases:
        note("the package has no golden cases; make it with --golden")
        return []
    policy = DevicePolicy.from_env()
    chosen: list[Device] = _here(policy) if devices.strip().lower() == "all" else parse_device_list(devices)
    rows = []
    with runner_of(package, policy, CompileOptions(placement=PlacementRule.ASSISTED)) as runner:
        for device in chosen:
            with progress(f"running golden cases on {device.label}"):
                rows.append(check_device(package, runner, device))
    return rows


def _here(policy: DevicePolicy) -> list[Device]:
    from rlx_ort.providers.availability import available_devices

    return [device for device in available_devices() if policy.allows(device)]


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
    facts = [
        ("package", document["package"]),
        ("bytes", f"all of {document['files']} files and {document['tensors']} tensors are what was packed"),
        ("sha256", document["sha256"]),
        ("signature", document["signature"]),
    ]
    print_facts(facts)
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
