"""Measure serving on Ray: latency through its proxies, `ray.serve.batch` beside our batches, autoscaling, and a kill.

    python scripts/serve_ray_figures.py --out docs/results/ray.json

It starts Ray clusters of this machine alone, with as many logical CPUs as asked for, and ends them. What is compared
runs in turns; each ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__)
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "examples")]

from serve_figures import (  # noqa: E402  # a script beside this one
    Child,
    Report,
    child,
    in_turns,
    infer_bytes,
    load,
    lower,
    ratio_of,
    save_models,
    say,
)

_RAY = {"include_dashboard": False, "object_store_memory": 100 << 20, "log_to_driver": False}
_BATCHES = ((10, 0.01), (32, 0.001), (64, 0.0))  # the default of ray.serve.batch first


class RayChild(Child):
    """A process of this script in another role."""

    def __init__(self, role: str, variables: Mapping[str, str] | None = None, **settings: Any) -> None:
        command = [sys.executable, str(HERE), "--role", role, json.dumps(settings)]
        pipe = subprocess.PIPE
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **(variables or {})}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.pid = self._process.pid
        self.hello = self._read()

    def end(self) -> None:
        """Close its input and wait; Ray takes longer than the other servers to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)

    def __enter__(self) -> RayChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


# --- roles


def ray_role(settings: Mapping[str, Any]) -> None:
    """Serve a folder on a cluster of its own; a line asks for the replicas that run, or kills one."""
    import psutil
    import ray
    from ray import serve

    from rlx_ort.serving.host import HostOptions
    from rlx_ort.serving.ray import NAME, RayOptions, run

    ray.init(num_cpus=settings.get("cpus", 4), **_RAY)
    place = HostOptions(http_port=_free_port(), grpc_port=None)
    stop = threading.Event()

    def replicas() -> int:
        states = serve.status().applications[NAME].deployments[NAME].replica_states
        return sum(count for state, count in states.items() if getattr(state, "value", state) == "RUNNING")

    def kill() -> int:
        marks = (f"ray::ServeReplica:{NAME}:",)
        found = [each for each in psutil.Process().children(recursive=True) if each.status() != "zombie"]
        victim = min(each.pid for each in found if " ".join(each.cmdline()).startswith(marks))
        os.kill(victim, signal.SIGKILL)
        return victim

    def watch() -> None:
        for line in sys.stdin:
            say({"replicas": replicas, "kill": kill}[json.loads(line)["what"]]())
        stop.set()

    def ready(http: str | None, rpc: str | None) -> None:
        say({"http": http})
        threading.Thread(target=watch, daemon=True).start()

    scale = RayOptions(**{**settings["scale"], "replicas": tuple(settings["scale"]["replicas"])})
    run([Path(settings["folder"])], None, place, scale, on_ready=ready, stop=stop)
    serve.shutdown()
    ray.shutdown()


def batch_role(settings: Mapping[str, Any]) -> None:
    """Serve a folder by our own host, with batches that `ray.serve.batch` forms."""
    import serve_figures
    from ray import serve

    from rlx_ort.serving.lanes import Answer, Times
    from rlx_ort.serving.models import ServedModel

    joined: dict[str, Any] = {}
    context = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=1 << 20))
    serve.get_replica_context = lambda: context  # all that ray.serve.batch asks a replica for, in Ray 2.60

    def made(model: ServedModel) -> Any:
        lane = model.scheduler.lanes[0]

        async def run(requests: list[Any]) -> list[Answer]:
            rows = np.cumsum([len(next(iter(each.inputs.values()))) for each in requests])
            inputs = {name: np.concatenate([each.inputs[name] for each in requests]) for name in requests[0].inputs}
            outputs = await asyncio.to_thread(lane.run, inputs, None)
            parts = {name: np.split(array, rows[:-1]) for name, array in outputs.items()}
            return [
                Answer({name: part[at] for name, part in parts.items()}, lane.device, Times())
                for at in range(len(requests))
            ]

        return serve.batch(max_batch_size=settings["most"], batch_wait_timeout_s=settings["wait_s"])(run)

    async def infer(model: ServedModel, request: Any) -> Answer:
        if model.name not in joined:
            joined[model.name] = made(model)
        found: Answer = await joined[model.name](request)
        return found

    setattr(ServedModel, "infer", infer)  # noqa: B010  # the type of a method cannot be assigned
    serve_figures.server_role({**serve_figures._ALL_SERVERS, "folder": settings["folder"], "devices": ["cpu"]})


