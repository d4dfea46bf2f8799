"""`open_package`: a package, ready to run on this machine. `warm_package` fills the compile cache for it before."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlx_ort import environment
from rlx_ort.deploy.index import parse
from rlx_ort.deploy.names import SPLIT, TUNINGS, is_package, required_key
from rlx_ort.deploy.package import Package
from rlx_ort.device import Device, DeviceLike, as_devices
from rlx_ort.errors import EngineError, IntegrityError, PackageError, RlxError
from rlx_ort.execution.interface import Outputs, outputs_class
from rlx_ort.graph_devices import GraphDevices, resilience_from_env
from rlx_ort.options.compile_options import CacheUse, CompileOptions, PlacementRule, WeightSharing
from rlx_ort.providers.engine.compiled.store import use_of
from rlx_ort.routes import RESOLVED
from rlx_ort.selection.policy import DevicePolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rlx_ort.converters.from_onnx import Source
    from rlx_ort.converters.from_onnx.tensor_files import Folders
    from rlx_ort.execution.buckets import BucketedCompileCache
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.ir.graph import Graph
    from rlx_ort.providers.engine.compiled.models import Opening
    from rlx_ort.providers.engine.compiled.starts import SavedSession
    from rlx_ort.resilience.options import Resilience


class PackageDevices(GraphDevices):
    """Runs a package on whichever devices are asked for or chosen; see `GraphDevices`.

    A warmed package starts with a session from the compile cache, which serves runs that name the CPU. Anything else
    (the graph, the weights, a report, another device, a new policy) loads the graph and closes that session. From then
    on the runner behaves as for a package that was not warmed.

    Args:
        package: the open package.
        policy: which devices may be chosen.
        options: how to compile.
        quick: the session of the warmed package, or None to load the graph at once.
        resilience: how to react to devices that fail; see `GraphDevices`.

    Raises:
        PackageError: the graph file is no graph.
        IntegrityError: it was changed.
    """

    def __init__(
        self,
        package: Package,
        policy: DevicePolicy,
        options: CompileOptions,
        quick: SavedSession | None = None,
        *,
        resilience: Resilience | None = None,
    ) -> None:
        self._package = package
        self._quick = quick
        if SPLIT in package.index.files and options.split is None:
            options = _split(package, options)
        self._prepare(policy, options, resilience, self._read)
        if TUNINGS in package.index.files:
            from rlx_ort.execution import tunings

            tunings.carry(
                {key: item.raw for key, item in parse(package.read(TUNINGS), TUNINGS).entries("tunings").items()}
            )
        if quick is None:
            self._sessions.follow_graph()
        else:
            self._named = outputs_class((output.name for output in quick.start.outputs), Device.CPU)

    @property
    def golden_inputs(self) -> list[dict[str, Any]]:
        """The inputs of the package's golden cases, verified as they are read."""
        return [self._package.arrays(case.inputs) for case in self._package.cases]

    @property
    def package_sha256(self) -> str:
        """The digest of the package's index, hexadecimal, which pins the package."""
        return self._package.sha256

    def run(
        self, first: Any = None, second: Any = None, /, *, device: Any = None, inputs: Any = None, **limits: Any
    ) -> Outputs:
        """Run on a device and return the outputs in order; see `GraphDevices.run`.

        The first four runs of a warmed package use unpacked weights, later ones packed weights; results differ by
        rounding. A graph from `compile` always uses packed weights.
        """
        if second is None or not isinstance(first, (str, Device)):
            first, second = self._asked(first, second, device, inputs)
        if first is RESOLVED:
            return super().run_resolved(second, **limits)
        results = None if limits else self._run_quick(first, second)
        return super().run(first, second, **limits) if results is None else results

    def run_resolved(self, inputs: Mapping[str, Any], device: DeviceLike | None = None, **limits: Any) -> Outputs:
        """Run on the device that `resolve` returns."""
        results = None if limits or not isinstance(device, (str, Device)) else self._run_quick(device, inputs)
        return super().run_resolved(inputs, device, **limits) if results is None else results

    def invalidate_cache(self) -> None:
        """Close every session and forget the devices and the benchmark winners; the weights stay."""
        self._end_quick()
        super().invalidate_cache()

    def __repr__(self) -> str:
        if self._quick is None:
            return super().__repr__()
        return f"<GraphDevices of {self._package.path.name}, started on {Device.CPU.display}>"

    def _run_quick(self, device: Device | str, inputs: Mapping[str, Any]) -> Outputs | None:
        """Run from the compile cache, or return None where the graph is needed."""
        quick = self._quick
        if quick is None or Device(device) != Device.CPU or self.policy.refusal(Device.CPU) is not None:
            return None
        outputs = quick.run(inputs)
        return None if outputs is None else self._named(outputs)

    def _end_quick(self) -> None:
        quick, self._quick = self._quick, None
        if quick is not None:
            quick.close()

    def _read(self) -> tuple[Graph, WeightStore]:
        """Return the graph and its weights, and close the session from the compile cache."""
        from rlx_ort.execution.weights import WeightStore

        graph = self._package.graph()
        weights = WeightStore.for_graph(graph)
        declared = {value.name for value in graph.params}
        for variant in self._package.index.variants.values():
            for param, stored in variant.rounded.items():
                if param not in declared or weights.get(param) is None:
                    raise IntegrityError(
                        f"{self._package.path} has rounded weights for {param!r}, which is not a parameter of it"
                    )
                weights.provide_rounded(param, self._package.tensor(stored))
        self._end_quick()
        return graph, weights


