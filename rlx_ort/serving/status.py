"""What the status page shows, as values of JSON."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rlx_ort.serving.history import RECENT, machine_facts

if TYPE_CHECKING:
    from rlx_ort.serving.models import ServedModel
    from rlx_ort.serving.repository import Repository


def status(repository: Repository) -> dict[str, Any]:
    """Return the state of a server: its machine, its devices, and each model in the last samples."""
    history, budget = repository.history, repository.budget
    whole, models = history.now()
    rows = []
    for entry in repository.index():
        model = repository.entries[entry["name"]].loaded.get(entry["version"])
        found = {} if model is None else {**_described(model), **models.get((model.name, model.version), {})}
        rows.append({**entry, **found})
    return {
        "machine": machine_facts(),
        "ready": repository.ready,
        "up_s": round(time.time() - history.started_s),
        "interval_s": history.interval_s,
        "window_s": RECENT * history.interval_s,
        "history_bytes": history.nbytes,
        "held_bytes": budget.held_bytes,
        "most_held_bytes": budget.most_bytes,
        "refused": budget.refused,
        "devices": history.devices(),
        "all": whole,
        "models": rows,
    }


def _described(model: ServedModel) -> dict[str, Any]:
    statistics = model.statistics
    return {
        "devices": [device.label for device in model.devices],
        "unused": [[device.label, reason] for device, reason in model.unused_devices()],
        "unbatched": model.unbatched_because,
        "answered": statistics.spans["success"].count,
        "failures": statistics.spans["fail"].count,
        "queued": model.scheduler.depth,
        "batches": {
            device: {1 << octave: count for octave, count in sorted(batches.octaves.items())}
            for device, batches in statistics.rows.items()
        },
    }


@functools.cache
def page(asks_token: bool) -> tuple[bytes, bytes]:
    """Return the status page and its content security policy, which allows its own script and style only."""
    text = files("rlx_ort.serving").joinpath("status.html").read_text(encoding="utf-8")
    text = text.replace("ASKS_TOKEN", "yes" if asks_token else "no")
    allowed = {
        tag: base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        for tag, inline in re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL)
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed['script']}'; style-src 'sha256-{allowed['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy.encode()