# --- what is measured


def latency(report: Report, folder: Path, tensors: Mapping[str, Any], rounds: int) -> None:
    """Measure single requests of one client through Ray's proxies and without Ray."""
    one: dict[str, Any] = {"folder": str(folder), "scale": {"replicas": [1, 1]}, "cpus": 2}
    with contextlib.ExitStack() as stack:
        sides = {"without Ray": stack.enter_context(child("server", folder=str(folder), devices=["cpu"])).hello["http"]}
        sides["Ray's proxy"] = stack.enter_context(RayChild("ray", **one)).hello["http"]
        haproxy = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
        sides["Ray's HAProxy"] = stack.enter_context(RayChild("ray", haproxy, **one)).hello["http"]
        client = stack.enter_context(child("client", folder=str(folder), tensor=tensors["product"]))
        found: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(rounds):
            for name, address in list(sides.items())[:: 1 if turn % 2 else -1]:
                got = client.ask(kind="http", model="product", address=address, count=100)
                found[name].append(got["p50"])
        many = in_turns(client, sides, "product", 8, 2.0, 3)
    for name, values in found.items():
        rate = statistics.median(each["rate"] for each in many[name])
        report.add(f"HTTP binary, p50, {name}", lower(values), "ms", "", f"{rate:.0f} requests/s of 8 clients")


def batching(report: Report, folder: Path, tensors: Mapping[str, Any], rounds: int, seconds: float) -> None:
    """Measure our batches against those of `ray.serve.batch`, in the same host, with 64 clients and with one."""
    with contextlib.ExitStack() as stack:
        sides = {"ours": stack.enter_context(child("server", folder=str(folder), devices=["cpu"])).hello["http"]}
        for most, wait_s in _BATCHES:
            server = stack.enter_context(RayChild("batch", folder=str(folder), most=most, wait_s=wait_s))
            sides[f"{most} rows, {wait_s * 1e3:g} ms"] = server.hello["http"]
        for model in ("product", "encoder"):
            client = stack.enter_context(child("client", folder=str(folder), tensor=tensors[model]))
            many = in_turns(client, sides, model, 64, seconds, rounds)
            one = in_turns(client, sides, model, 1, seconds / 2, 5)
            for name in list(sides)[1:]:
                rates = [statistics.median(each["rate"] for each in many[side]) for side in ("ours", name)]
                ratios = [a["rate"] / b["rate"] for a, b in zip(many["ours"], many[name], strict=True)]
                low, high = np.percentile(ratios, [25, 75])
                p50 = [lower([each["p50"] for each in one[side]]) for side in ("ours", name)]
                report.add(
                    f"{model}: requests/s of 64 clients over ray.serve.batch of {name}",
                    ratio_of(many, "ours", name, "rate"),
                    "",
                    "",
                    f"quartiles {low:.2f} and {high:.2f}; {rates[0]:.0f} and {rates[1]:.0f}/s; "
                    f"latency of one client {p50[0]:.2f} and {p50[1]:.2f} ms",
                )


