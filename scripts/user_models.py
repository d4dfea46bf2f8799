"""Export models of PyTorch as users do, with few layers of little width, into `tests/data/user_models/`.

    python scripts/user_models.py                      the models of transformers in user_models.toml
    python scripts/user_models.py --only bert,clip     these anew
    python scripts/user_models.py --more FILE          those of a file of Python, which has functions by name in
                                                       ARCHITECTURES: name -> a call that returns an Architecture

Needs PyTorch with onnxscript and transformers. Parameters are filled with seeded numbers before the export, and the
outputs of the framework are kept for the sizes of each case. In the export, every weight of more than 1 KB that is made
of parameters is replaced by a recipe (`tests/helpers/model_corpus.py`); the exporter's notes about source lines are
dropped. An export that fails, or whose results in plain ONNX Runtime are not the framework's, is left out and listed as
such in `index.json`. Models of other modules and frameworks in the corpus were made by `scripts/user_architectures.py`
of its time: `git show 9784e952:scripts/user_architectures.py`.
"""

# mypy: disable-error-code="misc"
# PyTorch has no types where these are checked, so nn.Module is Any.

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import logging
import operator
import re
import runpy
import sys
import tempfile
import tomllib
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import torch
import transformers
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "helpers")]

from model_corpus import FOLDER, RECIPE, Expected, Input, made, restored, sampled  # noqa: E402  # of the tests

LARGE = 1024  # bytes of a weight that is replaced by its recipe
BOUND = 1e-4
_COLOUR = re.compile(r"\x1b\[\d+m")  # of the terminal, in errors of PyTorch
PACKAGES = ("torch", "onnxscript", "transformers", "onnx")
TABLES = tomllib.loads(Path(__file__).with_name("user_models.toml").read_text(encoding="utf-8"))
TEXT = ({"batch": 1, "seq": 7}, {"batch": 3, "seq": 12}, {"batch": 16, "seq": 9})
IMAGES = ({"batch": 1}, {"batch": 3}, {"batch": 16})


@dataclass(frozen=True)
class Architecture:
    """A model of a framework, its inputs, and the sizes it is run with."""

    model: Any
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    cases: tuple[Mapping[str, int], ...]
    opsets: tuple[int, ...] = (17,)
    """The opsets of PyTorch's older exporter; the newer one writes the opset that it chooses."""


