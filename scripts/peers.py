"""Race models of PyTorch in `rlx_ort`, tuned and by default, against PyTorch itself and plain ONNX Runtime.

    python scripts/peers.py --device cuda --precision f16              eight models at batch 1 and 16
    python scripts/peers.py --device cpu --batch 1 --only minilm,resnet50,mobilenet

Host arrays go in and out. The others are PyTorch (eager, and `torch.compile`, with `reduce-overhead` on CUDA), ONNX
Runtime on the export, and on CUDA in f16 what its own optimizer for transformers makes of it, and ONNX Runtime without
TF32, over which our default is given. Each has a process of its own; they run in turns, and figures are medians over
the turns. Errors are of the largest value of an output, against PyTorch in f32 on the CPU. Needs PyTorch, transformers
and the devices' packages.
"""

# mypy: disable-error-code="misc"
# PyTorch has no types where these are checked, so nn.Module is Any.

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import torch
import transformers
import user_models  # makes the helpers of the tests known
from model_corpus import Input  # one of them
from torch import nn

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
EIGHT = ("bert", "minilm", "vit", "resnet50", "whisper", "detr", "unet", "llama")
TURN_S, PAUSE_S, TURNS = 0.3, 0.1, 9  # in the pause, threads of the one before stop spinning
Arrays = Mapping[str, "np.ndarray[Any, Any]"]
Run = Callable[[], list["np.ndarray[Any, Any]"]]


class Unet(nn.Module):
    """A small U-Net as of a diffusion model; transformers has none."""

    class Block(nn.Module):
        """Two convolutions, each after a normalised SiLU, around which the input is added."""

        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            sizes = ((before, after), (after, after))
            layers = [(nn.GroupNorm(16, size), nn.SiLU(), nn.Conv2d(size, to, 3, padding=1)) for size, to in sizes]
            self.body = nn.Sequential(*layers[0], *layers[1])
            self.skip = nn.Conv2d(before, after, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return as many pixels."""
            return self.skip(x) + self.body(x)

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256)
        self.first, self.last = nn.Conv2d(4, widths[0], 3, padding=1), nn.Conv2d(widths[0], 4, 3, padding=1)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(self.Block(before, after) for before, after in pairs)
        self.middle = self.Block(widths[-1], widths[-1])
        self.up = nn.ModuleList(self.Block(2 * after, before) for before, after in reversed(pairs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the noise of an image."""
        x, kept = self.first(x), []
        for block in self.down:
            kept.append(x := nn.functional.avg_pool2d(block(x), 2))
        x = self.middle(x)
        for block, other in zip(self.up, reversed(kept), strict=True):
            x = nn.functional.interpolate(block(torch.cat([x, other], 1)), scale_factor=2.0)
        return self.last(x)


def architecture(name: str) -> user_models.Architecture:
    """Return a model with random weights, the same ones in each process."""
    torch.manual_seed(0)
    user_models.TABLES["inputs"] |= TABLES["inputs"]
    table = TABLES["models"][name]
    if table["class"] != "Unet":
        built = user_models.of_table(table)
    else:
        inputs = tuple(Input(**TABLES["inputs"][each]) for each in table["inputs"])
        built = user_models.Architecture(Unet(), inputs, ("noise",), ())
    built.model.eval()
    return built


def way(kind: str, name: str, folder: Path, feeds: Arrays, options: argparse.Namespace) -> Run:
    """Return a call that runs a model on host arrays in one of the ways."""
    path, cuda, half = str(folder / "model.onnx"), options.device == "cuda", options.precision == "f16"
    if kind in ("default", "tuned"):
        import rlx_ort

        precision = rlx_ort.Precision(options.precision if kind == "tuned" else "f32")
        runner = rlx_ort.load(path, options=rlx_ort.CompileOptions(precision=precision))
        if kind == "tuned":
            runner.tune(feeds, options.device, tolerance=options.tolerance, budget_s=options.budget)
        return lambda: list(runner.run(options.device, feeds))
    if kind in ("onnxruntime", "onnxruntime in f32", "its optimizer"):
        import onnxruntime

        if cuda:
            onnxruntime.preload_dlls()
        model: Any = path
        if kind == "its optimizer":
            from onnxruntime.transformers.optimizer import optimize_model

            optimized = optimize_model(path, TABLES["models"][name].get("optimizer", "bert"), use_gpu=True, opt_level=0)
            optimized.convert_float_to_float16(keep_io_types=True)
            model = optimized.model.SerializeToString()
        exact = {"use_tf32": "0"} if kind.endswith("f32") or not half else {}
        provider = ("CUDAExecutionProvider", exact) if cuda else "CPUExecutionProvider"
        session = onnxruntime.InferenceSession(model, providers=[provider])
        return lambda: session.run(None, dict(feeds))
    module = architecture(name).model.to(options.device, torch.float16 if half else torch.float32)
    called = torch.compile(module, mode="reduce-overhead" if cuda else None) if kind == "torch.compile" else module

    def run() -> list[np.ndarray[Any, Any]]:
        with torch.inference_mode():
            given = [torch.from_numpy(array).to(options.device) for array in feeds.values()]
            outputs = called(*[each.half() if half and each.is_floating_point() else each for each in given])
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return [each.float().cpu().numpy() for each in outputs]

    return run


def work(kind: str, name: str, folder: Path, options: argparse.Namespace) -> None:
    """Say how far a way's outputs are off, then run it for a turn for each line of standard input."""
    with np.load(folder / "feeds.npz") as feeds, np.load(folder / "wanted.npz") as wanted:
        begun = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):  # the optimizer prints
            run = way(kind, name, folder, dict(feeds), options)
        errors = [
            float(np.abs(got - want).max() / np.abs(want).max())
            for got, want in zip(run(), wanted.values(), strict=True)
        ]
    for _ in range(20):
        run()
    print(json.dumps({"error": max(errors), "ready_s": time.perf_counter() - begun}), flush=True)
    for _ in sys.stdin:
        run()  # the caches have the others' data
        times, end = list[float](), time.perf_counter() + TURN_S
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        print(json.dumps(1000 * statistics.median(times)), flush=True)