def load(
    source: Source,
    policy: DevicePolicy | None = None,
    options: CompileOptions | None = None,
    *,
    resilience: Resilience | None = None,
    trusted_links: Folders = (),
) -> GraphDevices:
    """Read a model or package, by its content, and return it ready to run on the devices of this machine.

    Without a policy, the `RLX_*` variables are the policy; see `DevicePolicy.from_env`. Without `resilience`,
    `RLX_RESILIENCE` decides.

    Args:
        source: the path of an ONNX file, an IR JSON file, an exported program of PyTorch (`.pt2`) or a package, which
            is opened as by `open_package`; or the bytes of an ONNX model, or a `ModelProto`.
        policy: which devices may be chosen; it narrows the policy of a package.
        options: how to compile.
        resilience: how to react to devices that fail.
        trusted_links: folders that links of an ONNX file's external data may lead into; see `from_onnx`.

    Raises:
        ConversionError: the source is no model, or holds something that cannot be translated.
        PackageError: the package cannot be opened; see `open_package`.
        DeviceParseError: one of the variables that are read does not parse.
    """
    from rlx_ort.converters.files import load_graph

    if isinstance(source, str | os.PathLike) and is_package(source):
        return open_package(source, policy, options, resilience=resilience)
    policy = DevicePolicy.from_env() if policy is None else policy  # before anything is read
    resilience = resilience_from_env() if resilience is None else resilience
    return GraphDevices(load_graph(source, trusted_links=trusted_links), policy, options, resilience=resilience)


def open_package(
    path: str | os.PathLike[str],
    policy: DevicePolicy | None = None,
    options: CompileOptions | None = None,
    *,
    require_signature: str | os.PathLike[str] | None = None,
    sha256: str | None = None,
    min_serial: int = 0,
    private: bool = False,
    verify_on_first_use: bool | None = None,
    resilience: Resilience | None = None,
) -> PackageDevices:
    """Return a packaged model, ready to run on the devices of this machine.

    Weights stay in the package and are mapped from there; the bytes of each are hashed when a session first takes
    them, so opening takes milliseconds and the first run may also raise an `IntegrityError`. No session is opened,
    unless the package asks for its golden cases on a machine that has not run them: see `rlx_ort.deploy.golden`.
    Devices that failed them are denied, and `last_attempts` has the reasons.

    After `rlx-ort package warm`, runs on the CPU start from the compile cache, and the graph is not decoded until it is
    needed: see `PackageDevices`. The package is checked all the same.

    Args:
        path: the package, a folder or a file.
        policy: which devices may be chosen, in place of the `RLX_*` variables. Either narrows the package's own
            policy: a device needs the consent of both. `set_policy` of the result replaces both.
        options: how to compile; its dims and precisions come before those of the package.
        require_signature: PEM file of the public key that must have signed the package; by default the
            one that `RLX_PACKAGE_KEY` names, if it is set. Either being empty is an error.
        sha256: the digest of the index that is wanted, hexadecimal, as `rlx-ort package inspect` prints it.
        min_serial: the lowest serial number to accept.
        private: whether weights are copied into memory of this process, which a later write to a file cannot reach. So
            no session is opened from the compile cache, whose files are mapped, and none is kept there.
        verify_on_first_use: whether to run the golden cases on a new machine, in place of the package's setting.
        resilience: how to react to devices that fail; by default as `RLX_RESILIENCE` says.

    Raises:
        PackageError: there is no package, it needs newer versions, or `options` ask for the cache beside `private`.
        IntegrityError: its contents do not match its index, or it is not signed by the key.
        NoViableDeviceError: no device gives the golden outputs.
        DeviceParseError: one of the variables that are read does not parse.
    """
    resilience = resilience_from_env() if resilience is None else resilience
    if policy is None:
        policy = DevicePolicy.from_env()  # before anything is read: a typo must not allow more devices
    key = required_key(require_signature)
    with contextlib.ExitStack() as refused:  # closes at once; a runner in the making may be part of a cycle
        package = Package(path, key=key, sha256=sha256, min_serial=min_serial, private=private)
        refused.enter_context(package)
        wanted = package.index.verify_on_first_use if verify_on_first_use is None else verify_on_first_use
        if wanted and not package.cases:
            raise PackageError(f"{path} has no golden cases that a first use could be checked with")
        quick = None if wanted or private or options is not None else _quick_session(package)
        settings = _without_cache(options) if private else options
        policy = narrowed_policy(package.index.policy, policy)
        runner = PackageDevices(package, policy, options_of(package, settings), quick, resilience=resilience)
        refused.enter_context(runner)
        if wanted:
            from rlx_ort.deploy.golden import admit_devices

            admit_devices(package, runner)
        refused.pop_all()
    return runner