class Called(nn.Module):
    """A model of transformers that takes its inputs by place, in the order of `names`, and returns some fields."""

    def __init__(self, model: nn.Module, names: Sequence[str], table: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.fields, self.call, self.mean = table.get("fields", [0]), table.get("call", {}), table.get("mean", False)

    def forward(self, *arrays: torch.Tensor) -> Any:
        """Return the fields, or their mean over the tokens, normalised."""
        given = dict(zip(self.names, arrays, strict=True))
        output = self.model(**given, **self.call, return_dict=True)
        if self.mean:
            mask = given["attention_mask"].unsqueeze(-1).expand(output[0].size()).float()
            mean = (output[0] * mask).sum(1) / torch.clamp(mask.sum(1), min=1e-9)
            return nn.functional.normalize(mean, p=2, dim=1)
        fields = tuple(output[field] for field in self.fields)
        return fields if len(fields) > 1 else fields[0]


def of_table(table: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a table of `user_models.toml`."""
    kind = operator.attrgetter(table["class"])(transformers)
    model = kind(kind.config_class(**{**TABLES["configs"].get(table.get("base"), {}), **table.get("config", {})}))
    if "image" in table:
        size = table["image"]
        inputs: tuple[Input, ...] = (Input("pixel_values", ("batch", 3, size, size)),)
    else:
        entries = [TABLES["inputs"][name] for name in table.get("inputs", ("ids", "mask"))]
        inputs = tuple(Input(**{**entry, "dims": tuple(entry["dims"])}) for entry in entries)
    if "fields" not in table:
        model.config.use_cache = False
    cases = tuple(table.get("cases", IMAGES if "image" in table else TEXT))
    called = Called(model, [each.name for each in inputs], table)
    outputs, opsets = tuple(table.get("fields", ["output"])), tuple(table.get("opsets", (17,)))
    return Architecture(called, inputs, outputs, cases, opsets)


def main() -> int:
    """Export the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--more", type=Path, help="a file of Python with ARCHITECTURES, to take instead")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    known: dict[str, Callable[[], Architecture]]
    known = {name: functools.partial(of_table, table) for name, table in TABLES["models"].items()}
    if options.more is not None:
        known = runpy.run_path(str(options.more))["ARCHITECTURES"]
    path = FOLDER / "index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["packages"] |= {name: importlib.metadata.version(name) for name in PACKAGES}
    for name in options.only.split(",") if options.only else known:
        index["architectures"][name] = keep(name, known[name]())
        path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8", newline="\n")
    return 0


def keep(name: str, built: Architecture) -> dict[str, Any]:
    """Write the exports of one architecture and the outputs of its framework, and return its entry in the index."""
    for old in FOLDER.glob(f"{name}-*.onnx"):
        old.unlink()
    seed = zlib.crc32(name.encode())
    parameters = fill(built.model, seed)
    cases = [{each.name: each.array(sizes, 100 + at) for at, each in enumerate(built.inputs)} for sizes in built.cases]
    results = [answers(built, feeds) for feeds in cases]
    kept: dict[str, Any] = {"outputs": np.int64(len(results[0]))}
    for case, outputs in enumerate(results):
        for at, output in enumerate(outputs):
            kept[f"{case}.{at}"], kept[f"{case}.{at}.shape"] = sampled(output), np.asarray(output.shape, np.int64)
    np.savez_compressed(FOLDER / f"{name}.npz", **kept)
    expected = [[Expected(output.shape, sampled(output)) for output in outputs] for outputs in results]
    given = [_without_defaults(each) for each in built.inputs]
    entry: dict[str, Any] = {"inputs": given, "cases": built.cases, "exports": [], "left_out": []}
    for exporter, opset in (*(("torchscript", opset) for opset in built.opsets), ("dynamo", None)):
        title = f"{exporter} {opset or ''}".strip()
        try:
            model = export(built, exporter, opset, cases[1])
            skeleton = without_weights(model, parameters)
            whole = restored(skeleton).SerializeToString()
            errors = [_error(whole, feeds, want) for feeds, want in zip(cases, expected, strict=True)]
        except Exception as err:  # whatever an exporter raises
            reason = _COLOUR.sub("", f"{type(err).__name__}: {err}".splitlines()[0])[:200]
            entry["left_out"].append({"export": title, "reason": reason})
            print(f"{name:20} {title:16} left out: {reason}", flush=True)
            continue
        written = next(each.version for each in model.opset_import if not each.domain)
        if max(errors) > BOUND:
            by_case = [f"{each:.0e}" for each in errors]
            reason = f"ONNX Runtime's results are off by {max(errors):.1e}, by case {by_case}"
            entry["left_out"].append({"export": title, "reason": reason})
        elif {"exporter": exporter, "opset": written} in entry["exports"]:
            continue
        else:
            entry["exports"].append({"exporter": exporter, "opset": written})
            (FOLDER / f"{name}-{exporter}-{written}.onnx").write_bytes(skeleton)
            reason = f"error {max(errors):.1e}"
        print(f"{name:20} {title:16} opset {written} {len(skeleton):8} bytes {reason}", flush=True)
    return entry


def _without_defaults(given: Input) -> dict[str, Any]:
    default = vars(Input("", ()))
    return {key: value for key, value in vars(given).items() if value != default[key]}


def fill(module: torch.nn.Module, seed: int) -> dict[str, tuple[Mapping[str, Any], np.ndarray[Any, Any]]]:
    """Fill the parameters of a module, and the statistics of its normalisations, and return recipes and values.

    They are spread as the framework spreads them, but none is constant.
    """
    module.eval()
    tensors = dict(module.named_parameters())
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            for each in ("running_mean", "running_var"):
                tensors[f"{name}.{each}"] = getattr(part, each)
    filled: dict[str, Any] = {}
    for name, tensor in tensors.items():
        mean = float(tensor.detach().mean())
        spread = float(tensor.detach().std()) * 3**0.5 if tensor.numel() > 1 else 0.0
        spread = spread or abs(mean) / 10 or 0.05
        recipe = {
            "seed": zlib.crc32(name.encode(), seed),
            "shape": list(tensor.shape),
            "low": float(f"{mean - spread:.3g}"),
            "high": float(f"{mean + spread:.3g}"),
        }
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(made(recipe)))
        filled[name] = (recipe, made(recipe))
    return filled


def answers(built: Architecture, feeds: Mapping[str, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the outputs of the framework."""
    with torch.no_grad():
        outputs = built.model(*map(torch.from_numpy, feeds.values()))
    return [each.numpy() for each in (outputs if isinstance(outputs, tuple) else (outputs,))]


def export(built: Architecture, exporter: str, opset: int | None, feeds: Mapping[str, Any]) -> onnx.ModelProto:
    """Return an ONNX model as an exporter writes it."""
    tensors = tuple(torch.from_numpy(array) for array in feeds.values())
    dynamic: dict[str, dict[int, str]] = {}
    for each in built.inputs:
        dynamic[each.name] = {at: dim for at, dim in enumerate(each.dims) if isinstance(dim, str)}
    names = {"input_names": list(dynamic), "output_names": list(built.outputs)}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "model.onnx"
        if exporter == "torchscript":
            given: dict[str, Any] = {"dynamic_axes": dynamic, "dynamo": False, "opset_version": opset}
        else:
            shapes: tuple[Any, ...] = tuple(dynamic.values())
            shapes = (shapes,) if isinstance(built.model, Called) else shapes  # it takes all in one parameter
            given = {"dynamic_shapes": shapes, "dynamo": True, "external_data": False, "verbose": False}
            given |= {"opset_version": opset} if opset else {}
        torch.onnx.export(built.model, tensors, str(path), **names, **given)
        return onnx.load(path)


def without_weights(model: onnx.ModelProto, parameters: Mapping[str, Any]) -> bytes:
    """Return a model with recipes in place of large weights, and without the exporter's notes."""
    skeleton = onnx.ModelProto()
    skeleton.CopyFrom(model)
    skeleton.ClearField("metadata_props")
    for graph in (*_graphs(skeleton), *skeleton.functions):
        parts = (*graph.node, *graph.value_info, *graph.input, *graph.output, *getattr(graph, "initializer", ()))
        for each in (graph, *(part for part in parts if not isinstance(part, str))):  # functions only name their inputs
            each.ClearField("metadata_props")
            each.ClearField("doc_string")
    for tensor in skeleton.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype != np.float32 or values.nbytes <= LARGE:
            continue
        recipe = found_recipe(values, parameters)
        if recipe is None:
            print(f"  kept: {tensor.name} {values.shape}, {values.nbytes} bytes")
            continue
        del tensor.float_data[:]
        tensor.ClearField("raw_data")
        tensor.metadata_props.add(key=RECIPE, value=json.dumps(recipe, separators=(",", ":")))
    content: bytes = skeleton.SerializeToString(deterministic=True)
    return content


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]


def found_recipe(values: np.ndarray[Any, Any], parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a recipe that gives values, or None: a parameter as it is, in another order, transposed or scaled.

    Values of a recurrent network may be made of one for each direction.
    """
    recipe = _found_in_one(values, parameters)
    if recipe is None and values.ndim == 3 and len(values) == 2:
        parts = [_found_in_one(half, parameters) for half in values]
        return {"parts": parts} if all(parts) else None
    return recipe


def _found_in_one(values: np.ndarray[Any, Any], parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    for recipe, parameter in parameters.values():
        if parameter.size != values.size:
            continue
        for changed, candidate in _orders(recipe, parameter):
            if np.array_equal(candidate.reshape(-1), values.reshape(-1)):
                return changed
    for recipe, parameter in parameters.values():
        if parameter.shape != values.shape:
            continue
        for axis in range(values.ndim):
            others = tuple(at for at in range(values.ndim) if at != axis)
            ratio = values.astype(np.float64) / parameter
            factors = np.median(ratio, others, keepdims=True)
            if np.abs(ratio - factors).max() < 1e-5 * np.abs(factors).max():
                listed = [float(f"{each:.9g}") for each in factors.reshape(-1)]
                return {**recipe, "axis": axis, "factors": listed}
    return None


def _orders(recipe: Mapping[str, Any], values: np.ndarray[Any, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield recipes of a parameter's values in the orders that exporters write them, with the values."""
    yield dict(recipe), values
    for perm in itertools.permutations(range(values.ndim)):
        yield {**recipe, "perm": list(perm)}, values.transpose(perm)
    for blocks in ([0, 3, 1, 2], [1, 0, 2]):  # the gates of an LSTM and of a GRU
        if len(values) % len(blocks) == 0:
            parts = np.split(values, len(blocks))
            yield {**recipe, "blocks": blocks}, np.concatenate([parts[at] for at in blocks])


def _error(model: bytes, feeds: Mapping[str, Any], expected: Sequence[Expected]) -> float:
    """Return how far plain ONNX Runtime on the CPU is from the framework."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    outputs: Iterable[Any] = session.run(None, {each.name: feeds[each.name] for each in session.get_inputs()})
    return max(float(want.error(got)) for got, want in zip(outputs, expected, strict=True))


if __name__ == "__main__":
    sys.exit(main())
