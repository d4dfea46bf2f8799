"""How good the choice of a device is: predicted against measured times, and what a wrong choice costs.

    python scripts/regret_suite.py --out results            calibrate, then run every graph on every device here
    python scripts/regret_suite.py --out results --devices cpu,webgpu --minutes 5 --quick

Writes regret.json (raw data), regret.txt (the tables) and the profiles into the folder; the calibration never sees
the graphs of the suite. Graphs for which a device would take too long are skipped on it and marked.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regret.cases import cases
from regret.engine_policies import POLICIES, measure_policy
from regret.measure import Limits, Outcome, kept_awake, measure_case
from regret.tables import by_family, summary_lines, tables
from rlx_ort.calibration import store
from rlx_ort.calibration.calibrate import calibrate_together
from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.device import Device, parse_device_list
from rlx_ort.errors import RlxError
from rlx_ort.execution.benchmark import Pace
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.registry import available_devices, is_selectable

_CALIBRATION_S = 40  # a device whose process takes longer hangs; a GPU in software takes 30
_SAME_HARDWARE = ("gpu", "vulkan")  # other names of the webgpu provider


def main() -> None:
    """Calibrate, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the results")
    parser.add_argument("--devices", help="devices to compare, as in cpu,cuda; all that work here by default")
    parser.add_argument("--minutes", type=float, default=6.5, help="stop starting graphs after this time")
    parser.add_argument("--quick", action="store_true", help="calibrate in the short form")
    parser.add_argument("--keep", action="store_true", help="use stored calibrations where there are some")
    parser.add_argument("--run-s", type=float, default=1.0, help="skip a device predicted to take longer for a run")
    parser.add_argument("--block-s", type=float, default=0.012, help="time for a block of runs on one device")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of runs on each device, in turn with the others")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    parser.add_argument("--no-policies", action="store_true", help="do not measure ONNX Runtime's own policies")
    parser.add_argument("--calibrate", help="only calibrate these devices, and write their profiles")
    chosen = parser.parse_args()
    faulthandler.enable()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.calibrate:
        _calibrate(parse_device_list(chosen.calibrate), chosen)
        return
    started = time.monotonic()
    devices = list(parse_device_list(chosen.devices)) if chosen.devices else _devices()
    profiles = _profiles(devices, chosen)
    limits = Limits(chosen.run_s, chosen.block_s, chosen.blocks)
    outcomes: list[Outcome] = []
    policies: list[dict[str, Any]] = []
    left_out = []
    pace = Pace(time.perf_counter_ns)
    with kept_awake(devices):
        for case in cases():
            if chosen.only not in case.name:
                continue
            if time.monotonic() - started > chosen.minutes * 60:
                left_out.append(case.name)
                continue
            graph, inputs = case.build()
            try:
                outcome = measure_case(case.family, case.name, graph, inputs, devices, limits, pace)
            except Exception:  # one graph must not take the others' results with it
                traceback.print_exc()
                left_out.append(case.name)
                continue
            if outcome.measured:
                outcomes.append(outcome)
                if not chosen.no_policies:
                    policies.append(_policies(graph, inputs, outcome, limits))
            else:
                left_out.append(case.name)
            print(_line(outcome), flush=True)
            with (chosen.out / "cases.jsonl").open("a", encoding="utf-8") as file:  # kept if the process ends early
                file.write(json.dumps(asdict(outcome)) + "\n")
    document = {
        "machine": _machine(),
        "arguments": {name: str(value) for name, value in vars(chosen).items()},
        "devices": profiles,
        "seconds": round(time.monotonic() - started, 1),
        "left_out": left_out,
        "cases": [asdict(outcome) for outcome in outcomes],
        "engine_policies": policies,
    }
    (chosen.out / "regret.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    lines = [
        *tables(by_family(outcomes)),
        "",
        *summary_lines(outcomes, policies, profiles),
        f"left out: {left_out or 'none'}",
    ]
    (chosen.out / "regret.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def _devices() -> list[Device]:
    return [device for device in available_devices() if is_selectable(device) and device.kind not in _SAME_HARDWARE]


def _profiles(devices: Sequence[Device], chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return device label -> what is known of its calibration, which is measured now unless a stored one will do."""
    missing = [device for device in devices if not chosen.keep or store.find(device).profile is None]
    if missing and not _measured(missing, chosen):
        for device in missing:  # one of them may have ended the process
            _measured([device], chosen)
    found: dict[str, dict[str, Any]] = {}
    for device in devices:
        path = _path(device, chosen)
        if device in missing:
            if not path.exists():
                found[device.label] = {"error": "not calibrated"}
                continue
            profile = CalibrationProfile.from_json(path.read_text(encoding="utf-8"))
            store.keep(device, profile)
        else:
            profile = store.find(device).profile or CalibrationProfile.from_json(path.read_text(encoding="utf-8"))
            path.write_text(profile.to_json(), encoding="utf-8")
        skipped = "; ".join(f"{probe}: {why}" for probe, why in profile.skipped.items())
        noisy = len(profile.noisy_rows)
        print(
            f"{device.label}: {len(profile.rows)} rows, {noisy} noisy, in {profile.elapsed_s:.1f} s; {skipped}",
            flush=True,
        )
        found[device.label] = {
            "key": asdict(profile.key),
            "elapsed_s": profile.elapsed_s,
            "rows": len(profile.rows),
            "noisy": noisy,
            "quick": profile.quick,
        }
    return found


def _measured(devices: Sequence[Device], chosen: argparse.Namespace) -> bool:
    """Calibrate devices in a process of its own, whatever ends that one; return whether it came to its end."""
    labels = ",".join(device.label for device in devices)
    command = [sys.executable, "-X", "faulthandler", __file__, "--out", str(chosen.out), "--calibrate", labels]
    try:
        subprocess.run(
            [*command, *(["--quick"] if chosen.quick else [])], check=True, timeout=20 + _CALIBRATION_S * len(devices)
        )
    except subprocess.SubprocessError as err:
        print(f"{labels}: not calibrated: {err}", flush=True)
        return False
    return True


def _calibrate(devices: Sequence[Device], chosen: argparse.Namespace) -> None:
    """Be that process: calibrate, and write the profiles."""
    begun = time.perf_counter()
    found = calibrate_together(devices, quick=chosen.quick)
    print(f"{', '.join(device.label for device in devices)}: calibrated in {time.perf_counter() - begun:.2f} s")
    for device, profile in found.items():
        if isinstance(profile, CalibrationProfile):
            _path(device, chosen).write_text(profile.to_json(), encoding="utf-8")
        else:
            print(f"{device.label}: not calibrated: {profile}")


def _path(device: Device, chosen: argparse.Namespace) -> Path:
    return Path(chosen.out.resolve() / f"profile-{device.label.replace(':', '-')}.json")


def _policies(graph: Any, inputs: dict[str, Any], outcome: Outcome, limits: Limits) -> dict[str, Any]:
    """Measure ONNX Runtime's own policies, where no device needs so long that the run would drag."""
    found: dict[str, Any] = {"name": outcome.name}
    expected: tuple[type[Exception], ...] = (RlxError, *runtime.engine_exceptions())
    for policy in POLICIES:
        if outcome.skipped:
            found[policy] = {"skipped": "a device was skipped"}
            continue
        try:
            median_ns, providers = measure_policy(policy, graph, inputs, 3 * limits.block_s)
            found[policy] = {"ns": median_ns, "providers": providers}
        except expected as err:
            found[policy] = {"skipped": str(err).splitlines()[0][:200]}
    return found


def _line(outcome: Outcome) -> str:
    cells = [f"{outcome.name:34}"]
    for label, predicted in outcome.predicted.items():
        measured = outcome.measured.get(label)
        cells.append(f"{label} {predicted / 1e3:9.1f} / {'-' if measured is None else f'{measured / 1e3:.1f}':>9} us")
    cells.append(f"-> {outcome.chosen}")
    return "  ".join(cells)


def _machine() -> dict[str, str]:
    from rlx_ort.providers.hardware import cpu_name, nvidia_gpus

    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "gpus": ", ".join(f"{gpu.name} (driver {gpu.driver})" for gpu in nvidia_gpus()),
        "engine": runtime.describe_runtime(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    main()
