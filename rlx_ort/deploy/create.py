"""Creating a package from a graph and a `Recipe`."""

from __future__ import annotations

import hashlib
import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.deploy.container import LARGE_ALIGNMENT, LARGE_BYTES
from rlx_ort.deploy.golden import TOLERANCES
from rlx_ort.deploy.index import REQUIRABLE, Case, FileEntry, Index, Settings, StoredTensor, Variant, dump
from rlx_ort.deploy.names import INDEX, MANIFEST, SPLIT, TUNINGS
from rlx_ort.deploy.ort_manifest import DATA_FILE, MODEL_FILE, asset_path, asset_uri, manifest_bytes
from rlx_ort.deploy.write import Content, write_package
from rlx_ort.device import Device
from rlx_ort.errors import GraphVerifyError, PackageError
from rlx_ort.execution.staged import cuts_of
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.tensor import TensorData
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.options.split_plan import SplitPlan

_GRAPH = "graph.json"
_GOLDEN = "golden/data.bin"
_LICENSE = "LICENSE.txt"
_INSIDE_BYTES = 1024
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """The settings of a package, and its contents besides the graph.

    Attributes:
        variants: device -> precision, each with its own ONNX model and weights in that precision.
        precisions: device -> precision, for devices without weights of their own: those are rounded when loaded. It
            comes before the precision of a variant that has the model's own weights.
        golden: pairs of inputs and expected outputs; without outputs, those of the CPU in the model's own precision.
        license_text: the text of the licence, which becomes a file of the package.
        tunings: records of `tune` by their keys, as `execution.tunings.of_graph` returns them; hardware and versions
            other than theirs do without.
        split: a plan that cuts the graph into stages, for machines whose devices have its budgets.
    """

    variants: Mapping[str, Precision] = field(default_factory=lambda: {"cpu": Precision.F32})
    precisions: Mapping[str, Precision] = field(default_factory=dict)
    golden: Sequence[tuple[Arrays, Arrays | None]] = ()
    license_text: str = ""
    tunings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    split: SplitPlan | None = None

    def __post_init__(self) -> None:
        for name in ("variants", "precisions"):
            given = getattr(self, name).items()
            object.__setattr__(self, name, {device: Precision(precision) for device, precision in given})


def create_package(
    graph: Graph,
    target: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    folder: bool = False,
    overwrite: bool = False,
    force: bool | None = None,
    progress: Callable[[int], object] | None = None,
    **settings: Any,
) -> str:
    """Write a package and return the SHA-256 of its index, which identifies all of it.

    Weights are read twice, once for their digests and once to be written, and never copied as a whole. The same graph
    and recipe give the same bytes. The package appears whole or not at all.

    Args:
        graph: the model; every parameter needs data.
        target: where the package shall be.
        recipe: its settings.
        folder: whether to write the folder form; the default is one file.
        overwrite: whether a file that is there may be replaced.
        force: deprecated, the name that `overwrite` had.
        progress: called with the bytes written since the last call.
        settings: fields of `Recipe`, as in `version="2"`, in place of those of `recipe`.

    Raises:
        PackageError: a parameter has no data, the target exists or cannot be written, or the recipe does not fit.
        GraphVerifyError: the graph breaks a rule of the IR.
        ConversionError: a node has no ONNX form.
    """
    from rlx_ort.ir.graph import check_dims, require_graph
    from rlx_ort.ir.verify import verify

    require_graph(graph)
    recipe = replace(recipe or Recipe(), **settings)
    if force is not None:
        warnings.warn("force is now called overwrite", DeprecationWarning, stacklevel=2)
        overwrite = force
    _check_recipe(recipe)
    unset = [value.name for value in graph.params if value.name not in graph.weights]
    if unset:
        raise PackageError(f"graph {graph.name!r} has parameters without data: {', '.join(unset[:8])}; set them first")
    check_dims(graph, recipe.dims)
    if problems := verify(graph):
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise GraphVerifyError(f"graph {graph.name!r} cannot be packed:\n{listed}")
    files, index = _Making(graph, recipe).finished()
    raw = index.to_bytes()
    Index.from_bytes(raw)  # the index can be read again
    write_package(
        Path(target), {**files, INDEX: Content.of(raw)}, folder=folder, overwrite=overwrite, progress=progress
    )
    return hashlib.sha256(raw).hexdigest()


def _check_recipe(recipe: Recipe) -> None:
    """Refuse settings that would be ignored, or that would make a package which cannot be opened."""
    if recipe.verify_on_first_use and not recipe.golden:
        raise PackageError("a check at first use needs golden cases; give inputs, or turn the check off")
    for what, least in recipe.requires.items():
        if what not in REQUIRABLE or not re.match(r"\d", least):
            known = " or ".join(REQUIRABLE)
            raise PackageError(
                f"{what}={least} is not a requirement; give {known} and its lowest version, such as 1.31"
            )
    for name, largest in recipe.tolerances.items():
        if name not in TOLERANCES or not 0 <= largest < math.inf:
            known = ", ".join(TOLERANCES)
            raise PackageError(f"{name}={largest} is not a tolerance; give a number of at least 0 for one of {known}")