def scaling(report: Report, folder: Path, tensors: Mapping[str, Any], seconds: float) -> list[dict[str, float]]:
    """Load one replica until there are four, then wait until one is left; return the course of it."""
    scale = {"replicas": [1, 4], "queue": 8, "scale_up_s": 1, "scale_down_s": 5}
    course: list[dict[str, float]] = []
    with RayChild("ray", folder=str(folder), scale=scale) as server:
        address = server.hello["http"]
        body = infer_bytes(address, "encoder", tensors["encoder"])
        loads: list[dict[str, Any]] = []

        def ask() -> None:
            for _ in range(int(seconds)):
                loads.append(asyncio.run(load(address, body, 64, 1.0)))

        thread = threading.Thread(target=ask)
        begun = time.monotonic()
        thread.start()
        ended = None
        while ended is None or (course[-1]["replicas"] > 1 and time.monotonic() < ended + 120):
            if ended is None and not thread.is_alive():
                ended = time.monotonic()
            rate = loads[-1]["rate"] if loads and ended is None else 0.0
            count = server.ask(what="replicas")
            course.append({"s": round(time.monotonic() - begun, 1), "replicas": count, "rate": round(rate, 1)})
            time.sleep(1)
        thread.join()
        statuses = sum((collections.Counter(each["statuses"]) for each in loads), collections.Counter())
    reached = {count: next((row["s"] for row in course if row["replicas"] >= count), -1.0) for count in (2, 3, 4)}
    report.add("most replicas under a load of 64 clients", max(row["replicas"] for row in course), "", ">= 4")
    report.add(
        "from the start of the load to four replicas", reached[4], "s", "", f"2 after {reached[2]} s; {dict(statuses)}"
    )
    report.add("from the end of the load to one replica", course[-1]["s"] - (ended - begun), "s")
    report.add("replicas at the end", course[-1]["replicas"], "", "<= 1")
    return course


def killing(report: Report, folder: Path, seconds: float) -> None:
    """Kill a replica of two every ten seconds under the load of clients that send again, and count their answers."""
    from serve_client import Client

    draw = np.random.default_rng(0)  # as the models are made
    weight = (draw.standard_normal((768, 768)) * 768**-0.5).astype(np.float32)
    counts: collections.Counter[str] = collections.Counter()
    longest: list[float] = []
    ended = threading.Event()

    def ask(address: str, number: int) -> None:
        client, draw = Client(address), np.random.default_rng(number)
        while not ended.is_set():
            data, begun = draw.standard_normal((2, 768)).astype(np.float32), time.monotonic()
            try:
                (found,) = client.infer("product", {"x": data}).values()
                counts["right" if np.allclose(found, data @ weight, rtol=1e-3, atol=1e-4) else "wrong"] += 1
            except (Exception, SystemExit) as err:
                counts[f"lost: {err}"] += 1
            longest.append(time.monotonic() - begun)

    with RayChild("ray", folder=str(folder), scale={"replicas": [2, 2]}) as server:
        threads = [threading.Thread(target=ask, args=(server.hello["http"], number)) for number in range(8)]
        for thread in threads:
            thread.start()
        kills = 0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(10)
            if server.ask(what="replicas") == 2:
                server.ask(what="kill")
                kills += 1
        time.sleep(3)
        ended.set()
        for thread in threads:
            thread.join()
    detail = f"{dict(counts)}; the longest request took {max(longest):.2f} s"
    report.add("replicas that were killed under the load of 8 clients", kills, "", ">= 1", detail)
    report.add("wrong answers", counts["wrong"], "", "<= 0")
    lost = sum(count for kind, count in counts.items() if kind.startswith("lost"))
    report.add("requests that were lost, after clients sent them again", lost, "", "<= 0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--parts", default="latency,batching,scaling,killing", help="which of them to measure")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one load of batching")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    args = parser.parse_args(arguments)
    if args.role:
        role, settings = args.role
        {"ray": ray_role, "batch": batch_role}[role](json.loads(settings))
        return 0
    from figures.record import machine

    facts, report, parts = machine(), Report(), args.parts.split(",")
    facts |= {name: importlib.metadata.version(name) for name in ("ray", "uvicorn", "tritonclient")}
    course: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tensors = save_models(folder, 4, 512, 8)
        if "latency" in parts:
            latency(report, folder, tensors, args.rounds)
        if "batching" in parts:
            batching(report, folder, tensors, args.rounds, args.seconds)
        if "scaling" in parts:
            course = scaling(report, folder, tensors, 45)
        if "killing" in parts:
            killing(report, folder, 60)
    if args.out:
        document = {"machine": facts, "figures": report.rows, "scaling": course}
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(row["ok"] is False for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
