"""`rlx-ort calibrate`: measure the devices of this machine, which predictions then use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import click

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import bar, duration, emit, note, print_table, progress

_Measured: TypeAlias = "rlx_ort.CalibrationProfile | rlx_ort.RlxError"


@options.command("calibrate")
def command(
    model: Path | None = options.model(required=False),
    dims: dict[str, int] = options.DIMS,
    names: str | None = options.devices("--device --devices --only", "Measure these devices. Default: all that work."),
    quick: bool = options.flag("--quick", "Measure fewer sizes: at most 3 seconds a device instead of 8."),
    show_only: bool = options.flag("--show", "Show the stored calibrations and measure nothing."),
    as_json: bool = options.AS_JSON,
) -> None:
    """Measure how fast the devices of this machine are, or the kernels that MODEL needs of them.

    With MODEL, a device that has a profile is only measured for the operators of the model that the profile lacks, in 2
    seconds at most. Sizes of named dims come from --dim.

    Profiles are kept in the cache folder and used by every later prediction. A new ONNX Runtime, driver or card is
    measured again. Close other programs first: their load would falsify the measurement.
    """
    devices = options.each_once(rlx_ort.parse_device_list(names)) if names else _here()
    if dims and model is None:
        raise click.UsageError("--dim is for a model; give its file")
    if show_only:
        profiles = {device: _stored(device) for device in devices}
    elif model is None:
        profiles = _measured(devices, quick)
    else:
        profiles = {device: _measured_for(model, dims, device, quick) for device in devices}
    rows = [_row(device, profile) for device, profile in profiles.items()]
    errors = [profile for profile in profiles.values() if isinstance(profile, rlx_ort.RlxError)]
    emit({"devices": rows}, as_json, _print)
    if errors and len(errors) == len(rows):
        if not show_only:
            raise errors[0]
        if not as_json:
            note("nothing is stored; run `rlx-ort calibrate`")
    _check_kept(profiles)


def _check_kept(profiles: Mapping[rlx_ort.Device, _Measured]) -> None:
    """Raise `WriteError` if a profile could not be written, which leaves nothing behind when the command ends."""
    from rlx_ort.calibration import store
    from rlx_ort.storage import cache_root

    measured = [(at, row) for at, row in profiles.items() if not isinstance(row, rlx_ort.RlxError)]
    if lost := [at.label for at, profile in measured if not store.kept(profile)]:
        hint = "check the folder and its rights, or name another in RLX_CACHE_DIR"
        raise rlx_ort.WriteError(f"the calibration of {', '.join(lost)} cannot be written to {cache_root()}; {hint}")


def _here() -> list[rlx_ort.Device]:
    """Return every device that works here and the `RLX_*` variables allow, also the later ones of a kind; each once."""
    from rlx_ort.providers.registry import is_available, is_selectable, known_devices

    known = known_devices(rlx_ort.DevicePolicy.from_env().allows)
    return options.each_once((at for at in known if is_available(at) and is_selectable(at)), named=False)


def _measured(devices: Iterable[rlx_ort.Device], quick: bool) -> dict[rlx_ort.Device, _Measured]:
    from rlx_ort.calibration.calibrate import calibrate_together

    with bar("measuring", 1.0) as show:

        def shown_progress(device: rlx_ort.Device, what: str, gone: float) -> None:
            if show is not None:
                show(gone, f"measuring {device.label}: {what}")

        return calibrate_together(devices, quick=quick, progress=shown_progress)


def _measured_for(model: Path, dims: dict[str, int], device: rlx_ort.Device, quick: bool) -> _Measured:
    graph, settings = options.read_model(model, rlx_ort.CompileOptions(dims=dims))
    try:
        with progress(f"measuring {device.label} for {model.name}"):
            return rlx_ort.calibrate(device, graph=graph, dims=settings.dims, quick=quick)
    except rlx_ort.RlxError as err:
        return err


def _stored(device: rlx_ort.Device) -> _Measured:
    from rlx_ort.calibration import store

    stored = store.find(device)
    return stored.profile or rlx_ort.CalibrationError(f"{device.display}: {stored.reason}")


def _row(device: rlx_ort.Device, profile: _Measured) -> dict[str, Any]:
    from rlx_ort.calibration.model import MeasuredCostModel

    if isinstance(profile, rlx_ort.RlxError):
        return {"device": device.label, "profile": None, "reason": str(profile)}
    shown: dict[str, Any] = {"device": device.label, "profile": json.loads(profile.to_json()), "reason": ""}
    try:
        model = MeasuredCostModel(device, profile)
    except rlx_ort.CalibrationError as err:
        return shown | {"reason": str(err)}
    return shown | {
        "noisy_rows": len(profile.noisy_rows),
        "roundtrip_ns": next(row.ns for row in profile.rows if row.kernel == "run"),
        "dispatch_ns": model.dispatch_overhead_ns(),
        "gemm_gflops": max(
            2.0 * row.size[0] * row.size[1] / row.ns
            for row in profile.rows
            if row.kernel == "MatMul" and row.dtype == "f32" and row.ns > 0
        ),
        "memory_bytes_per_ns": model.memory_bw(),
    }


def _print(document: dict[str, Any]) -> None:
    table: list[tuple[object, ...]] = []
    noisy = []
    for row in document["devices"]:
        if "gemm_gflops" not in row:
            table.append((row["device"], *["-"] * 5, row["reason"]))
            continue
        profile = row["profile"]
        key, count = profile["key"], len(profile["rows"])
        times = (duration(row["roundtrip_ns"]), duration(row["dispatch_ns"]))
        rates = (f"{row['gemm_gflops']:.4g} GFLOP/s", f"{row['memory_bytes_per_ns']:.3g} GB/s")
        origin = filter(None, (key["hardware"], key["identity"], key["engine"], profile["measured"][:10]))
        table.append((row["device"], *times, *rates, f"{count}, {row['noisy_rows']} noisy", ", ".join(origin)))
        if 4 * row["noisy_rows"] > count:
            noisy.append(row["device"])
    print_table(("device", "round trip", "a node", "best product", "memory", "rows", "of"), table)
    if noisy:
        note(f"much of {', '.join(noisy)} was noisy: something else is running; calibrate again on an idle machine")
