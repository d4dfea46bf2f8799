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
import concurrent.futures
import contextlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
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
TURN_S, TURNS = 0.3, 9
PAUSE_S = {"cpu": 0.1, "cuda": 0.03}  # in the pause, threads of the one before stop spinning
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
    path, cuda, half = str(folder.parent / "model.onnx"), options.device == "cuda", options.precision == "f16"
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
        pairs = zip(run(), wanted.values(), strict=True)
        errors = [float(np.abs(got - want).max() / np.abs(want).max()) for got, want in pairs]
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


class Row:
    """A model at a batch: its folder with inputs and wanted outputs, a process for each way, and the line to print."""

    def __init__(self, name: str, batch: int, folder: Path, ends: contextlib.ExitStack) -> None:
        self.name, self.folder, self.ends = name, folder, ends
        self.workers: dict[str, Any] = {}
        self.line: dict[str, Any] = {"model": name, "batch": batch, "ms": {}, "error": {}, "ready_s": {}, "failed": {}}

    def start(self, kind: str) -> None:
        """Start the process of a way, which `work` is."""
        command = [sys.executable, __file__, *sys.argv[1:], "--only", self.name, "--worker", kind, str(self.folder)]
        with (self.folder / f"{kind}.log").open("w", encoding="utf-8") as log:
            worker = subprocess.Popen(command, text=True, bufsize=1, stdin=PIPE, stdout=PIPE, stderr=log)
        self.workers[kind] = self.ends.enter_context(worker)
        self.ends.callback(worker.kill)

    def answer(self, kind: str) -> Any:
        """Return what a process says next; one that has ended is out of the race."""
        if line := self.workers[kind].stdout.readline():
            return json.loads(line)
        log = (self.folder / f"{kind}.log").read_text(encoding="utf-8", errors="replace")
        self.line["failed"][kind] = log.strip().rpartition("\n")[2][:200]
        del self.workers[kind]
        return None

    def wait(self, *kinds: str) -> None:
        """Wait until processes are ready."""
        for kind in kinds:
            if ready := self.answer(kind):
                self.line["error"][kind], self.line["ready_s"][kind] = ready["error"], round(ready["ready_s"], 1)

    def race(self, plain: str, pause_s: float) -> dict[str, Any]:
        """Run the ways in turns, end them, and return the row."""
        turns: dict[str, list[float]] = {kind: [] for kind in self.workers}
        for turn in range(TURNS):
            for kind in list(self.workers)[:: 1 if turn % 2 else -1]:
                time.sleep(pause_s)
                self.workers[kind].stdin.write("go\n")
                if took := self.answer(kind):
                    turns[kind].append(took)
        self.line["ms"] = {kind: round(statistics.median(turns[kind]), 3) for kind in self.workers}
        self.line["best"] = min(self.workers.keys() - {"default", "tuned"}, key=lambda kind: self.line["ms"][kind])
        for title, ours, other in (("ratio", "tuned", self.line["best"]), ("default_over_plain", "default", plain)):
            if {ours, other} <= self.workers.keys():
                pairs = zip(turns[ours], turns[other], strict=True)
                self.line[title] = round(statistics.median(a / b for a, b in pairs), 3)
        self.ends.close()
        return self.line


def races(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield for each model and batch the milliseconds of each way, its error, and the time until it was ready."""
    half = (options.device, options.precision) == ("cuda", "f16")
    kinds = ["torch", "torch.compile", "onnxruntime", "default"]
    kinds += ["onnxruntime in f32", "its optimizer"] if half else []

    def prepared(name: str) -> list[Row]:
        """Export a model and start all ways but the tuned one."""
        built, seq, rows = architecture(name), TABLES["models"][name].get("seq", 1), list[Row]()
        model = user_models.export(built, options.exporter, None, arrays(built, 2, seq))
        for batch in map(int, options.batch.split(",")):
            folder = made / name / str(batch)
            folder.mkdir(parents=True)
            (folder.parent / "model.onnx").write_bytes(model.SerializeToString())
            feeds = arrays(built, batch, seq)
            np.savez(folder / "feeds.npz", **feeds)  # type: ignore[arg-type]  # the names of inputs
            np.savez(folder / "wanted.npz", *user_models.answers(built, feeds))
            rows.append(Row(name, batch, folder, ends.enter_context(contextlib.ExitStack())))
            for kind in kinds:
                rows[-1].start(kind)
        for row in rows:
            row.wait(*kinds)
        return rows

    names = options.only.split(",")
    with (
        tempfile.TemporaryDirectory() as temporary,
        contextlib.ExitStack() as ends,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        made = Path(temporary)
        ahead = options.device == "cuda"  # the next model gets ready beside the tuning, which needs few of the cores
        coming = pool.submit(prepared, names[0])
        for following in [*names[1:], None]:
            try:
                rows = coming.result()
            except Exception as error:  # whatever an exporter says of a model; the others are raced
                print(f"a model was not exported: {error!r:.300}", file=sys.stderr)
                rows = []
            if following and ahead:
                coming = pool.submit(prepared, following)
            for row in rows:
                row.start("tuned")
                row.wait("tuned")
            concurrent.futures.wait([coming])  # the races have the device for themselves
            for row in rows:
                yield row.race("onnxruntime in f32" if half else "onnxruntime", PAUSE_S[options.device])
            if following and not ahead:
                coming = pool.submit(prepared, following)


def arrays(built: user_models.Architecture, batch: int, seq: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return seeded inputs."""
    return {each.name: each.array({"batch": batch, "seq": seq}, at) for at, each in enumerate(built.inputs)}


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
    for row in races(options):
        ratios.setdefault(row["batch"], []).append(row.get("ratio", math.nan))
        print(json.dumps(row), flush=True)
    for batch, each in ratios.items():
        print(f"batch {batch}: tuned over the best other, geometric mean {statistics.geometric_mean(each):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
