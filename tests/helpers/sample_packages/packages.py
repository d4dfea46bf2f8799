"""A small packaged model, and packages that were put together by hand, for the tests of `rlx_ort.deploy`."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rlx_ort import Graph, Precision
from rlx_ort.deploy.create import Recipe, create_package
from rlx_ort.deploy.names import INDEX
from rlx_ort.deploy.write import Content, write_package
from rlx_ort.ir.tensor import TensorData

__all__ = ["SIZE", "X", "files_of", "flip", "make", "make_graph", "rebuilt", "reference", "repacked"]

SIZE = 32
X = np.random.default_rng(7).standard_normal((3, SIZE)).astype(np.float32)


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Return two matrices of equal size."""
    source = np.random.default_rng(seed)
    return {name: (source.standard_normal((SIZE, SIZE)) / SIZE**0.5).astype(np.float32) for name in ("first", "second")}


def make_graph(seed: int = 0) -> Graph:
    """Return relu(relu(x @ first) @ second)."""
    graph = Graph("small")
    value = graph.input("x", ["rows", SIZE])
    for name, array in weights(seed).items():
        value = graph.relu(value @ graph.param(name, [SIZE, SIZE]))
        graph.weights[name] = TensorData.from_array(array)
    graph.outputs = [value]
    return graph


def reference(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return the model's output, computed in float64."""
    value = x.astype(np.float64)
    for array in weights(seed).values():
        value = np.maximum(value @ array.astype(np.float64), 0)
    return value


def golden(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return an input and the output that it must give."""
    return {"x": X}, {make_graph().output_names[0]: reference(X, seed).astype(np.float32)}


def make(target: Path, *, folder: bool = False, seed: int = 0, **changes: Any) -> Path:
    """Write the small package with a variant in f32 and one in f16, and return its path."""
    settings: dict[str, Any] = {
        "variants": {"cpu": Precision.F32, "cuda": Precision.F16},
        "golden": [golden(seed)],
        "license": "Apache-2.0",
        "license_text": "Do as you like.\n",
        "serial": 5,
    }
    create_package(make_graph(seed), target, Recipe(**{**settings, **changes}), folder=folder, overwrite=True)
    return target


def files_of(package: Path) -> dict[str, bytes]:
    """Return the files of a package of either form, read without any of this project's code."""
    if package.is_dir():
        files = [path for path in package.rglob("*") if path.is_file()]
        return {path.relative_to(package).as_posix(): path.read_bytes() for path in files}
    with zipfile.ZipFile(package) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def repacked(target: Path, files: Mapping[str, bytes]) -> Path:
    """Write files as a one-file package in its one encoding, whatever they say, and return its path."""
    write_package(target, {name: Content.of(data) for name, data in files.items()}, folder=False, overwrite=True)
    return target


def rebuilt(files: Mapping[str, bytes], index: Any) -> dict[str, bytes]:
    """Return files with an index whose sizes and digests are those of the files: consistent, and perhaps nonsense."""
    listed = index.get("files") if isinstance(index, dict) else None
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        if name in files and isinstance(entry, dict):
            data = files[name]
            entry |= {"size": len(data), "sha256": sha256(data).hexdigest(), "crc32": zlib.crc32(data)}
    return {**files, INDEX: json.dumps(index).encode("utf-8")}


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ (1 << bit)]))
        stream.flush()
        os.fsync(stream.fileno())


def assert_right(result: Any, x: np.ndarray = X, seed: int = 0) -> None:
    """Check the output of a package against the reference."""
    np.testing.assert_allclose(result, reference(x, seed), rtol=1e-3, atol=1e-3)
