"""Served models: opening, warming and unloading them, their metadata, and the repository that holds them by name.

A warmed package answers from the compile cache first, on the CPU and one request at a time. Meanwhile it is opened in
full: what that imports is imported then, since the process has to wait for every import before it is ready.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.deploy.names import required_key
from rlx_ort.deploy.start import StartedPackage, quick_start
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError, RlxError, ServingError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Shape, TensorType, ValueType
from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.serving import tracing
from rlx_ort.serving.lanes import Answer, Times
from rlx_ort.serving.model_devices import started_devices, tried_devices
from rlx_ort.serving.protocol import Array, InferRequest, datatype_of
from rlx_ort.serving.scheduler import BatchOptions, Scheduler

if TYPE_CHECKING:
    from rlx_ort.deploy.open import PackageDevices
    from rlx_ort.graph_devices import GraphDevices
    from rlx_ort.providers.engine.compiled.starts import Interface
    from rlx_ort.resilience.options import Resilience

_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
_MODEL_SUFFIXES = (".onnx", ".ortpackage")  # of models in folders; a graph's JSON is served if it is named itself
_SIZES_COUNTED = 256  # batches of more rows are counted by the next power of two
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeOptions:
    """How models are served.

    Attributes:
        policy: which devices may be used, by default those of the `RLX_*` variables; packages narrow it by their own.
        batch: the limits of each model's queue.
        require_signature: PEM file of the key that must have signed packages.
        signed_only: whether models without a signature are refused, ONNX files among them.
        devices: how many devices of the ranking run a model at the same time.
        resilience: time limits and memory budgets of runs; other devices answer where one fails in any case. None
            for the defaults of `Resilience`.
        precision: in which the f32 parts of ONNX files are computed, as `Precision` names it; packages have their own.
    """

    policy: DevicePolicy | None = None
    batch: BatchOptions = field(default_factory=BatchOptions)
    require_signature: str | None = None
    signed_only: bool = False
    devices: int = 8
    resilience: Resilience | None = None
    precision: str = "f32"


@dataclass
class Counter:
    """How often something happened, and how long it took in all, in ns."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Count something that took so long."""
        self.count += count
        self.ns += ns


@dataclass
class Statistics:
    """What a model did since it was loaded, in the terms of Triton's statistics extension."""

    last_ms: int = 0
    inferences: int = 0
    executions: int = 0
    spans: dict[str, Counter] = field(
        default_factory=lambda: {
            name: Counter() for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        }
    )
    batches: dict[int, dict[str, Counter]] = field(default_factory=dict)
    devices: dict[str, int] = field(default_factory=dict)

    def answered(self, times: Times, total_ns: int) -> None:
        """Count a request that was answered."""
        self.last_ms = time.time_ns() // 1_000_000
        self.inferences += 1
        found = {"success": total_ns, "queue": times.queue_ns, "compute_input": times.input_ns}
        found |= {"compute_infer": times.infer_ns, "compute_output": times.output_ns}
        for name, ns in found.items():
            self.spans[name].add(ns)

    def ran(self, device: Device, rows: int, requests: int, times: Times) -> None:
        """Count a batch that was run."""
        self.executions += 1
        self.devices[device.label] = self.devices.get(device.label, 0) + requests
        size = rows if rows <= _SIZES_COUNTED else 1 << (rows - 1).bit_length()  # clients choose the rows
        spans = self.batches.setdefault(size, {name: Counter() for name in list(self.spans)[3:]})
        for name, ns in zip(spans, (times.input_ns, times.infer_ns, times.output_ns), strict=True):
            spans[name].add(ns)


