"""Predicted times of a graph on the devices of this machine, also over one dim, from calibrated or shipped figures."""

from __future__ import annotations

import bisect
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from rlx_ort import environment
from rlx_ort.calibration import store
from rlx_ort.calibration.features import DEFAULT_DIM, Kernel, Workload
from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.converters.protos import paused_collector
from rlx_ort.converters.to_onnx.exporter import Draft
from rlx_ort.device import Device
from rlx_ort.errors import RlxError
from rlx_ort.ir.graph import Graph, check_dims
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.engine.recordings import MOST_BYTES
from rlx_ort.providers.hardware import device_threads
from rlx_ort.providers.registry import provider_of
from rlx_ort.selection.cost import (
    BackendCostModel,
    Estimate,
    ProfileCostModel,
    estimate_workload,
    sized_workload,
    total_ns,
)
from rlx_ort.selection.graph_cache import PerDraft, named_dims, open_dims
from rlx_ort.selection.support import draft_on, support_of

_log = logging.getLogger(__name__)
_GRAPH_S = 2.0  # for the kernels of one graph
_OTHER_SIZE, _LARGE_BATCH = 4, 64  # the second size that an unknown operator is measured at
_lock = threading.Lock()
_workloads: PerDraft[Workload] = PerDraft()
_tried: set[Device] = set()
_seen: weakref.WeakKeyDictionary[Draft, set[Device]] = weakref.WeakKeyDictionary()


def cost_model(device: Device | str) -> BackendCostModel | None:
    """Return the cost model of a device: its stored calibration, else its provider's default profile, else None.

    Nothing is measured, unless `RLX_AUTO_CALIBRATE` is set: then a device without a calibration gets one here, once
    a process, and so do kernels of a graph that the table lacks.
    """
    device = Device(device)
    provider = provider_of(device)
    if provider is None:
        return None
    measured = store.measured_model(device)
    if measured is None and provider.ep_name and environment.flag("AUTO_CALIBRATE") and _first(_tried, device):
        try:
            calibrate(device)
        except RlxError as err:
            _log.warning("%s is not calibrated, its default profile is used: %s", device.display, err)
        measured = store.measured_model(device)
    if measured is not None:
        return measured
    profile = provider.default_profile(device)
    return None if profile is None else ProfileCostModel(device, profile, device_threads(device))


def explain(
    graph: Graph, device: Device | str, options: CompileOptions | None = None, dims: Mapping[str, int] | None = None
) -> Estimate | None:
    """Return the predicted time of a graph on a device with its parts, or None where nothing can be predicted.

    `dims` are sizes of named dims, as `dims_of` reads them from the inputs; they come before those of the options.
    """
    if dims:
        nameless = {dim for dim in open_dims(graph) if "[" in dim}
        check_dims(graph, dims.keys() - nameless)
    case = _case(graph, Device(device), options or CompileOptions(), dims or {})
    if case is None:
        return None
    return case.estimate()


