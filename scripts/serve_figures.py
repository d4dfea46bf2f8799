"""Measure the server: start, overhead of a request, batching, and a soak with a device that fails.

    python scripts/serve_figures.py --out serving.json
    python scripts/serve_figures.py --devices cuda --layers 12 --width 768 --tokens 64
    python scripts/serve_figures.py --parts startup --layers 12 --width 768
    python scripts/serve_figures.py --soak 300

Servers and clients run in processes of their own. What is compared runs in turns, so that a busy machine slows both;
each ratio is the median over rounds. tritonclient measures latency. Throughput is measured by a client that sends
prepared HTTP requests and reads answers without decoding them, since tritonclient takes more time than the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__)
_PRODUCT_WIDTH = 768
_VOCABULARY = 1024
_CLIENTS = 64
_ALL_SERVERS = {"precision": "f32"}  # settings that the command line gives
_DTYPES = {"FP32": np.float32, "INT64": np.int64}


# --- models


def save_models(folder: Path, layers: int, width: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Write the product and the encoder, and return the input of each: name, shape and datatype."""
    from rlx_ort.converters.files import save_onnx
    from rlx_ort.ir.dtype import DType
    from rlx_ort.ir.graph import Graph

    draw = np.random.default_rng(0)
    graph = Graph("product")

    def weight(*shape: int, scale: float | None = None) -> Any:
        data = (draw.standard_normal(shape) * (shape[0] ** -0.5 if scale is None else scale)).astype(np.float32)
        return graph.param(f"w{len(graph.params)}", list(shape), data=data)

    x = graph.input("x", ["batch", _PRODUCT_WIDTH])
    graph.outputs = [x @ weight(_PRODUCT_WIDTH, _PRODUCT_WIDTH)]
    save_onnx(graph, folder / "product.onnx")

    graph = Graph("encoder")

    def dense(x: Any, wide: int, narrow: int) -> Any:
        return x @ weight(wide, narrow) + weight(narrow, scale=0.1)

    def norm(x: Any) -> Any:
        return graph.layer_norm(x, weight(width, scale=1.0), weight(width, scale=0.1))

    ids = graph.input("ids", ["batch", tokens], DType.I64)
    x = norm(graph.gather(weight(_VOCABULARY, width, scale=1.0), ids, 0) + weight(tokens, width, scale=0.1))
    for _ in range(layers):
        q, k, v = (dense(x, width, width) for _ in range(3))
        x = norm(x + dense(graph.attention_kind(q, k, v, width // 64, 64, "none"), width, width))
        x = norm(x + dense(graph.gelu(dense(x, width, 4 * width)), 4 * width, width))
    graph.outputs = [graph.mean(x, [1])]
    save_onnx(graph, folder / "encoder.onnx")
    return {
        "product": {"name": "x", "shape": [1, _PRODUCT_WIDTH], "datatype": "FP32"},
        "encoder": {"name": "ids", "shape": [1, tokens], "datatype": "INT64"},
    }


def made(tensor: Mapping[str, Any]) -> Any:
    """Return data for an input."""
    draw = np.random.default_rng(1)
    if tensor["datatype"] == "INT64":
        return draw.integers(0, _VOCABULARY, tensor["shape"])
    return draw.standard_normal(tensor["shape"]).astype(_DTYPES[tensor["datatype"]])


# --- processes


class Child:
    """A process of this script in another role; lines of JSON go in and come out."""

    def __init__(self, role: str, python: str = sys.executable, **settings: Any) -> None:
        command = [python, str(HERE), "--role", role, json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.hello = self._read()

    def ask(self, **what: Any) -> Any:
        """Send a command and return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        """Close its input and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
        raise SystemExit("a process of the measurement ended; see its error above")


@contextlib.contextmanager
def child(role: str, python: str = sys.executable, **settings: Any) -> Iterator[Child]:
    """Run a process for the length of a block."""
    found = Child(role, python, **({**_ALL_SERVERS, **settings} if role == "server" else settings))
    try:
        yield found
    finally:
        found.end()


def say(what: Any) -> None:
    """Print a result for the parent."""
    print("> " + json.dumps(what), flush=True)


def server_role(settings: Mapping[str, Any]) -> None:
    """Serve a folder until the parent closes the input."""
    from rlx_ort.selection.policy import DevicePolicy
    from rlx_ort.serving import scheduler
    from rlx_ort.serving.host import HostOptions, serve
    from rlx_ort.serving.options import HttpOptions, ServeOptions
    from rlx_ort.serving.repository import Repository

    batch = scheduler.BatchOptions(
        settings.get("max_batch", 256), settings.get("delay_s", 0.0), settings.get("queue", 4096)
    )
    if settings.get("faults"):
        add_faulty_device()
    options = ServeOptions(DevicePolicy.only(settings["devices"]), batch, precision=settings["precision"])

    async def run() -> None:
        repository = Repository([Path(settings["folder"])], options)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        addresses: list[str | None] = []
        place = HostOptions(http_port=0, grpc_port=0, http=HttpOptions(repository_control=True))
        running = asyncio.create_task(
            serve(repository, place, on_listening=lambda *found: addresses.extend(found), stop=stop)
        )
        while not (repository.ready and addresses) and not running.done():
            await asyncio.sleep(0.01)
        say({"http": addresses[0], "grpc": addresses[1]})

        def watch() -> None:
            for line in sys.stdin:
                say(_counts(repository, json.loads(line)["model"]))
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=watch, daemon=True).start()
        await running

    asyncio.run(run())


def add_faulty_device() -> None:
    """Serve the device `fault`: a run in fifty fails, and for two seconds of twenty every run does."""
    sys.path.insert(0, str(HERE.parent.parent / "tests" / "helpers"))
    from fault_provider import LOST, FaultProvider

    from rlx_ort.errors import EngineError
    from rlx_ort.providers.cpu import CpuProvider
    from rlx_ort.providers.registry import register_provider

    provider, draw = FaultProvider(CpuProvider()), np.random.default_rng(0)

    def script(number: int) -> Exception | None:
        provider.requests.clear()  # it keeps what it opened, the weights among it
        return EngineError(LOST) if draw.random() < 0.02 or time.monotonic() % 20 < 2 else None

    provider.script = script
    register_provider(provider)


def _counts(repository: Any, name: str) -> dict[str, Any]:
    import psutil

    if name == "memory":
        gc.collect()
        return {"bytes": psutil.Process().memory_info().rss}
    model = repository.find(name)
    rows = sum(rows * spans["compute_infer"].count for rows, spans in model.statistics.batches.items())
    spans = {key: each.ns / max(each.count, 1) / 1e6 for key, each in model.statistics.spans.items()}
    return {"rows": rows, "batches": model.statistics.executions, "devices": model.statistics.devices, "ms": spans}


# --- clients


def client_role(settings: Mapping[str, Any]) -> None:
    """Measure what the parent asks for until it closes the input."""
    tensor: dict[str, Any] = settings["tensor"]
    callers: dict[str, Callable[[], object]] = {}
    say({})
    for line in sys.stdin:
        what = json.loads(line)
        if what["kind"] == "load":
            body = infer_bytes(what["address"], what["model"], tensor)
            say(asyncio.run(load(what["address"], body, what["clients"], what["seconds"])))
            continue
        key = f"{what['kind']} {what.get('address')}"
        if key not in callers:
            callers[key] = caller(what, tensor, settings["folder"])
            for _ in range(20):
                callers[key]()
        say(timed(callers[key], what["count"]))


def soak_role(settings: Mapping[str, Any]) -> None:
    """Ask for products until the parent closes the input, and count the answers by what they are."""
    from tritonclient import http
    from tritonclient.utils import InferenceServerException

    weight = np.random.default_rng(0).standard_normal((_PRODUCT_WIDTH, _PRODUCT_WIDTH)) * _PRODUCT_WIDTH**-0.5
    weight = weight.astype(np.float32)
    counts: dict[str, int] = {}
    lock, ended = threading.Lock(), threading.Event()

    def client(number: int) -> None:
        draw = np.random.default_rng(number)
        caller = http.InferenceServerClient(settings["address"])
        output = caller.get_model_metadata("product")["outputs"][0]["name"]
        while not ended.is_set():
            data = draw.standard_normal((int(draw.integers(1, 5)), _PRODUCT_WIDTH)).astype(np.float32)
            given = http.InferInput("x", list(data.shape), "FP32")
            given.set_data_from_numpy(data)
            try:
                found = caller.infer("product", [given]).as_numpy(output)
                kind = "right" if np.allclose(found, data @ weight, rtol=1e-3, atol=1e-4) else "wrong"
            except InferenceServerException as err:
                kind = f"refused {err.status()}" if err.status() in ("429", "503") else f"lost: {err}"
                time.sleep(0.005)
            except Exception as err:  # a connection that broke lost its request
                kind = f"lost: {type(err).__name__}"
            with lock:
                counts[kind] = counts.get(kind, 0) + 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(settings["clients"])]
    for thread in threads:
        thread.start()
    say({})
    for _ in sys.stdin:
        with lock:
            say(dict(counts))
    ended.set()
    for thread in threads:
        thread.join()


def timed(call: Callable[[], object], count: int) -> dict[str, float]:
    """Return the median and the 95th percentile of calls, in ms."""
    times = []
    for _ in range(count):
        begun = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begun) / 1e6)
    return {"p50": statistics.median(times), "p95": float(np.percentile(times, 95))}


