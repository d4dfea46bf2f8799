"""What an accelerator must show, run on a machine that has one: parity, placement, refusals, memory limit.

python scripts/gpu_checks.py --out FOLDER [--devices cuda,webgpu]

Writes checks.json and prints a line for each check. Every output is compared with the CPU's, strictly placed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import rlx_ort
from rlx_ort.providers.diagnosis import diagnose
from rlx_ort.providers.registry import default_registry

F32_BOUND = 1e-4
TF32_BOUND = 5e-3


def main() -> int:
    """Run every check on every device and return 0 when all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", default="cuda,webgpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for device in options.devices.split(","):
        for name, check in CHECKS.items():
            rows.append({"device": device, "check": name, **outcome(check, device)})
            print("ok  " if rows[-1]["ok"] else "FAIL", device, name, rows[-1]["detail"], flush=True)
    document = {"machine": machine(), "findings": [str(finding) for finding in diagnose()], "checks": rows}
    (options.out / "checks.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


def outcome(check: Callable[[str], str], device: str) -> dict[str, Any]:
    """Return whether a check passed and what it said."""
    try:
        return {"ok": True, "detail": check(device)}
    except (rlx_ort.RlxError, AssertionError) as err:
        return {"ok": False, "detail": f"{type(err).__name__}: {err}"[:600]}


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    import onnxruntime

    found = {device.label: default_registry().availability(device) for device in rlx_ort.Device.all()}
    working = {label: f"{a.hardware}, driver {a.driver}" for label, a in found.items() if a.available}
    return {"python": platform.python_version(), "onnxruntime": onnxruntime.__version__, "devices": working}


def relative(got: Any, want: Any) -> float:
    """Return the relative error in norm, in float64."""
    want = np.asarray(want, np.float64)
    size = float(np.linalg.norm(want))
    return float(np.linalg.norm(np.asarray(got, np.float64) - want)) / max(size, 1e-30)


def graphs() -> Iterator[tuple[str, rlx_ort.Graph, dict[str, Any]]]:
    """Yield a product, an attention in each mask kind, a convolution and norms, with inputs."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    g = rlx_ort.Graph("product")
    g.outputs = [g.gelu(g.input("x", ["rows", 256]) @ g.param("w", [256, 512], data=normal(256, 512)))]
    yield "product", g, {"x": normal(64, 256)}
    for mask in ("none", "causal", "sliding:3"):
        g = rlx_ort.Graph(f"attention {mask}")
        q, k, v = (g.input(name, ["batch", size, 64]) for name, size in (("q", 5), ("k", 9), ("v", 9)))
        g.outputs = [g.attention_kind(q, k, v, num_heads=4, head_dim=16, mask_kind=mask)]
        yield g.name, g, {"q": normal(2, 5, 64), "k": normal(2, 9, 64), "v": normal(2, 9, 64)}
    for mask in ("none", "causal"):  # lengths at which kernels change to their flash forms
        g = rlx_ort.Graph(f"long attention {mask}")
        q, k, v = (g.input(name, [2, 64, 64]) for name in "qkv")
        g.outputs = [g.attention_kind(q, k, v, num_heads=4, head_dim=16, mask_kind=mask)]
        yield g.name, g, {"q": normal(2, 64, 64), "k": normal(2, 64, 64), "v": normal(2, 64, 64)}
    g = rlx_ort.Graph("norms")
    x = g.input("x", ["rows", 128])
    ones, zeros = (g.constant(np.full(128, value, np.float32)) for value in (1.0, 0.0))
    g.outputs = [g.silu(g.rms_norm(g.layer_norm(x, ones, zeros), ones, zeros))]
    yield "norms", g, {"x": normal(16, 128)}


def parity(device: str) -> str:
    """Compare every graph with the CPU, placed strictly."""
    errors = {}
    for name, graph, inputs in graphs():
        runner = rlx_ort.GraphDevices(graph)
        [want], [got] = runner.run("cpu", inputs), runner.run(device, inputs)
        errors[name] = relative(got, want)
        assert errors[name] <= F32_BOUND, f"{name}: {errors[name]}"
        assert runner.placement(device).requested_share == 1.0, f"{name} is not wholly on {device}"
    return f"largest relative error {max(errors.values()):.2e} over {len(errors)} graphs"


def tf32_on_request(device: str) -> str:
    """F32 products are exact to F32 unless TF32 is asked for."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal((512, 512)).astype(np.float32)
    g = rlx_ort.Graph("square")
    x = g.input("x", [512, 512])
    g.outputs = [x @ x]
    want = a.astype(np.float64) @ a
    errors = []
    for precision in (rlx_ort.Precision.F32, rlx_ort.Precision.TF32):
        runner = rlx_ort.GraphDevices(g, options=rlx_ort.CompileOptions(precision=precision))
        errors.append(relative(runner.run(device, {"x": a})[0], want))
    assert errors[0] <= 1e-5, f"f32 has error {errors[0]}"
    assert errors[1] <= TF32_BOUND, f"tf32 has error {errors[1]}"
    return f"f32 {errors[0]:.1e}, tf32 {errors[1]:.1e}"


def shared_updates(device: str) -> str:
    """A parameter that is set after a run is seen by the next run."""
    g = rlx_ort.Graph("update")
    g.outputs = [g.input("x", [4]) * g.param("w", [4], data=np.ones(4, np.float32))]
    runner = rlx_ort.GraphDevices(g)
    feeds = {"x": np.arange(4, dtype=np.float32)}
    before = runner.run(device, feeds)[0]
    runner.set_param("w", np.full(4, 3, np.float32))
    after = runner.run(device, feeds)[0]
    assert np.array_equal(after, before * 3)
    return "the new value is used"


def handles(device: str) -> str:
    """A state that stays on the device counts as a loop by hand does."""
    g = rlx_ort.Graph("counter")
    state = g.input("state", [8])
    g.outputs = [state + g.input("x", [8])]
    compiled = rlx_ort.Session(device).compile(g)
    compiled.bind_gpu_handle("state", np.zeros(8, np.float32))
    compiled.set_gpu_handle_feed("state", 0)
    for _ in range(5):
        compiled.run({"x": np.ones(8, np.float32)})
    found = compiled.read_gpu_handle("state")
    assert found is not None, "the state is gone"
    assert np.array_equal(found, np.full(8, 5, np.float32)), f"{found}"
    return "five steps on the device"


def memory_limit(device: str) -> str:
    """A run beyond the memory limit of CUDA is a typed error, and the graph stays usable."""
    if not device.startswith("cuda"):
        return "only CUDA has a limit"
    g = rlx_ort.Graph("large")
    x = g.input("x", ["n", 1024])
    g.outputs = [(x @ g.transpose(x, [1, 0])).sum([1])]
    options = rlx_ort.CompileOptions(device_memory_limit_bytes=64 << 20)
    compiled = rlx_ort.Session(device, options).compile(g)
    small = np.ones((16, 1024), np.float32)
    want = compiled.run({"x": small})[0]
    try:
        compiled.run({"x": np.zeros((16384, 1024), np.float32)})
    except rlx_ort.EngineError as err:
        assert np.array_equal(compiled.run({"x": small})[0], want)
        return str(err)[:100]
    raise AssertionError("a gigabyte fitted into 64 MiB")


CHECKS: dict[str, Callable[[str], str]] = {
    "parity": parity,
    "tf32 on request": tf32_on_request,
    "updates": shared_updates,
    "handles": handles,
    "memory limit": memory_limit,
}

if __name__ == "__main__":
    sys.exit(main())