def dims_of(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that the inputs give to the graph's open dims, by the names of `named_dims`.

    Inputs that do not fit are left to the run.
    """
    sizes: dict[str, int] = {}
    for name, dims in named_dims(graph):
        array = inputs.get(name)
        shape = () if array is None else np.shape(array)
        if len(shape) == len(dims):
            sizes.update({dim: int(size) for dim, size in zip(dims, shape, strict=True) if isinstance(dim, str)})
    return sizes


def kernels_of(graph: Graph, device: Device, dims: Mapping[str, int] | None = None) -> Mapping[Kernel, int]:
    """Return each different kernel of a graph as the device would get it, and how many nodes need it.

    There is none where the device gets no model.
    """
    workload = workload_on(graph, device, CompileOptions(), dims or {})
    return {} if workload is None else workload.counts


def predicted_ns(
    graph: Graph, device: Device, options: CompileOptions, dims: Mapping[str, int] | None = None
) -> float | None:
    """Return the predicted time of one run in ns on a device that takes the graph, or None without usable figures."""
    case = _case(graph, device, options, dims or {})
    if case is None:
        return None
    time = case.estimate().total_ns if case.cpu_nodes else total_ns(case.workload, case.model)
    return time if math.isfinite(time) else None


def measure_unknown(
    graph: Graph,
    device: Device | str,
    options: CompileOptions | None = None,
    dims: Mapping[str, int] | None = None,
    *,
    limit_s: float = 0.3,
) -> int:
    """Measure the kernels that a graph needs and a calibrated device's table lacks; return how many rows were kept.

    Takes at most `limit_s` seconds, and no time if all significant kernels are known. Predictions for every graph use
    the rows from then on. A graph with named dims is measured at two sizes, for interpolation.
    """
    from rlx_ort.calibration.on_demand import measure_unknown as measured

    device, options = Device(device), options or CompileOptions()
    case = _case(graph, device, options, dims or {})
    if case is None or not isinstance(case.model, MeasuredCostModel):
        return 0
    sizes = [{**options.dims, **(dims or {})}]
    batch = next(iter(open_dims(graph)), None)
    if batch is not None:
        size = sizes[0].get(batch, DEFAULT_DIM)
        sizes.append({**sizes[0], batch: size * _OTHER_SIZE if size < _LARGE_BATCH else size // _OTHER_SIZE})
    workloads = [
        (workload, each) for each in sizes if (workload := workload_on(graph, device, options, each)) is not None
    ]
    return measured(case.model, workloads, case.draft.outline.constants, limit_s)


def calibrate(
    device: Device | str,
    *,
    graph: Graph | None = None,
    dims: Mapping[str, int] | None = None,
    quick: bool = False,
    progress: Callable[[str, float], None] | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> CalibrationProfile:
    """Measure a device through its own sessions, keep the profile on disk, and return it.

    Takes up to 8 seconds, 3 when `quick`, 30 on a software GPU. From then on predictions for the device use the
    profile. While another process calibrates the same device, this one waits and uses its profile.

    Args:
        device: the device.
        graph: measure only its kernels that a stored profile lacks, in 2 s at most; without a stored profile,
            both.
        dims: sizes of the graph's named dims.
        quick: measure fewer sizes.
        progress: called with the kernel being measured and the elapsed share of the time, 0 to 1.
        clock: gives the time in ns.

    Raises:
        CalibrationError: the device does not work here, or no product could be measured.
        RlxError: the device fails at the smallest graph.
    """
    from rlx_ort.calibration.calibrate import calibrate_together

    device = Device(device)
    if graph is not None and dims:
        check_dims(graph, dims)
    shown = None if progress is None else lambda device, what, share: progress(what, share)
    if graph is not None:
        if store.find(device).profile is None:
            calibrate(device, quick=quick, progress=progress, clock=clock)
        measure_unknown(graph, device, dims=dims, limit_s=_GRAPH_S)
        profile = store.find(device).profile
        assert profile is not None  # noqa: S101  # kept in this process at least
        return profile
    calibrated = calibrate_together([device], quick=quick, progress=shown, clock=clock)[device]
    if isinstance(calibrated, RlxError):
        raise calibrated
    return calibrated


class _Case(NamedTuple):
    workload: Workload
    model: BackendCostModel
    cpu_nodes: Collection[int]
    draft: Draft

    def estimate(self) -> Estimate:
        cpu_model = cost_model(Device.CPU)
        return estimate_workload(self.workload, self.model, cpu_nodes=self.cpu_nodes, cpu_model=cpu_model)


def _case(graph: Graph, device: Device, options: CompileOptions, dims: Mapping[str, int]) -> _Case | None:
    model, draft = cost_model(device), draft_on(device, graph, options)
    workload = workload_on(graph, device, options, {**options.dims, **dims})
    if model is None or draft is None or workload is None:
        return None
    cpu_nodes = support_of(device, graph, options).cpu_nodes
    if environment.flag("AUTO_CALIBRATE") and _first(_seen.setdefault(draft, set()), device):
        try:
            measure_unknown(graph, device, options, dims)
        except RlxError as err:  # it stays assumed
            _log.warning("the kernels of %s on %s are not measured: %s", graph.name, device.display, err)
        model = cost_model(device) or model
    moved = sum(workload.inputs.values()) + sum(workload.outputs.values())
    if options.device_graph and not cpu_nodes and moved <= MOST_BYTES and not workload.host_decides:
        model = getattr(model, "replayed", model)  # usual runs are recorded where that is safe
    return _Case(workload, model, cpu_nodes, draft)


def workload_on(graph: Graph, device: Device, options: CompileOptions, dims: Mapping[str, int]) -> Workload | None:
    """Return the work of a graph as the device would get it, or None where it gets no model; remembered by sizes."""
    draft = draft_on(device, graph, options)
    if draft is None:
        return None
    return _workloads.get(draft, tuple(sorted(dims.items())), lambda: sized_workload(draft, graph, dims))


def _first(seen: set[Device], device: Device) -> bool:
    with _lock:
        before = len(seen)
        seen.add(device)
        return len(seen) > before


_OFF = 0.01  # the error of a line in its middle, as a share; at a bend it is then off by twice that at most
_HALVINGS = 4


class BatchCurve:
    """Exact predictions at powers of two, and lines between them that are straight in the logarithms of both.

    Where a line would deviate by over 1 %, its middle is predicted as well. Reading a time takes a microsecond; the
    first one between two powers of two takes three full predictions, more at a bend. May be used from several threads.
    `predict` returns the time for a size in ns, or None where there is none.
    """

    def __init__(self, predict: Callable[[int], float | None]) -> None:
        self._predict = predict
        self._octaves: dict[int, tuple[list[int], list[float]]] = {}

    def ns(self, batch: int) -> float | None:
        """Return the predicted time of a run of this size in ns, or None where there is none; 0 counts as 1."""
        batch = max(batch, 1)
        octave = batch.bit_length()
        sizes, times = self._octaves.get(octave) or self._made(octave)
        if not sizes:
            return None
        at = bisect.bisect_right(sizes, batch)
        low_ns, low = times[at - 1], sizes[at - 1]
        return low_ns * math.pow(times[at] / low_ns, math.log(batch / low) / math.log(sizes[at] / low))

    def _made(self, octave: int) -> tuple[list[int], list[float]]:
        first = 1 << (octave - 1)
        ends = self._predict(first), self._predict(2 * first)
        points: dict[int, float] = {}
        if ends[0] and ends[1]:
            points = {first: ends[0], 2 * first: ends[1]}
            self._halve(points, first, 2 * first, _HALVINGS)
        sizes = sorted(points)
        self._octaves[octave] = octave_points = (sizes, [points[size] for size in sizes])
        return octave_points

    def _halve(self, points: dict[int, float], low: int, high: int, more: int) -> None:
        """Add the middle of a line, and those of its halves where the line was off there."""
        middle = round(math.sqrt(low * high))
        time = self._predict(middle) if more and low < middle < high else None
        if time:
            part = math.log(middle / low) / math.log(high / low)
            off = math.log(time / points[low]) - part * math.log(points[high] / points[low])
            points[middle] = time
            if abs(off) > _OFF:
                self._halve(points, low, middle, more - 1)
                self._halve(points, middle, high, more - 1)


def batch_curve(
    graph: Graph,
    device: Device | str,
    dim: str | None = None,
    options: CompileOptions | None = None,
    dims: Mapping[str, int] | None = None,
) -> BatchCurve:
    """Return the curve of a graph's predicted time on a device, as of the graph and the calibration now.

    `dim` defaults to the first named dim of the first input that has one. `dims` holds the sizes of the others.

    Raises:
        ValueError: no dim is given, and no input has a named one.
    """
    if dim is None:
        dim = next(iter(open_dims(graph)), None)
    if dim is None:
        raise ValueError(f"graph {graph.name!r} has no input with a named dim; name the one that varies")
    return curve_of(lambda: graph, Device(device), dim, options or CompileOptions(), dims or {})


def curve_of(
    graph: Callable[[], Graph | None], device: Device, dim: str, options: CompileOptions, dims: Mapping[str, int]
) -> BatchCurve:
    """Return the curve of a graph that `graph` returns, which may be a weak reference."""

    def predict(size: int) -> float | None:
        alive = graph()
        with paused_collector():  # a prediction creates an object per node
            return None if alive is None else predicted_ns(alive, device, options, {**dims, dim: size})

    return BatchCurve(predict)