class _Making:
    """Collects the files of a package and their entries of the index."""

    def __init__(self, graph: Graph, recipe: Recipe) -> None:
        from rlx_ort.ir.serde import to_json

        self._graph = graph
        self._recipe = recipe
        self._files: dict[str, Content] = {}
        self._entries: dict[str, FileEntry] = {}
        self._tensors: dict[str, StoredTensor] = {}
        text, stored = to_json(graph)
        self._add(_GRAPH, text.encode("utf-8"))
        self._base = Blob()
        self._base_places: dict[int, int] = {}  # id of a tensor -> its offset
        for name, data in stored.items():
            self._base_places[id(data)] = self._base.add(name, data)
        self._kept = stored  # the ids above stay theirs

    def finished(self) -> tuple[dict[str, Content], Index]:
        """Return every file but the index, and the index."""
        from rlx_ort.converters.onnx_types import relocated

        recipe = self._recipe
        variants: dict[str, Variant] = {}
        models = {}
        for label, precision in recipe.variants.items():
            device = Device(label)
            name = _variant_name(device, precision)
            models[name] = self._model(name, precision)
            rounded = {param: f"{name}/{param}" for param in models[name][0].stored_as}
            variants[name] = Variant(device.label, precision, rounded)
        listed: dict[str, tuple[Device, str]] = {}
        uris: dict[int, str] = {}  # id of a data file -> its asset
        for name, (exported, places, inside, blob) in models.items():
            if places and id(blob) not in uris:
                uris[id(blob)] = asset_uri(self._add_blob(blob, asset_path).sha256)
            listed[name] = (Device(variants[name].device), uris[id(blob)] if places else "")
            self._add(f"{name}/{MODEL_FILE}", relocated(exported.model, places, inside))
        if id(self._base) not in uris and self._base.size:
            self._add_blob(self._base, asset_path)
        for label, precision in recipe.precisions.items():
            _give_precision(variants, Device(label), precision)
        cases = self._golden()
        name = recipe.name or self._graph.name
        self._add(MANIFEST, manifest_bytes(name, recipe.version, listed))
        if recipe.license_text:
            self._add(_LICENSE, recipe.license_text.encode("utf-8"))
        if recipe.tunings:
            self._add(TUNINGS, dump({"tunings": {key: dict(record) for key, record in recipe.tunings.items()}}))
        if recipe.split is not None:
            cuts_of(self._graph, recipe.split)
            self._add(SPLIT, dump(recipe.split.document()))
        settings = {entry.name: getattr(recipe, entry.name) for entry in fields(Settings)}
        settings |= {"name": name, "tolerances": {**TOLERANCES, **recipe.tolerances} if cases else {}}
        index = Index(
            **settings, graph=_GRAPH, files=self._entries, tensors=self._tensors, variants=variants, cases=cases
        )
        return self._files, index

    def _model(
        self, variant: str, precision: Precision
    ) -> tuple[Any, dict[str, tuple[str, int, int]], dict[str, TensorData], Blob]:
        """Return the exported model of a variant, where its weights are, which are inside, and their data file.

        ONNX Runtime looks for all weights of a model in one folder, so a variant in another precision has a data file
        of its own, which repeats the weights that are not rounded.
        """
        from rlx_ort.converters.to_onnx.exporter import exported

        model = exported(self._graph, CompileOptions(precision=precision, dims=dict(self._recipe.dims)))
        blob = Blob() if model.stored_as else self._base
        places: dict[str, tuple[str, int, int]] = {}
        inside: dict[str, TensorData] = {}
        tensors = {name: self._graph.weights[name] for name in model.params} | dict(model.constants)
        for name, data in tensors.items():
            dtype = model.stored_as.get(name)
            if dtype is None and (data.dtype is DType.STRING or data.nbytes < _INSIDE_BYTES):
                inside[name] = data
                continue
            known = self._base_places.get(id(data)) if blob is self._base else None
            if known is None:
                known = blob.add(f"{variant}/{name}", data, dtype)
                if blob is self._base:
                    self._base_places[id(data)] = known
            places[name] = (DATA_FILE, known, (dtype or data.dtype).nbytes(data.num_elements))
        return model, places, inside, blob

    def _golden(self) -> tuple[Case, ...]:
        if not self._recipe.golden:
            return ()
        blob, cases = Blob(), []
        for number, (inputs, outputs) in enumerate(self._recipe.golden):
            self._check_case(number, inputs, outputs)
            if outputs is None:
                from rlx_ort.execution.session import Session

                options = CompileOptions(dims=dict(self._recipe.dims))
                with Session("cpu", options).compile(self._graph) as compiled:
                    outputs = dict(zip(compiled.output_specs, compiled.run(inputs), strict=True))
            sides = []
            for side, arrays in (("in", inputs), ("out", outputs)):
                names = {name: f"golden/{number}/{side}/{name}" for name in arrays}
                for name, array in arrays.items():
                    blob.add(names[name], TensorData.from_array(np.asarray(array)))
                sides.append(names)
            cases.append(Case(*sides))
        self._add_blob(blob, lambda _: _GOLDEN)
        return tuple(cases)

    def _check_case(self, number: int, inputs: Arrays, outputs: Arrays | None) -> None:
        wanted, known = {value.name for value in self._graph.inputs}, set(self._graph.output_names)
        if set(inputs) != wanted:
            given, needed = ", ".join(inputs) or "none", ", ".join(sorted(wanted)) or "none"
            raise PackageError(f"golden case {number} has the inputs {given}, and the model takes {needed}")
        if outputs is not None and (not outputs or not known.issuperset(outputs)):
            given, needed = ", ".join(outputs) or "none", ", ".join(sorted(known))
            raise PackageError(f"golden case {number} has the outputs {given}, and the model gives {needed}")

    def _add(self, name: str, data: bytes) -> None:
        self._files[name] = Content.of(data)
        self._entries[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest(), zlib.crc32(data))

    def _add_blob(self, blob: Blob, path_of: Callable[[str], str]) -> FileEntry:
        entry, tensors, content = blob.digest(path_of)
        path = path_of(entry.sha256)
        self._files[path], self._entries[path] = content, entry
        self._tensors |= tensors
        return entry