class ServedModel:
    """A version of a model that answers requests. It belongs to one event loop; opening it may take seconds.

    Args:
        name: its name.
        version: its version.
        opened: the graph on its devices, or a package that was started and is opened in full by `complete`; closed with
            the model.
        options: how it is served.

    Raises:
        ServingError: an input or output is of a type that the protocol cannot carry.
        NoViableDeviceError: no device may run it.
    """

    def __init__(self, name: str, version: str, opened: GraphDevices | StartedPackage, options: ServeOptions) -> None:
        self.name, self.version = name, version
        self.statistics = Statistics()
        self._opened, self._options = opened, options
        self._completing: asyncio.Task[None] | None = None
        self.inputs: Mapping[str, ValueType]
        self.outputs: Mapping[str, ValueType]
        if isinstance(opened, StartedPackage):
            self.inputs, self.outputs = ({each.name: _type_of(each) for each in side} for side in opened.interface)
            devices = started_devices(opened, self.inputs, options)
        else:
            graph = opened.graph
            self.inputs = {value.name: value.type for value in graph.inputs}
            named = dict(zip(graph.output_names, graph.outputs, strict=True))
            self.outputs = {output: value.type for output, value in named.items()}
            devices = tried_devices(name, opened, options)
        self.input_types = {name: datatype_of(kind, name) for name, kind in self.inputs.items()}
        self.output_types = {name: datatype_of(kind, name) for name, kind in self.outputs.items()}
        self.left_out, self.batched_along = devices.left_out, devices.batched_along
        self.scheduler = Scheduler(
            devices.lanes, batched=self.batched_along is not None, options=options.batch, on_batch=self.statistics.ran
        )

    @property
    def runner(self) -> GraphDevices:
        """The graph on its devices; of a package that was started, opened in full at the first access."""
        return self._opened.runner if isinstance(self._opened, StartedPackage) else self._opened

    @property
    def is_complete(self) -> bool:
        """Whether all devices are open; a package that was started answers before."""
        return not isinstance(self._opened, StartedPackage) or (
            self._completing is not None and self._completing.done()
        )

    def complete(self, on_error: Callable[[Exception], object]) -> None:
        """Begin to open the devices of a package that was started, if that has not begun; it answers meanwhile."""
        if isinstance(self._opened, StartedPackage) and self._completing is None:
            self._completing = asyncio.ensure_future(self._completed(self._opened, on_error))

    async def _completed(self, package: StartedPackage, on_error: Callable[[Exception], object]) -> None:
        try:
            devices = await asyncio.to_thread(lambda: tried_devices(self.name, package.runner, self._options))
        except Exception as err:  # whatever it is, the model is not what its package is said to be
            on_error(err)
            return
        self.left_out, self.batched_along = devices.left_out, devices.batched_along
        self.scheduler.replace(devices.lanes, batched=self.batched_along is not None)
        await asyncio.to_thread(package.end_quick)

    async def completed(self) -> None:
        """Wait until all devices are open and it is known whether requests are batched."""
        if self._completing is not None:
            await asyncio.shield(self._completing)

    async def infer(self, request: InferRequest) -> Answer:
        """Return the outputs that a request asks for.

        Raises:
            ServingError: the request does not fit the model, or its queue refuses it.
            RlxError: the run failed.
        """
        begun_ns = time.perf_counter_ns()
        try:
            self._check(request)
            wanted = None if request.outputs is None else tuple(output.name for output in request.outputs)
            found = await self.scheduler.submit(
                request.inputs, wanted, priority=request.priority, timeout_s=request.timeout_s
            )
        except RlxError:
            self.statistics.spans["fail"].add(time.perf_counter_ns() - begun_ns)
            raise
        self.statistics.answered(found.times, time.perf_counter_ns() - begun_ns)
        tracing.add_phases(self.name, self.version, found, begun_ns)
        return found

    def metadata(self, versions: Sequence[str]) -> dict[str, Any]:
        """Return the model's metadata in the protocol's form."""
        sides = {"inputs": (self.inputs, self.input_types), "outputs": (self.outputs, self.output_types)}
        return {
            "name": self.name,
            "versions": list(versions),
            "platform": "onnxruntime_onnx",
            **{
                side: [
                    {"name": name, "datatype": types[name], "shape": _open_shape(kind)} for name, kind in kinds.items()
                ]
                for side, (kinds, types) in sides.items()
            },
        }

    async def config(self) -> dict[str, Any]:
        """Return the model's configuration in the form of Triton's extension, once it is complete."""
        await self.completed()
        batched = self.batched_along is not None

        def tensors(kinds: Mapping[str, Any], types: Mapping[str, str]) -> list[dict[str, Any]]:
            names = {"BYTES": "STRING"}
            return [
                {
                    "name": name,
                    "data_type": f"TYPE_{names.get(types[name], types[name])}",
                    "dims": _open_shape(kind)[1 if batched else 0 :],
                }
                for name, kind in kinds.items()
            ]

        return {
            "name": self.name,
            "platform": "onnxruntime_onnx",
            "backend": "onnxruntime",
            "max_batch_size": self.scheduler.options.max_batch if batched else 0,
            "input": tensors(self.inputs, self.input_types),
            "output": tensors(self.outputs, self.output_types),
            "instance_group": [
                {"name": lane.device.label, "kind": "KIND_CPU" if lane.device == Device.CPU else "KIND_GPU", "count": 1}
                for lane in self.scheduler.lanes
            ],
            **({"dynamic_batching": {}} if batched else {}),
        }

    async def close(self) -> None:
        """Answer the requests that were accepted, then close the sessions."""
        await self.scheduler.close()
        await self.completed()
        await asyncio.to_thread(self._opened.close)

    def _check(self, request: InferRequest) -> None:
        missing = [name for name in self.inputs if name not in request.inputs]
        unknown = [name for name in request.inputs if name not in self.inputs]
        if missing or unknown:
            raise ServingError(
                f"{self.name} takes {', '.join(self.inputs) or 'no inputs'}"
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + (f"; unknown: {', '.join(unknown)}" if unknown else ""),
                400,
            )
        for name, array in request.inputs.items():
            kind = self.inputs[name]
            if isinstance(kind, TensorType) and not _fits(kind, array):
                raise ServingError(
                    f"input {name!r} of {self.name} is {self.input_types[name]} {_open_shape(kind)}; "
                    f"given: {array.dtype} {list(array.shape)}",
                    400,
                )
        if self.batched_along is not None:
            rows = {array.shape[0] for array in request.inputs.values()}
            if len(rows) > 1 or rows == {0}:
                raise ServingError(f"the inputs have {sorted(rows)} rows; {self.name} takes as many of each", 400)
        for output in request.outputs or ():
            if output.name not in self.outputs:
                raise ServingError(f"{self.name} has no output {output.name!r}; it has {', '.join(self.outputs)}", 400)