def caller(what: Mapping[str, Any], tensor: Mapping[str, Any], folder: str) -> Callable[[], object]:
    """Return a function that makes one request, or one run without a server."""
    data = made(tensor)
    if what["kind"] == "direct":
        from rlx_ort.deploy.open import load as open_model

        compiled = open_model(Path(folder) / f"{what['model']}.onnx").compile("cpu")
        return lambda: compiled.run({tensor["name"]: data})
    if what["kind"] == "http":
        from tritonclient import http

        client: Any = http.InferenceServerClient(what["address"])
        given: Any = http.InferInput(tensor["name"], tensor["shape"], tensor["datatype"])
    else:
        from tritonclient import grpc

        client = grpc.InferenceServerClient(what["address"])
        given = grpc.InferInput(tensor["name"], tensor["shape"], tensor["datatype"])
    given.set_data_from_numpy(data)
    output = client.get_model_metadata(what["model"])
    name = (output["outputs"][0]["name"] if output["outputs"] else "y") if what["kind"] == "http" else None
    if name is None:
        return lambda: client.infer(what["model"], [given]).get_response()
    return lambda: client.infer(what["model"], [given]).as_numpy(name)


def infer_bytes(address: str, model: str, tensor: Mapping[str, Any]) -> bytes:
    """Return a whole HTTP request with binary data."""
    data = made(tensor).tobytes()
    entry = {**tensor, "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        f"Host: {address}",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + len(data)}",
    ]
    return bytes("\r\n".join([*lines, "", ""]).encode() + head + data)