def runner_of(
    package: Package, policy: DevicePolicy | None = None, options: CompileOptions | None = None
) -> GraphDevices:
    """Return the graph of an open package with its policy, dims, and precision for each device.

    Raises:
        PackageError: the graph file is no graph.
        IntegrityError: it was changed.
    """
    return PackageDevices(package, policy or package.index.policy, options_of(package, options))


def buckets_of(
    package: Package, device: Device | str = "cpu", options: CompileOptions | None = None, *, unproven: bool = False
) -> tuple[BucketedCompileCache, Callable[[int], Graph]]:
    """Return an empty cache for the package's ranges of lengths, and the builder of the graph of a range.

    Pass the second to `get_or_compile` or `run_padded` of the first. The graphs share the weights of the package.
    `unproven` is that of `BucketedCompileCache`.

    Raises:
        PackageError: the package has no buckets.
        DeviceUnavailableError: the device does not work here.
    """
    from rlx_ort.execution.buckets import BucketedCompileCache

    if package.index.buckets is None:
        raise PackageError(f"{package.path} has no buckets; open it with open_package")
    dim, ranges = package.index.buckets
    graph = package.graph()
    settings = options_of(package, options).on(Device(device))
    return BucketedCompileCache(ranges, device, settings, unproven=unproven), lambda length: graph.bind({dim: length})


def options_of(package: Package, options: CompileOptions | None = None) -> CompileOptions:
    """Return the package's dims and precisions as options; those of the caller come first.

    Entries of the compile cache are used unless the options or `RLX_CACHE` forbid it.
    """
    options = options or CompileOptions()
    precisions = {variant.device: variant.precision for variant in package.index.variants.values()}
    dims = {**package.index.dims, **options.dims}
    cache = CacheUse(use_of(None if options.cache is None else options.cache.value, "found"))
    return replace(options, dims=dims, precisions={**precisions, **options.precisions}, cache=cache)


def _split(package: Package, options: CompileOptions) -> CompileOptions:
    """Return the options with the package's plan, if the devices here have the memory that it needs."""
    import logging  # not needed by a start from the compile cache

    from rlx_ort.options.split_plan import SplitPlan
    from rlx_ort.selection.splitting import missing_for

    plan = SplitPlan.read(package.read(SPLIT), SPLIT)
    missing = missing_for(plan, options)
    if missing is not None:
        logging.getLogger(__name__).warning("%s: its plan is not used: %s", package.path.name, missing)
    return options.with_(split=plan) if missing is None else options


def narrowed_policy(package: DevicePolicy, caller: DevicePolicy) -> DevicePolicy:
    """Return the policy that allows the devices of both; the caller's preferences and strategy come first."""
    allow = caller.allow if package.allow is None else package.allow
    if package.allow is not None and caller.allow is not None:
        allow = tuple(device for device in caller.allow if device in package.allow)
    pick = package.pick if caller.pick == DevicePolicy().pick else caller.pick
    return DevicePolicy(allow, package.deny + caller.deny, caller.prefer + package.prefer, pick)


def _without_cache(options: CompileOptions | None) -> CompileOptions:
    """Return the options of a package with private weights.

    Raises:
        PackageError: they ask for the compile cache, which would map the weights from its own files.
    """
    options = options or CompileOptions()
    cached = options.cache not in (None, CacheUse.OFF)
    if cached or options.sharing is WeightSharing.PREPACKED:
        asked = f"cache={options.cache}" if cached else f"sharing={options.sharing}"
        raise PackageError(
            f"private=True keeps weights out of files, and {asked} maps them from one; use one of the two"
        )
    return replace(options, cache=CacheUse.OFF)