@dataclass
class Entry:
    """A model of a repository: where its versions are, and those that are loaded.

    Attributes:
        paths: version -> its file or folder.
        loaded: version -> the model that answers.
        reason: why it is not loaded, empty if it is.
    """

    paths: dict[str, Path]
    loaded: dict[str, ServedModel] = field(default_factory=dict)
    reason: str = ""


class Repository:
    """The models that an operator named. No name of a request ever becomes a path.

    Args:
        sources: model files, packages, and folders that hold them; a folder may have Triton's layout,
            NAME/VERSION/model.onnx.
        options: how they are served.

    Raises:
        ConversionError: a source is no model, or two models have one name.
    """

    def __init__(self, sources: Sequence[Path], options: ServeOptions | None = None) -> None:
        self.options = options or ServeOptions()
        self._sources = list(sources)
        self._changing = asyncio.Lock()
        self._draining = False
        self._closing: set[asyncio.Future[None]] = set()
        self.entries: dict[str, Entry] = {}
        for name, version, path in self._found():
            entry = self.entries.setdefault(name, Entry({}))
            if version in entry.paths:
                raise ConversionError(f"{path} and {entry.paths[version]} are both version {version} of {name!r}")
            entry.paths[version] = path
        if not self.entries:
            raise ConversionError(f"there is no model in {', '.join(map(str, sources)) or 'what was named'}")

    @property
    def ready(self) -> bool:
        """Whether every model that was named is loaded, and the server is not ending."""
        return not self._draining and all(entry.loaded for entry in self.entries.values())

    def drain(self) -> None:
        """Be not ready, and load no further model; those that are loaded answer until `close`."""
        self._draining = True

    async def load_all(self, *, complete: bool = True) -> None:
        """Load every model; one that fails keeps its reason, and the others are loaded.

        Without `complete`, packages that were started are opened in full once `complete` is called.
        """
        for name in list(self.entries):
            try:
                await self._shielded(self._load(name, complete))
            except RlxError as err:
                _log.error("%s is not served: %s", name, err)

    async def load(self, name: str) -> None:
        """Load the versions of a model that are on disk now; requests go to the old ones until then.

        Raises:
            ServingError: there is no such model (404), or it is refused.
            RlxError: it cannot be opened.
        """
        await self._shielded(self._load(name))

    def complete(self) -> None:
        """Begin to open packages in full that were started from the compile cache."""
        for entry in self.entries.values():
            for model in entry.loaded.values():
                model.complete(functools.partial(self._refused, entry, model))

    async def _shielded(self, change: Coroutine[Any, Any, None]) -> None:
        """Wait for a change, which a caller that goes away does not leave half made."""
        await asyncio.shield(asyncio.ensure_future(change))

    async def _load(self, name: str, complete: bool = True) -> None:
        async with self._changing:
            if self._draining:
                raise ServingError("the server is ending", 503)
            paths = {version: path for found, version, path in self._found() if found == name}
            if not paths:
                raise ServingError(f"there is no model {name!r} in the repository", 404)
            entry = self.entries.setdefault(name, Entry(paths))
            made: dict[str, ServedModel] = {}
            try:
                for version, path in paths.items():
                    made[version] = await asyncio.to_thread(self._opened, name, version, path)
            except Exception as err:  # raised again, once the versions that were opened are closed
                entry.reason = str(err)
                for model in made.values():
                    await model.close()
                raise
            old, entry.paths, entry.loaded, entry.reason = entry.loaded, paths, made, ""
        if complete:
            self.complete()
        for model in old.values():
            await model.close()

    def _refused(self, entry: Entry, model: ServedModel, error: Exception) -> None:
        """Unload a package that cannot be opened in full."""
        _log.error("%s is not served any more: %s", model.name, error)
        if entry.loaded.get(model.version) is model:
            del entry.loaded[model.version]
            entry.reason = str(error)
            self._closing.add(closing := asyncio.ensure_future(model.close()))
            closing.add_done_callback(self._closing.discard)

    async def unload(self, name: str) -> None:
        """Stop serving a model once the requests that were accepted are answered.

        Raises:
            ServingError: there is no such model (404).
        """
        await self._shielded(self._unload(name))

    async def _unload(self, name: str) -> None:
        async with self._changing:
            entry = self.entries.get(name)
            if entry is None:
                raise ServingError(f"there is no model {name!r} in the repository", 404)
            old, entry.loaded, entry.reason = entry.loaded, {}, "unloaded"
        for model in old.values():
            await model.close()

    async def close(self) -> None:
        """Drain and close every model."""
        self.drain()
        for name in list(self.entries):
            await self.unload(name)
        await asyncio.gather(*self._closing)

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return a loaded model, its newest version by default.

        Raises:
            ServingError: there is none of that name or version (404), or it is not loaded (503).
        """
        entry = self.entries.get(name)
        if entry is None:
            raise ServingError(f"there is no model {name!r}; known: {', '.join(self.entries) or 'none'}", 404)
        if not entry.loaded:
            raise ServingError(f"model {name!r} is not ready: {entry.reason or 'it is being loaded'}", 503)
        if version and version not in entry.loaded:
            raise ServingError(f"model {name!r} has no version {version!r}; it has {', '.join(entry.loaded)}", 404)
        return entry.loaded[version or max(entry.loaded, key=_version_order)]

    def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        """Return the repository index of Triton's extension."""
        rows = []
        for name, entry in self.entries.items():
            for version in entry.paths:
                loaded = version in entry.loaded
                if loaded or not ready_only:
                    state = {"state": "READY" if loaded else "UNAVAILABLE", "reason": "" if loaded else entry.reason}
                    rows.append({"name": name, "version": version, **state})
        return rows

    def models(self) -> Iterator[ServedModel]:
        """Yield every loaded version of every model."""
        for entry in self.entries.values():
            yield from entry.loaded.values()

    def _found(self) -> Iterator[tuple[str, str, Path]]:
        """Yield name, version and path of every model of the sources."""
        for source in self._sources:
            if source.is_file() or source.suffix == ".ortpackage":
                yield _model_name(source), "1", source
                continue
            if not source.is_dir():
                raise ConversionError(f"{source} is neither a model nor a folder of models")
            for path in sorted(source.iterdir()):
                if path.suffix in _MODEL_SUFFIXES:
                    yield _model_name(path), "1", path
                elif path.is_dir():
                    for version in sorted(path.iterdir()):
                        file = next(
                            (version / f"model{end}" for end in _MODEL_SUFFIXES if (version / f"model{end}").exists()),
                            None,
                        )
                        if re.fullmatch(r"[0-9]{1,18}", version.name) and file is not None:
                            yield _model_name(path), version.name, file

    def _opened(self, name: str, version: str, path: Path) -> ServedModel:
        options = self.options
        opened: GraphDevices | StartedPackage
        if path.suffix == ".ortpackage":
            if options.signed_only and options.require_signature is None:
                raise ServingError(f"{path.name}: only signed packages are served; give the key with --key", 403)
            opened = _started(path, options) or _package(options, path)
        elif options.signed_only:
            raise ServingError(f"{path.name} is no package; only signed packages are served", 403)
        else:
            opened = _file(options, path)
        try:
            return ServedModel(name, version, opened, options)
        except BaseException:
            opened.close()
            raise