class Connection(asyncio.Protocol):
    """One client: it sends its request again as soon as the answer is there."""

    def __init__(self, request: bytes, until_ns: int, times: list[float], statuses: dict[str, int]) -> None:
        self._request, self._until_ns, self._times, self._statuses = request, until_ns, times, statuses
        self._answer = bytearray()
        self._transport: Any = None
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """Note an answer that is whole."""
        self._answer += data
        end = self._answer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._answer[:end]).lower()
        length = int(head.split(b"\r\ncontent-length:")[1].split(b"\r\n")[0])
        if len(self._answer) < end + 4 + length:
            return
        status = head[9:12].decode()
        self._statuses[status] = self._statuses.get(status, 0) + 1
        self._times.append((time.perf_counter_ns() - self._begun_ns) / 1e6)
        self._answer.clear()
        if time.perf_counter_ns() < self._until_ns:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if not self.done.done():
            self.done.set_result(None)

    def _send(self) -> None:
        self._begun_ns = time.perf_counter_ns()
        self._transport.write(self._request)


async def load(address: str, request: bytes, clients: int, seconds: float) -> dict[str, Any]:
    """Return requests a second, latencies in ms and statuses of so many clients that each wait for their answer."""
    host, port = address.rsplit(":", 1)
    times: list[float] = []
    statuses: dict[str, int] = {}
    begun_ns = time.perf_counter_ns()
    until_ns = begun_ns + round(seconds * 1e9)
    made = [
        await asyncio.get_running_loop().create_connection(
            lambda: Connection(request, until_ns, times, statuses), host, int(port)
        )
        for _ in range(clients)
    ]
    await asyncio.gather(*(connection.done for _, connection in made))
    took = (time.perf_counter_ns() - begun_ns) / 1e9
    return {
        "rate": len(times) / took,
        "p50": float(np.percentile(times, 50)),
        "p95": float(np.percentile(times, 95)),
        "statuses": statuses,
    }


