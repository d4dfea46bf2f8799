"""Models as users have them: what frameworks export, with the outputs that the frameworks gave.

`tests/data/user_models/` holds the exports without their large weights, as `scripts/user_models.py` wrote them. Such a
weight has a recipe in its place, from which the same bits are made on every platform. So are the inputs. `index.json`
lists the models.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx

__all__ = [
    "FOLDER",
    "RECIPE",
    "Expected",
    "Input",
    "UserModel",
    "corpus",
    "made",
    "restored",
    "sampled",
    "seeded",
    "user_model",
]

FOLDER = Path(__file__).parents[1] / "data" / "user_models"
RECIPE = "recipe"
"""The key of a tensor's metadata that holds the recipe of its values."""
SAMPLE = 512  # values of a large output that are kept

Array: TypeAlias = np.ndarray[Any, Any]


def seeded(seed: int, shape: Sequence[int], low: float, high: float, dtype: str = "float32") -> Array:
    """Return numbers spread evenly between `low` and `high`, `high` left out; integers are rounded down.

    The n-th number is the n-th of SplitMix64 (https://prng.di.unimi.it/splitmix64.c) from `seed`, of which 24 bits are
    kept: all steps are exact, or rounded as IEEE 754 prescribes.
    """
    count = int(np.prod(shape, dtype=np.int64))
    with np.errstate(over="ignore"):
        x = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    unit = (x >> np.uint64(40)).astype(np.float64) * 2.0**-24
    values = low + unit * (high - low)
    values = np.floor(values) if np.dtype(dtype).kind in "iu" else values
    return values.astype(dtype).reshape(shape)


def made(recipe: Mapping[str, Any]) -> Array:
    """Return the values of a recipe: seeded ones, with blocks of rows in another order, transposed, or scaled.

    Those of `parts` are joined.
    """
    if "parts" in recipe:  # the two directions of a recurrent network, or weights and biases of one
        return np.concatenate([made(part).reshape(-1) for part in recipe["parts"]])
    values = seeded(recipe["seed"], recipe["shape"], recipe["low"], recipe["high"])
    if "blocks" in recipe:
        order = recipe["blocks"]
        parts = np.split(values, len(order))
        values = np.concatenate([parts[at] for at in order])
    if "perm" in recipe:
        values = values.transpose(recipe["perm"])
    if "factors" in recipe:  # a batch normalisation that the exporter folded into a weight
        shape = [1] * values.ndim
        shape[recipe["axis"]] = -1
        values = values * np.asarray(recipe["factors"], np.float32).reshape(shape)
    return np.asarray(values, order="C")


def restored(skeleton: bytes) -> onnx.ModelProto:
    """Return the model of a skeleton, with its weights."""
    model = onnx.ModelProto.FromString(skeleton)
    for tensor in model.graph.initializer:
        for entry in tensor.metadata_props:
            if entry.key == RECIPE:
                tensor.raw_data = made(json.loads(entry.value)).astype("<f4", copy=False).tobytes()
        tensor.ClearField("metadata_props")
    return model


def sampled(output: Array) -> Array:
    """Return the values that are kept of an output: all of them, or some where there are many."""
    if output.size <= SAMPLE:
        return output.reshape(-1)
    return output.reshape(-1)[seeded(1, (SAMPLE,), 0, output.size, "int64")]


@dataclass(frozen=True)
class Input:
    """An input of a model; `dims` are sizes and names, and `kind` is the kind of its values.

    `uniform` values lie between `low` and `high`; a `mask` is 1 and ends with one or two zeros in some rows; `text` is
    one of three words.
    """

    name: str
    dims: tuple[int | str, ...]
    kind: str = "uniform"
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0

    def array(self, sizes: Mapping[str, int], seed: int) -> Array:
        """Return values for sizes by name."""
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in self.dims]
        if self.kind == "mask":
            rows, columns = np.indices(shape, np.int64)
            return (columns < np.maximum(1, shape[1] - rows % 3)).astype(self.dtype)
        if self.kind == "text":
            return np.array(["red", "green", "blue"], object)[seeded(seed, shape, 0, 3, "int64")]
        return seeded(seed, shape, self.low, self.high, self.dtype)


@dataclass(frozen=True)
class Expected:
    """What the framework gave for one output: its shape, and the values that `sampled` keeps."""

    shape: tuple[int, ...]
    values: Array

    def error(self, found: Any) -> float:
        """Return the error of an output relative to the largest value; infinite for another shape or kind of values."""
        found = np.asarray(found)
        if found.shape != self.shape or found.dtype.kind != self.values.dtype.kind:
            return np.inf
        values = sampled(found)
        if values.dtype.kind != "f":
            return 0.0 if np.array_equal(values, self.values) else np.inf
        if not values.size:
            return 0.0
        scale = max(float(np.abs(self.values).max()), 1e-30)
        off = float(np.abs(values.astype(np.float64) - self.values).max()) / scale
        return off if np.isfinite(off) else np.inf


@dataclass(frozen=True)
class UserModel:
    """One export: an architecture by one exporter at one opset."""

    architecture: str
    exporter: str
    opset: int
    inputs: tuple[Input, ...]
    cases: tuple[Mapping[str, int], ...]
    """The sizes by name for which there are outputs of the framework: batch 1, another, and batch 16."""

    @property
    def name(self) -> str:
        """The architecture with exporter and opset."""
        return f"{self.architecture}-{self.exporter}-{self.opset}"

    def model(self) -> bytes:
        """Return the ONNX model, with its weights."""
        return restored((FOLDER / f"{self.name}.onnx").read_bytes()).SerializeToString()

    def feeds(self, sizes: Mapping[str, int]) -> dict[str, Array]:
        """Return inputs for sizes by name."""
        return {each.name: each.array(sizes, 100 + at) for at, each in enumerate(self.inputs)}

    def expected(self, case: int) -> list[Expected]:
        """Return what the framework gave for the inputs of a case, output by output."""
        with np.load(FOLDER / f"{self.architecture}.npz") as kept:
            return [
                Expected(tuple(kept[f"{case}.{at}.shape"].tolist()), kept[f"{case}.{at}"])
                for at in range(int(kept["outputs"]))
            ]


@functools.cache
def corpus() -> tuple[UserModel, ...]:
    """Return every model, by architecture."""
    index = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))
    return tuple(
        UserModel(
            name,
            export["exporter"],
            export["opset"],
            tuple(Input(**{**each, "dims": tuple(each["dims"])}) for each in entry["inputs"]),
            tuple(entry["cases"]),
        )
        for name, entry in index["architectures"].items()
        for export in entry["exports"]
    )


def user_model(name: str) -> UserModel:
    """Return the model of a name, as `bert-dynamo-18`."""
    return next(each for each in corpus() if each.name == name)