def races(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield for each batch the milliseconds of each way, its error, and the time until it was ready, or its failure."""
    kinds = ["torch", "torch.compile", "onnxruntime", "default"]
    kinds += ["onnxruntime in f32", "its optimizer"] if (options.device, options.precision) == ("cuda", "f16") else []
    built, seq = architecture(name), TABLES["models"][name].get("seq", 1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = user_models.export(built, options.exporter, None, arrays(built, 2, seq))
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        for batch in map(int, options.batch.split(",")):
            feeds = arrays(built, batch, seq)
            np.savez(folder / "feeds.npz", **feeds)  # type: ignore[arg-type]  # the names of inputs
            np.savez(folder / "wanted.npz", *user_models.answers(built, feeds))
            yield {"model": name, "batch": batch, **raced(name, folder, kinds)}


def arrays(built: user_models.Architecture, batch: int, seq: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return seeded inputs."""
    return {each.name: each.array({"batch": batch, "seq": seq}, at) for at, each in enumerate(built.inputs)}


def raced(name: str, folder: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Race a model in several ways and tuned; the tuning has the device for itself."""
    row: dict[str, Any] = {"ms": {}, "error": {}, "ready_s": {}, "failed": {}}
    workers: dict[str, Any] = {}
    with contextlib.ExitStack() as ends:
        for group in (kinds, ["tuned"]):
            begun = {kind: worker_of(kind, name, folder) for kind in group}
            for kind, worker in begun.items():
                ends.enter_context(worker)
                ends.callback(worker.kill)
                if line := worker.stdout.readline():
                    workers[kind], ready = worker, json.loads(line)
                    row["error"][kind], row["ready_s"][kind] = ready["error"], round(ready["ready_s"], 1)
                else:
                    log = (folder / f"{kind}.log").read_text(encoding="utf-8", errors="replace")
                    row["failed"][kind] = log.strip().rpartition("\n")[2][:200]
        turns: dict[str, list[float]] = {kind: [] for kind in workers}
        for turn in range(TURNS):
            for kind, worker in list(workers.items())[:: 1 if turn % 2 else -1]:
                time.sleep(PAUSE_S)
                worker.stdin.write("go\n")
                turns[kind].append(json.loads(worker.stdout.readline()))
    row["ms"] = {kind: round(statistics.median(times), 3) for kind, times in turns.items()}
    row["best"] = min(turns.keys() - {"default", "tuned"}, key=lambda kind: row["ms"][kind])
    plain = "onnxruntime in f32" if "onnxruntime in f32" in kinds else "onnxruntime"
    for title, ours, other in (("ratio", "tuned", row["best"]), ("default_over_plain", "default", plain)):
        row[title] = round(statistics.median(a / b for a, b in zip(turns[ours], turns[other], strict=True)), 3)
    return row


def worker_of(kind: str, name: str, folder: Path) -> Any:
    """Start the process of a way, which `work` is."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--worker", kind, str(folder)]
    with (folder / f"{kind}.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(command, text=True, bufsize=1, stdin=PIPE, stdout=PIPE, stderr=log)


def main() -> int:
    """Race the models that the command line names, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("f32", "f16"), default="f32", help="the lowest that all may compute in")
    parser.add_argument("--tolerance", type=float, help="of `tune`; default: that of the precision")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of `tune`")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--only", default=",".join(EIGHT), help=f"of {', '.join(TABLES['models'])}")
    parser.add_argument("--exporter", choices=("torchscript", "dynamo"), default="dynamo")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - TABLES["models"].keys():
        parser.error(f"there is no model {', '.join(sorted(unknown))}; there are {', '.join(TABLES['models'])}")
    if not all(each.isdigit() and int(each) > 0 for each in options.batch.split(",")):
        parser.error(f"--batch {options.batch} is no list of sizes, such as 1,16")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA device here")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if options.worker:
        work(options.worker[0], options.only, Path(options.worker[1]), options)
        return 0
    ratios: dict[int, list[float]] = {}
    for name in options.only.split(","):
        for row in races(name, options):
            ratios.setdefault(row["batch"], []).append(row["ratio"])
            print(json.dumps(row), flush=True)
    for batch, each in ratios.items():
        print(f"batch {batch}: tuned over the best other, geometric mean {statistics.geometric_mean(each):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