# --- what is measured


class Report:
    """The rows of the results; they are printed unless `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self._quiet = quiet

    def add(self, figure: str, value: float, unit: str, target: str = "", detail: str = "") -> None:
        """Keep a figure with its target, written as `<= 0.5` or `>= 3`, and print it."""
        sign, _, limit = target.partition(" ")
        ok = None if not target else value <= float(limit) if sign == "<=" else value >= float(limit)
        self.rows.append(
            {"figure": figure, "value": round(value, 4), "unit": unit, "target": target, "ok": ok, "detail": detail}
        )
        if self._quiet:
            return
        mark = {True: "ok", False: "MISSED", None: ""}[ok]
        print(f"{mark:7}{figure:60} {value:9.3f} {unit:6} {target:8} {detail}", flush=True)


def lower(values: Sequence[float]) -> float:
    """Return the lower quartile, which other work on the machine disturbs least."""
    return float(np.percentile(values, 25))


def overhead(report: Report, folder: Path, tensors: Mapping[str, Any], rounds: int) -> None:
    """Measure single requests of one client against runs without a server."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(child("server", folder=str(folder), devices=["cpu"])).hello
        client = stack.enter_context(child("client", folder=str(folder), tensor=tensors["product"]))
        asked = [{"kind": "direct", "model": "product"}]
        asked += [{"kind": kind, "model": "product", "address": ours[kind]} for kind in ("http", "grpc")]
        names = ["direct", "http", "grpc"]
        found: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds):
            for name, what in list(zip(names, asked, strict=True))[:: 1 if turn % 2 else -1]:
                found[name].append(client.ask(**what, count=200)["p50"])
    p50 = {name: lower(values) for name, values in found.items()}
    detail = ", ".join(f"{name} {value:.3f}" for name, value in p50.items())
    report.add("HTTP binary over CompiledGraph.run, p50", p50["http"] - p50["direct"], "ms", "<= 0.5", detail)
    report.add("gRPC over CompiledGraph.run, p50", p50["grpc"] - p50["direct"], "ms")


