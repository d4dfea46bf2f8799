"""Measure the server: start, overhead of a request, and batching.

    python scripts/serve_figures.py --out serving.json
    python scripts/serve_figures.py --devices cuda --layers 12 --width 768 --tokens 64
    python scripts/serve_figures.py --parts startup --layers 12 --width 768
    python scripts/serve_figures.py --models FILE.onnx,encoder --clients 64

Servers are `rlx-ort serve` in processes of their own. Compared things run in turns, so that a busy machine slows
both; each ratio is the median over rounds. tritonclient measures latency. Throughput is measured by clients that send
prepared HTTP requests and read answers without decoding them, since tritonclient takes more time than the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "helpers")]

from served_models import started_command  # noqa: E402  # a helper of the tests

from figures.graphs import Maker  # noqa: E402
from figures.record import Figure, in_turns, machine, process_seconds, seconds_of, show  # noqa: E402
from rlx_ort.converters.files import save_onnx  # noqa: E402
from rlx_ort.deploy.create import Recipe, create_package  # noqa: E402
from rlx_ort.deploy.open import load, warm_package  # noqa: E402
from rlx_ort.device import Device  # noqa: E402
from rlx_ort.ir.dtype import DType  # noqa: E402

_WIDTH, _VOCABULARY = 768, 1024
_DTYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}
_LEAST_GAIN = {"product": 3.0, "encoder": 1.3}  # of batching on the CPU
_GPU_GAIN = 5.0
_FIRST = "; import numpy, os; run({'ids': numpy.zeros((1, int(sys.argv[2])), numpy.int64)}); os._exit(0)"
_START = f"import sys; from rlx_ort.deploy.start import start_package; run = start_package(sys.argv[1]).run{_FIRST}"
_PLAIN = (
    "import sys, onnxruntime; session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider']); "
    f"run = lambda feeds: session.run(None, feeds){_FIRST}"
)


def save_models(folder: Path, layers: int, width: int, tokens: int) -> None:
    """Write a product and an encoder of token ids."""
    make = Maker("product")
    make.graph.outputs = [make.graph.input("x", ["batch", _WIDTH]) @ make.weight(_WIDTH, _WIDTH)]
    save_onnx(make.graph, folder / "product.onnx")
    make = Maker("encoder")
    ids = make.graph.input("ids", ["batch", tokens], DType.I64)
    x = make.graph.gather(make.weight(_VOCABULARY, width, scale=1.0), ids, 0) + make.weight(tokens, width, scale=0.1)
    make.graph.outputs = [make.graph.mean(make.encoder(make.norm(x, width), width, width // 64, layers), [1])]
    save_onnx(make.graph, folder / "encoder.onnx")


@contextlib.contextmanager
def server(folder: Path, args: argparse.Namespace, *more: str) -> Iterator[tuple[str, str]]:
    """Run `rlx-ort serve` on the devices of the command line, and yield its REST and gRPC addresses."""
    given = [str(folder), "--only", args.devices, "--precision", args.precision, "--queue", "4096", *more]
    process, *addresses = started_command(given)
    try:
        yield addresses[0], addresses[1]
    finally:
        process.kill()
        process.wait()


def tensors_of(address: str, model: str, tokens: int) -> list[tuple[str, str, Any]]:
    """Return name, datatype and data of each input of a model, one row; other sizes that vary are `tokens`."""
    from tritonclient import http

    draw = np.random.default_rng(1)
    given = []
    for entry in http.InferenceServerClient(address).get_model_metadata(model)["inputs"]:
        shape = [1, *(int(size) if int(size) > 0 else tokens for size in entry["shape"][1:])]
        dtype = _DTYPES[entry["datatype"]]
        data = draw.standard_normal(shape) if dtype == np.float32 else draw.integers(0, 2, shape)
        given.append((entry["name"], entry["datatype"], data.astype(dtype)))
    return given


def caller(kind: str, address: str, model: str, tensors: Sequence[tuple[str, str, Any]]) -> Callable[[], object]:
    """Return a function that makes one request by tritonclient, `kind` being `http` or `grpc`."""
    from tritonclient import grpc, http

    library: Any = http if kind == "http" else grpc
    client = library.InferenceServerClient(address)
    inputs = []
    for name, datatype, data in tensors:
        inputs.append(library.InferInput(name, list(data.shape), datatype))
        inputs[-1].set_data_from_numpy(data)
    if kind == "grpc":
        return lambda: client.infer(model, inputs).get_response()
    output = client.get_model_metadata(model)["outputs"][0]["name"]
    return lambda: client.infer(model, inputs).as_numpy(output)


def overhead(folder: Path, args: argparse.Namespace, rounds: int) -> Iterator[Figure]:
    """Yield single requests of one client against runs without a server."""
    compiled = load(folder / "product.onnx").compile("cpu")
    with server(folder, args) as addresses:
        tensors = tensors_of(addresses[0], "product", args.tokens)
        feeds = {name: data for name, _, data in tensors}
        calls: dict[str, Callable[[], object]] = {"direct": lambda: compiled.run(feeds)}
        for kind, address in zip(("http", "grpc"), addresses, strict=True):
            calls[kind] = caller(kind, address, "product", tensors)
        times = in_turns(*(partial(_median_ms, call) for call in calls.values()), rounds=rounds, warm=1)
    p50 = dict(zip(calls, map(lower, times), strict=True))
    detail = ", ".join(f"{name} {value:.3f}" for name, value in p50.items())
    yield Figure("HTTP binary over CompiledGraph.run, p50", p50["http"] - p50["direct"], "ms", 0.5, detail)
    yield Figure("gRPC over CompiledGraph.run, p50", p50["grpc"] - p50["direct"], "ms")


def _median_ms(call: Callable[[], object]) -> float:
    return statistics.median(seconds_of(call) for _ in range(200)) * 1e3


def batching(folder: Path, args: argparse.Namespace) -> Iterator[Figure]:
    """Yield batching against single runs, with many clients and with one."""
    from tritonclient import http

    with server(folder, args) as (batched, _), server(folder, args, "--max-batch", "1") as (single, _):
        for model in (Path(name).stem for name in args.models.split(",")):
            body = infer_bytes(batched, model, tensors_of(batched, model, args.tokens))
            many = [_loads((batched, single), body, args.clients, args.seconds) for _ in range(1 + args.rounds)][1:]
            one = [_loads((batched, single), body, 1, args.seconds / 2) for _ in range(args.rounds)]
            rates = [max(each["rate"] for each in side) for side in zip(*many, strict=True)]
            p95 = [lower([each["p95"] for each in side]) for side in zip(*many, strict=True)]
            stats = http.InferenceServerClient(batched).get_inference_statistics(model)["model_stats"][0]
            rows = int(stats["inference_count"]) / max(1, int(stats["execution_count"]))
            detail = f"{rates[0]:.0f} and {rates[1]:.0f}/s, p95 {p95[0]:.1f} and {p95[1]:.1f} ms, "
            detail += f"{rows:.1f} rows a batch"
            ratio = statistics.median(two["rate"] / one["rate"] for one, two in many)
            least = _LEAST_GAIN.get(model) if args.devices == "cpu" else _GPU_GAIN
            title = f"{model}: requests/s of {args.clients} clients, single over batched"
            yield Figure(title, ratio, "of it", 1 / least if least else None, detail)
            ratio = statistics.median(ours["p50"] / theirs["p50"] for ours, theirs in one)
            detail = f"{lower([ours['p50'] for ours, _ in one]):.3f} ms"
            yield Figure(f"{model}: latency of one client, batched over single, p50", ratio, "times", 1.05, detail)


def _loads(addresses: Sequence[str], body: bytes, clients: int, seconds: float) -> list[dict[str, float]]:
    """Return the loads of servers, one after the other."""
    return [asyncio.run(under_load(address, body, clients, seconds)) for address in addresses]


def infer_bytes(address: str, model: str, tensors: Sequence[tuple[str, str, Any]]) -> bytes:
    """Return a whole HTTP request with binary data."""
    entries = [
        {"name": name, "shape": data.shape, "datatype": kind, "parameters": {"binary_data_size": data.nbytes}}
        for name, kind, data in tensors
    ]
    head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(data.tobytes() for *_, data in tensors)
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", f"Host: {address}"]
    lines += [f"Inference-Header-Content-Length: {len(head)}", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


async def under_load(address: str, request: bytes, clients: int, seconds: float) -> dict[str, float]:
    """Return requests a second and latencies in ms of so many clients that each wait for their answer."""
    host, port = address.rsplit(":", 1)
    times: list[float] = []
    begun = time.perf_counter()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while (sent := time.perf_counter()) < begun + seconds:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.split(b"\r\ncontent-length:")[1].split(b"\r\n")[0]))
            if head[9:12] != b"200":
                raise SystemExit(f"{address} answered {head!r}")
            times.append((time.perf_counter() - sent) * 1e3)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    rate = len(times) / (time.perf_counter() - begun)
    return {"rate": rate, "p50": float(np.percentile(times, 50)), "p95": float(np.percentile(times, 95))}


def startup(folder: Path, tokens: int, rounds: int) -> Iterator[Figure]:
    """Yield the time of processes until they are ready: `start_package` over ONNX Runtime, servers over it."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode, so the checkout may too
    path = folder / "startup.ortpackage"
    create_package(load(folder / "encoder.onnx").graph, path, Recipe(), folder=True)
    warm_package(path, [Device.CPU])
    model = str(folder / "encoder.onnx")
    kinds: dict[str, Callable[[], float]] = {
        "InferenceSession": lambda: process_seconds("-P", "-c", _PLAIN, model, str(tokens)),
        "start_package": lambda: process_seconds("-P", "-c", _START, str(path), str(tokens)),
        "REST": lambda: _ready_seconds(path, "0"),
        "REST alone": lambda: _ready_seconds(path, "-1"),
    }
    times = dict(zip(kinds, in_turns(*kinds.values(), rounds=rounds), strict=True))
    detail = ", ".join(f"{kind} {statistics.median(taken):.3f} s" for kind, taken in times.items())
    over = {"start_package": ("InferenceSession", 0.5)} | dict.fromkeys(("REST", "REST alone"), ("start_package", 1.3))
    for kind, (base, target) in over.items():
        ratio = statistics.median(a / b for a, b in zip(times[kind], times[base], strict=True))
        yield Figure(f"startup: {kind} ready, over the first result of {base}", ratio, "times", target, detail)