def _quick_session(package: Package) -> SavedSession | None:
    """Return the quick session of a warmed package, after checking that its graph file is the one that was warmed."""
    from rlx_ort.providers.engine.compiled.starts import find_quick

    if environment.flag("DISPATCH_REPORT") or environment.flag("VERBOSE"):  # a report needs the graph
        return None
    try:
        quick = find_quick(package.sha256)
    except EngineError:  # there is no ONNX Runtime, which is an error at opening a session
        return None
    if quick is not None:
        if package.signature_state == "verified":  # of these bytes, which nothing would read before the first answer
            package.copy.check()
        else:
            package.copy.watch(quick)
        package.check_file(package.index.graph)
    return quick


@dataclass(frozen=True)
class WarmedDevice:
    """The result of warming a package for one device, given by its label.

    `entry` is the digest of the cache's entry, empty where there is none, and `nbytes` its size on disk. `seconds` is
    how long opening took, filling included. `starts` means that `open_package` and `start_package` start from the entry
    without the graph. `problem` is why there is no entry.
    """

    device: str
    entry: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    starts: bool = False
    problem: str = ""


def warm_package(
    path: str | os.PathLike[str],
    devices: Device | str | Iterable[Device | str] | None = None,
    progress: Callable[[Device], object] | None = None,
    *,
    require_signature: str | os.PathLike[str] | None = None,
    sha256: str | None = None,
    min_serial: int = 0,
) -> list[WarmedDevice]:
    """Compile a package for devices, by default all that may run it and that work here, and keep the results.

    Without `devices`, the package's policy and the `RLX_*` variables must both allow a device. Takes as long as
    compiling, and writes up to twice the size of the model. A second call finds everything in the cache.

    Args:
        path: the package, a folder or a file.
        devices: the targets; each must take every node. By default all that may run, helped by the CPU.
        progress: called with each device before its turn.
        require_signature: as in `open_package`.
        sha256: as in `open_package`.
        min_serial: as in `open_package`.

    Raises:
        PackageError: there is no package, or it needs newer versions.
        IntegrityError: its contents do not match its index, or it is not signed by the key.
        DeviceParseError: a name is no known device, or one of the `RLX_*` variables does not parse.
    """
    key, named = required_key(require_signature), None if devices is None else as_devices(devices)
    with Package(path, key=key, sha256=sha256, min_serial=min_serial) as package:
        return warm_opened(package, named, progress)


def warm_opened(
    package: Package, devices: Sequence[Device] | None = None, progress: Callable[[Device], object] | None = None
) -> list[WarmedDevice]:
    """Compile an open package; see `warm_package`."""
    from rlx_ort.providers.engine.compiled.models import watched

    # A named device must take every node; under an automatic choice the CPU may help.
    rule = PlacementRule.ASSISTED if devices is None else PlacementRule.STRICT
    policy, options = narrowed_policy(package.index.policy, DevicePolicy.from_env()), CompileOptions(placement=rule)
    opened = functools.partial(runner_of, package, policy, options.with_(cache=CacheUse.ON))
    if devices is None:
        with opened() as runner:
            devices = runner.devices()
    rows = []
    for device in devices:
        if progress is not None:
            progress(device)
        row, began = WarmedDevice(device.label), time.perf_counter()
        try:
            with watched() as openings, opened() as runner:
                compiled = runner.compile(device)
                row = replace(row, seconds=time.perf_counter() - began)
                if openings:
                    entry, starts = openings[-1].entry, _note(package, compiled, openings[-1])
                    row = replace(row, entry=entry.digest, nbytes=entry.nbytes, starts=starts)
                else:
                    problem = f"{device.display} has nothing to store, or the cache is not writable"
                    row = replace(row, problem=f"{problem}; see the log of rlx_ort.cache")
        except RlxError as err:
            row = WarmedDevice(device.label, seconds=time.perf_counter() - began, problem=str(err))
        rows.append(row)
    return rows


def _note(package: Package, compiled: CompiledGraph, opening: Opening) -> bool:
    """Record the quick start of the package if it can start without the graph, and return whether it can."""
    from rlx_ort.ir.types import TensorType
    from rlx_ort.providers.engine.compiled.starts import Interface, Start, note_start

    inputs, outputs = (
        tuple(
            Interface(name, kind.dtype.numpy.name, tuple(kind.shape))
            for name, kind in specs.items()
            if isinstance(kind, TensorType) and kind.shape is not None and kind.dtype.numpy.isbuiltin == 1
        )
        for specs in (compiled.input_specs, compiled.output_specs)
    )
    if (
        not opening.recipe.on_cpu
        or opening.request.options.custom_op_libraries
        # Golden cases run when the package is opened in full; a start from the cache would skip them.
        or package.index.verify_on_first_use
        # Types that numpy lacks, and mutable parameters, which are inputs of the session that the caller does not feed.
        or len(opening.request.model.input_types) != len(inputs)
        or len(compiled.output_specs) != len(outputs)
    ):
        return False
    package.copy.check()
    return note_start(package.sha256, Start(opening.entry, inputs, outputs))
