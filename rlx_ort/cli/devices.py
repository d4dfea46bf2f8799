"""`rlx-ort devices`: which devices work here, and what the others need."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.show import binary_size, emit, print_table, progress

_FACTS = ("available", "reason", "remedy", "hardware", "driver", "identity", "memory_bytes")


@click.command("devices")
@options.as_json
def command(as_json: bool) -> None:
    """Show which devices work here.

    A device works when a one-node session ran on it. For each of the others there is the reason and what to do.
    """
    with progress("opening a one-node session on each device"):
        rows = _rows()
    emit({"devices": rows}, as_json, _print)


def _print(document: dict[str, Any]) -> None:
    table = []
    for row in document["devices"]:
        blocker = "\n".join(filter(None, (row["reason"], row["remedy"])))
        table.append((row["device"], row["name"], "yes" if row["available"] else "no", _hardware(row), blocker))
    print_table(("device", "name", "available", "hardware", "why not, and what to do"), table)


def _rows() -> list[dict[str, Any]]:
    from rlx_ort.providers.registry import availability, full_name, known_devices
    from rlx_ort.resilience.memory import device_memory

    rows = []
    for device in known_devices():
        found = availability(device)
        facts = {name: getattr(found, name) for name in _FACTS}
        memory = asdict(device_memory(device))
        facts |= {name: memory[name] for name in ("budget_bytes", "used_bytes", "source", "models")}
        rows.append({"device": device.label, "name": full_name(device), **facts})
    return rows


def _hardware(row: dict[str, Any]) -> str:
    memory = binary_size(row["memory_bytes"]) if row["memory_bytes"] else ""
    budget = f"budget {binary_size(row['budget_bytes'])}" if row["budget_bytes"] else ""
    used = f"used {binary_size(row['used_bytes'])}" if row["used_bytes"] else ""
    return ", ".join(filter(None, (row["hardware"], row["driver"], memory, budget, used, row["identity"])))