def _ready_seconds(path: Path, grpc: str) -> float:
    """Return the time until `/v2/health/ready` of a new server is 200."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-P", "-c", "from rlx_ort.cli import main; main()", "serve", str(path)]
    begun = time.perf_counter()
    process = subprocess.Popen([*serve, "--grpc", grpc, "--http", str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError):
                connection = HTTPConnection("127.0.0.1", port)
                connection.request("GET", "/v2/health/ready")
                if connection.getresponse().status == 200:
                    return time.perf_counter() - begun
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()


def lower(values: Sequence[float]) -> float:
    """Return the lower quartile, which other work on the machine disturbs least."""
    return float(np.percentile(values, 25))


def figures(args: argparse.Namespace) -> Iterator[Figure]:
    """Yield the figures of the parts that the command line names."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, parts = Path(temporary), args.parts.split(",")
        save_models(folder, args.layers, args.width, args.tokens)
        for path in filter(Path.exists, map(Path, args.models.split(","))):
            shutil.copy(path, folder)
        if "startup" in parts:
            yield from startup(folder, args.tokens, 2 * args.rounds)
        if "overhead" in parts:
            yield from overhead(folder, args, 2 * args.rounds)
        if "batching" in parts:
            yield from batching(folder, args)


def measure() -> Iterator[Figure]:
    """Yield the figures that `bench.py` has."""
    return figures(_parser().parse_args(["--seconds", "2", "--rounds", "3"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="overhead,batching", help="of startup, overhead, batching")
    parser.add_argument("--devices", default="cpu", help="cpu,cuda and so on, which serve together")
    parser.add_argument("--models", default="product,encoder", help="the models of batching; ONNX files too")
    parser.add_argument("--clients", type=int, default=64, help="of batching")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--precision", default="f32", help="in which the server computes: f32, tf32, f16, bf16")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    return parser


def main() -> int:
    """Measure, print the figures, and write them; return 1 when a target is missed."""
    args = _parser().parse_args()
    facts = machine()
    shown, kept = itertools.tee(figures(args))
    missed = show(shown, "serve")
    if args.out:
        rows = [{**vars(figure), "ok": figure.ok} for figure in kept]
        document = {"machine": facts, "arguments": sys.argv[1:], "figures": rows}
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