def _started(path: Path, options: ServeOptions) -> StartedPackage | None:
    """Return a package started from the compile cache; None if it was not warmed or must be opened in full first."""
    if required_key(options.require_signature) is not None or options.resilience is not None:
        return None
    if options.policy is not None and not options.policy.allows(Device.CPU):
        return None
    return quick_start(path, pack=False, opens=functools.partial(_package, options))


def _package(options: ServeOptions, path: Path, **expected: Any) -> PackageDevices:
    """Return a package opened in full."""
    from rlx_ort.deploy.open import open_package
    from rlx_ort.resilience.options import Resilience

    resilience = options.resilience or Resilience()
    key = options.require_signature
    return open_package(path, options.policy, require_signature=key, resilience=resilience, **expected)


def _file(options: ServeOptions, path: Path) -> GraphDevices:
    """Return the graph of a file on its devices."""
    from rlx_ort.deploy.open import load
    from rlx_ort.options.compile_options import CompileOptions, PlacementRule, Precision
    from rlx_ort.resilience.options import Resilience

    precision = Precision(options.precision)
    compiled = CompileOptions(precision=precision, placement=PlacementRule.ASSISTED, spinning=False)
    return load(path, options.policy, compiled, resilience=options.resilience or Resilience())


def _model_name(path: Path) -> str:
    name = path.stem if path.is_file() or path.suffix in _MODEL_SUFFIXES else path.name
    if not _NAME.fullmatch(name):
        raise ConversionError(f"{path}: a served model is named by letters, digits, '.', '_' and '-'; rename it")
    return name


def _version_order(version: str) -> tuple[int, str]:
    return int(version), version


def _type_of(declared: Interface) -> TensorType:
    """Return the type of an input or output of a package that was started."""
    return TensorType(DType.from_numpy(np.dtype(declared.dtype)), Shape(declared.shape))


def _fits(kind: TensorType, array: Array) -> bool:
    if array.dtype != (np.dtype(object) if kind.dtype is DType.STRING else kind.dtype.numpy):
        return False
    if kind.shape is None:
        return True
    return len(kind.shape) == array.ndim and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(kind.shape, array.shape, strict=True)
    )


def _open_shape(kind: Any) -> list[int]:
    shape = kind.shape if isinstance(kind, TensorType) else None
    return [] if shape is None else [dim if isinstance(dim, int) else -1 for dim in shape]
