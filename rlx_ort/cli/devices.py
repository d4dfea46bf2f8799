"""`rlx-ort devices`: which devices work here, and the remedies for the others."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import binary_size, emit, print_rest, print_table, progress

_FACTS = ("available", "reason", "remedy", "hardware", "driver", "identity", "memory_bytes")
_MEMORY = ("budget_bytes", "used_bytes", "source", "models")


@options.command("devices")
def command(all_rows: bool = options.ALL_ROWS, as_json: bool = options.AS_JSON) -> None:
    """Show which devices work here.

    A device works when a one-node session ran on it. With --all there is the reason for each of the others, and how to
    do. Devices that the RLX_* variables deny are not tried.
    """
    with progress("opening a one-node session on each device"):
        rows = _rows()
    emit({"devices": rows}, as_json, lambda document: _print(rows, all_rows))


def _print(rows: list[dict[str, Any]], all_rows: bool) -> None:
    names: dict[str, list[str]] = {}
    for row in rows:
        if row["same_as"]:
            names.setdefault(row["same_as"], []).append(row["device"])
    here = [row for row in rows if row["available"] and not row["same_as"]]
    table = [(row["device"], row["name"], _hardware(row), ", ".join(names.get(row["device"], ()))) for row in here]
    print_table(("device", "name", "hardware", "other names"), table)
    others = [row for row in rows if not row["available"]]
    print_rest("not here", [(row["device"], row["reason"], row["remedy"]) for row in others], all_rows)


def _rows() -> list[dict[str, Any]]:
    from rlx_ort.providers.base import Availability
    from rlx_ort.providers.registry import availability, full_name, known_devices, same_hardware
    from rlx_ort.resilience.memory import device_memory

    policy = rlx_ort.DevicePolicy.from_env()
    rows = []
    for device in known_devices():
        refusal = policy.refusal(device)
        state = availability(device) if refusal is None else Availability(False, reason=f"it is {refusal}")
        memory = {} if refusal is not None else asdict(device_memory(device))
        facts = {name: getattr(state, name) for name in _FACTS} | {name: memory.get(name) for name in _MEMORY}
        first = same_hardware(device)[0] if state.available else device
        same_as = None if first == device else first.label
        rows.append({"device": device.label, "name": full_name(device), **facts, "same_as": same_as})
    return rows


def _hardware(row: dict[str, Any]) -> str:
    memory = binary_size(row["memory_bytes"]) if row["memory_bytes"] else ""
    budget = f"budget {binary_size(row['budget_bytes'])}" if row["budget_bytes"] else ""
    used = f"used {binary_size(row['used_bytes'])}" if row["used_bytes"] else ""
    return ", ".join(filter(None, (row["hardware"], row["driver"], memory, budget, used, row["identity"])))