def in_turns(
    clients: Child, sides: Mapping[str, str], model: str, count: int, seconds: float, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the loads of servers that are measured in turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(-1, rounds):
        for name, address in list(sides.items())[:: 1 if turn % 2 else -1]:
            what = {"kind": "load", "model": model, "address": address, "clients": count}
            got = clients.ask(**what, seconds=seconds if turn >= 0 else min(seconds, 1.0))
            if set(got["statuses"]) != {"200"}:
                raise SystemExit(f"{name} answered {got['statuses']}")
            if turn >= 0:
                found[name].append(got)
    return found


def ratio_of(found: Mapping[str, Sequence[Mapping[str, Any]]], first: str, second: str, key: str) -> float:
    """Return the median over rounds of one side's figure over the other's."""
    return float(statistics.median(a[key] / b[key] for a, b in zip(found[first], found[second], strict=True)))


def batching(
    report: Report, folder: Path, tensors: Mapping[str, Any], devices: Sequence[str], args: argparse.Namespace
) -> None:
    """Measure batching against single runs, with 64 clients and with one."""
    settings: dict[str, Any] = {"folder": str(folder), "devices": list(devices)}
    with child("server", **settings) as batched, child("server", **settings, max_batch=1) as single:
        sides = {"batched": batched.hello["http"], "single": single.hello["http"]}
        for model in args.models.split(","):
            least = 5 if args.gpu else {"product": 3, "encoder": 1.3}[model]
            with child("client", folder=str(folder), tensor=tensors[model]) as client:
                many = in_turns(client, sides, model, _CLIENTS, args.seconds, args.rounds)
                one = in_turns(client, sides, model, 1, args.seconds / 2, args.rounds)
            best = {side: max(each["rate"] for each in many[side]) for side in sides}
            p95 = {side: lower([each["p95"] for each in many[side]]) for side in sides}
            counts = batched.ask(model=model)
            detail = (
                f"{best['batched']:.0f} and {best['single']:.0f}/s, p95 {p95['batched']:.1f} and {p95['single']:.1f} "
                f"ms, {counts['rows'] / counts['batches']:.1f} rows a batch in all"
            )
            report.add(
                f"{model}: requests/s of {_CLIENTS} clients, batched over single",
                ratio_of(many, "batched", "single", "rate"),
                "",
                f">= {least}",
                detail,
            )
            report.add(
                f"{model}: latency of one client, batched over single, p50",
                ratio_of(one, "batched", "single", "p50"),
                "",
                "<= 1.05",
                f"{lower([each['p50'] for each in one['batched']]):.3f} ms",
            )


_START = """
import sys
from rlx_ort.deploy.start import start_package
package = start_package(sys.argv[1])
import numpy
package.run({"ids": numpy.zeros((1, int(sys.argv[2])), numpy.int64)})
print("ready", file=sys.stderr, flush=True)
import os
os._exit(0)
"""
_COMMAND = "from rlx_ort.cli import main; main()"


def startup(report: Report, folder: Path, tokens: int, rounds: int) -> None:
    """Measure processes from their start until they are ready: the server's, and of `start_package` alone."""
    from rlx_ort.converters.files import load_graph
    from rlx_ort.deploy.create import Recipe, create_package
    from rlx_ort.deploy.open import warm_package
    from rlx_ort.device import Device

    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode, so the checkout may too
    path = folder / "startup.ortpackage"
    create_package(load_graph(folder / "encoder.onnx"), path, Recipe(), folder=True)
    warm_package(path, [Device.CPU])
    serve = [sys.executable, "-P", "-c", _COMMAND, "serve", str(path), "--grpc"]
    kinds: dict[str, Callable[[], float]] = {
        "start_package": lambda: _seconds([sys.executable, "-P", "-c", _START, str(path), str(tokens)]),
        "REST": lambda: _seconds([*serve, "0", "--http", (port := _free_port())], port),
        "REST alone": lambda: _seconds([*serve, "-1", "--http", (port := _free_port())], port),
        "REST and gRPC": lambda: _seconds([*serve, "0", "--http", "0"]),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds):
        for kind, measure in list(kinds.items())[:: 1 if turn % 2 else -1]:
            found[kind].append(measure())
    detail = ", ".join(f"{kind} {statistics.median(times):.3f} s" for kind, times in found.items())
    for kind in list(kinds)[1:]:
        ratio = statistics.median(a / b for a, b in zip(found[kind], found["start_package"], strict=True))
        report.add(f"startup: {kind} ready, over start_package's first result", ratio, "", "<= 1.3", detail)


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _seconds(command: Sequence[str], port: str | None = None) -> float:
    """Return the time until a process prints `ready`, or until `/v2/health/ready` of a port is 200."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        if port is not None:
            while not _is_ready(int(port)):
                time.sleep(0.005)
        elif process.stderr is not None:
            next(line for line in process.stderr if line.startswith("ready"))
        return time.perf_counter() - begun
    finally:
        process.kill()
        process.communicate()


def _is_ready(port: int) -> bool:
    try:
        connection = HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def soak(report: Report, folder: Path, seconds: float) -> None:
    """Load a server with a faulty device, a short queue and reloads, and count what its clients get."""
    from tritonclient import http

    (folder / "encoder.onnx").unlink()
    settings: dict[str, Any] = {"folder": str(folder), "devices": ["fault", "cpu"], "faults": True, "queue": 6}
    memory: list[int] = []
    reloads = 0
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(child("server", **settings))
        address = server.hello["http"]
        clients = [stack.enter_context(child("soak", address=address, clients=8)) for _ in range(2)]
        until = time.monotonic() + seconds
        control = http.InferenceServerClient(address)
        while time.monotonic() < until:
            time.sleep(seconds / 120)
            memory.append(server.ask(model="memory")["bytes"])
            if len(memory) % 2 == 0:
                control.load_model("product")
                reloads += 1
        devices = server.ask(model="product")["devices"]
        counts: dict[str, int] = {}
        for each in clients:
            for kind, count in each.ask().items():
                counts[kind] = counts.get(kind, 0) + count
    settled = memory[len(memory) // 4 :]
    window = max(len(settled) // 5, 1)
    growth = statistics.mean(settled[-window:]) / statistics.mean(settled[:window]) - 1
    detail = f"{counts}; {reloads} reloads; devices since the last one {devices}"
    report.add("soak: wrong answers", counts.get("wrong", 0), "", "<= 0", detail)
    report.add(
        "soak: requests that were accepted and lost",
        sum(count for kind, count in counts.items() if kind.startswith("lost")),
        "",
        "<= 0",
    )
    report.add("soak: right answers", counts.get("right", 0), "", ">= 1")
    report.add(
        "soak: growth of memory after the first quarter",
        100 * growth,
        "%",
        "<= 5",
        f"{memory[0] >> 20} to {memory[-1] >> 20} MiB",
    )


def main() -> int:
    """Measure, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--parts", default="overhead,batching", help="of startup, overhead, batching")
    parser.add_argument("--devices", default="cpu", help="cpu,cuda and so on, which serve together")
    parser.add_argument("--models", default="product,encoder", help="the models of batching")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--precision", default="f32", help="in which the server computes: f32, tf32, f16, bf16")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--soak", type=float, help="only load a server with faults for so many seconds")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    args = parser.parse_args()
    if args.role:
        role, settings = args.role
        {"server": server_role, "client": client_role, "soak": soak_role}[role](json.loads(settings))
        return 0
    devices = args.devices.split(",")
    _ALL_SERVERS["precision"] = args.precision
    args.gpu = any(device != "cpu" for device in devices)
    report, parts = Report(), args.parts.split(",")
    sys.path.insert(0, str(HERE.parent))
    from figures.record import machine

    facts = machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tensors = save_models(folder, args.layers, args.width, args.tokens)
        if args.soak:
            soak(report, folder, args.soak)
            parts = []
        if "startup" in parts:
            startup(report, folder, args.tokens, 2 * args.rounds)
        if "overhead" in parts:
            overhead(report, folder, tensors, 2 * args.rounds)
        if "batching" in parts:
            batching(report, folder, tensors, devices[:1] if args.gpu else devices, args)
    if args.out:
        document = {"machine": facts, "arguments": sys.argv[1:], "figures": report.rows}
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(row["ok"] is False for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
