"""Deterministic mutations of packages, and what must hold for each: a typed error or a package, fast, and no trace."""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path
from typing import Any

from mutations import changed_json, mutated_bytes, nested

from rlx_ort import DevicePolicy, RlxError, open_package, verify
from rlx_ort.converters.to_onnx.exporter import exported
from rlx_ort.deploy.names import INDEX
from rlx_ort.deploy.package import Package
from rlx_ort.deploy.write import write_package
from sample_packages.packages import files_of, make, rebuilt, repacked

__all__ = ["LONGEST_S", "Fuzzer"]

LONGEST_S = 1.0
"""No mutation may keep a reader busy for longer."""

_NASTY: tuple[Any, ...] = (
    "../x.json", "/x.json", "C:\\x", "rlx.json", "graph.json", "f32", "f16", "string", "cuda:99999999999", "0" * 64,
    {"device": "cpu"}, [2**62, 2**62], nested(150), nested(220),
)  # fmt: skip


class Fuzzer:
    """Mutates the small package by number: the same number gives the same mutation.

    Args:
        sandbox: an empty folder; everything is written below it, and the fuzzer looks for what is written elsewhere.
    """

    def __init__(self, sandbox: Path) -> None:
        self.original = make(sandbox / "original.ortpackage")
        self.work = sandbox / "inner" / "work"
        self.work.mkdir(parents=True)
        self._files = files_of(self.original)
        self._bytes = self.original.read_bytes()
        self._index = json.loads(self._files[INDEX])
        self._graph = json.loads(self._files["graph.json"])
        self._sandbox = sandbox
        self._around = self._outside()

    def run(self, number: int) -> str:
        """Open a mutation, use everything in it, write it out again, and return what came of it.

        Raises:
            AssertionError: it took too long, or left a file outside of its folder.
            Exception: whatever the reader raises that is no error of this package.
        """
        source = random.Random(number)
        package = self.work / "mutated.ortpackage"
        kind = ("zip", "index", "graph", "manifest", "text", "members")[number % 6]
        self._write(package, kind, source)
        begin = time.process_time()  # of this process: a busy machine is no hang
        (self.work / "out").mkdir()
        outcome = self._use(package)
        seconds = time.process_time() - begin
        for left in self.work.iterdir():
            _remove(left)
        assert seconds < LONGEST_S, f"mutation {number} ({kind}) took {seconds:.2f} s"
        assert self._outside() == self._around, f"mutation {number} ({kind}) wrote outside of its folder"
        return f"{kind}: {outcome}"

    def _use(self, package: Path) -> str:
        try:
            with Package(package) as opened:
                graph = opened.graph()
                for data in graph.weights.values():
                    data.numpy()
                for case in opened.cases:
                    opened.arrays(case.inputs)
                opened.check_all()
                write_package(self.work / "out" / "extracted.ortpackage", opened.contents(), folder=True)
                verify(graph)
                with open_package(package, DevicePolicy()) as runner:
                    exported(runner.graph, runner.options)
        except RlxError as err:
            return type(err).__name__ if str(err) else "an error without a message"
        return "taken"

    def _write(self, target: Path, kind: str, source: random.Random) -> None:
        files = dict(self._files)
        if kind == "zip":
            target.write_bytes(mutated_bytes(self._bytes, source))
        elif kind == "members":
            names = sorted(files)
            for _ in range(source.randint(1, 3)):
                name, other = source.choice(names), source.choice(names)
                source.choice([lambda a, b: files.pop(a, None), _copied(files), _mutate(files, source)])(name, other)
            repacked(target, files)
        elif kind == "text":
            name = source.choice([INDEX, "graph.json", "manifest.json"])
            files[name] = mutated_bytes(files[name], source)
            repacked(target, files if name == INDEX else rebuilt(files, copy.deepcopy(self._index)))
        elif kind == "graph":
            files["graph.json"] = _json(changed_json(self._graph, source, _NASTY))
            repacked(target, rebuilt(files, copy.deepcopy(self._index)))
        elif kind == "manifest":
            files["manifest.json"] = _json(changed_json(json.loads(files["manifest.json"]), source, _NASTY))
            repacked(target, rebuilt(files, copy.deepcopy(self._index)))
        else:
            index = changed_json(self._index, source, _NASTY)
            repacked(target, {**files, INDEX: _json(index)} if source.random() < 0.5 else rebuilt(files, index))

    def _outside(self) -> set[Path]:
        return {path for path in self._sandbox.rglob("*") if self.work not in path.parents}


def _copied(files: dict[str, bytes]) -> Any:
    def swap(name: str, other: str) -> None:
        files[name], files[other] = files.get(other, b""), files.get(name, b"")

    return swap


def _mutate(files: dict[str, bytes], source: random.Random) -> Any:
    def mutate(name: str, _: str) -> None:
        files[name] = mutated_bytes(files.get(name, b""), source)

    return mutate


def _json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    else:
        path.unlink()