def _variant_name(device: Device, precision: Precision) -> str:
    return f"{device.label.replace(':', '-')}-{precision.value}"


def _give_precision(variants: dict[str, Variant], device: Device, precision: Precision) -> None:
    """Set the precision of a device. It replaces the variant, whose ONNX model stays in the package for other readers.

    Raises:
        PackageError: the device has stored weights in another precision, which would be unused.
    """
    rounded: dict[str, str] = {}
    for name, variant in [item for item in variants.items() if item[1].device == device.label]:
        if variant.rounded and variant.precision is not precision:
            what = f"{device.label} has weights in {variant.precision.value} and is to run in {precision.value}"
            raise PackageError(f"{what}; give it one of the two")
        rounded = dict(variants.pop(name).rounded)
    variants[_variant_name(device, precision)] = Variant(device.label, precision, rounded)


_SMALL_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 22


class Blob:
    """A data file under construction. Tensors of 1 MiB and more begin at a multiple of 64 KiB, others of 64 bytes."""

    def __init__(self) -> None:
        self.size = 0
        # Name, place without file and digest, and the function that makes the data.
        self._pieces: list[tuple[str, StoredTensor, Callable[[], TensorData]]] = []

    def add(self, name: str, data: TensorData, dtype: DType | None = None) -> int:
        """Append a tensor, rounded to `dtype` where one is given, and return its offset; nothing is computed yet.

        Raises:
            PackageError: it is of strings, which have no bytes here.
        """
        from rlx_ort.ir.tensor import narrowed

        kept = data.dtype if dtype is None else dtype
        if kept is DType.STRING:
            raise PackageError(f"tensor {name!r} holds strings, which a data file of a package cannot")
        size = kept.nbytes(data.num_elements)
        step = LARGE_ALIGNMENT if size >= LARGE_BYTES else _SMALL_ALIGNMENT
        offset = -(-self.size // step) * step
        make = (lambda: data) if kept is data.dtype else (lambda: narrowed(data, kept))
        self._pieces.append((name, StoredTensor("", offset, size, kept, data.shape, ""), make))
        self.size = offset + size
        return offset

    def digest(self, path_of: Callable[[str], str]) -> tuple[FileEntry, dict[str, StoredTensor], Content]:
        """Read every tensor once; return the file's entry, those of its tensors by name, and its bytes.

        `path_of` gives the file's name for its SHA-256.
        """
        whole, crc = hashlib.sha256(), 0
        own = {name: hashlib.sha256() for name, _, _ in self._pieces}
        for name, chunk in self._chunks():
            whole.update(chunk)
            crc = zlib.crc32(chunk, crc)
            if name is not None:
                own[name].update(chunk)
        path = path_of(whole.hexdigest())
        tensors = {name: entry._replace(file=path, sha256=own[name].hexdigest()) for name, entry, _ in self._pieces}
        content = Content(self.size, crc, lambda: (chunk for _, chunk in self._chunks()))
        return FileEntry(self.size, whole.hexdigest(), crc), tensors, content

    def _chunks(self) -> Iterator[tuple[str | None, bytes | memoryview]]:
        """Yield the bytes of the file, each with the tensor they are of; None for the gap before one."""
        end = 0
        for name, entry, make in self._pieces:
            if entry.offset > end:
                yield None, bytes(entry.offset - end)
            data = np.ascontiguousarray(make().buffer).data
            for start in range(0, len(data), _CHUNK_BYTES):
                yield name, data[start : start + _CHUNK_BYTES]
            end = entry.offset + entry.size
