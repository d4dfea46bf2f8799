"""The devices of a served model: which run it, warmed and measured before the model is ready, and why others do not."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlx_ort.device import Device
from rlx_ort.errors import InputError, NoViableDeviceError, RlxError, ServingError
from rlx_ort.ir.types import ValueType
from rlx_ort.made_up import even_inputs, spread
from rlx_ort.numerics import agree
from rlx_ort.serving.lanes import Array, Lane
from rlx_ort.timing import timed

if TYPE_CHECKING:
    from rlx_ort.deploy.start import StartedPackage
    from rlx_ort.graph_devices import GraphDevices
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.serving.options import ServeOptions

SAME_DEVICE = "the same device as"
_ROWS_CHECKED = 3
_LEARNING_NS = 30_000_000  # for runs of each batch size on each device before a model is ready
_TOLERANCE = 1e-3
_log = logging.getLogger(__name__)


@dataclass
class ModelDevices:
    """The devices that run a model, why others do not, and the dim along which its requests are joined, or why none."""

    lanes: list[Lane] = field(default_factory=list)
    left_out: list[tuple[Device, str]] = field(default_factory=list)
    batched_along: str | None = None
    unbatched_because: str = ""


def tried_devices(name: str, runner: GraphDevices, options: ServeOptions) -> ModelDevices:
    """Return the devices of a graph, each warmed by runs, of which the last ones measure batches.

    Raises:
        NoViableDeviceError: there is none.
    """
    from rlx_ort.deploy.open import PackageDevices

    inputs = runner.graph.input_types
    devices = _lanes(runner, inputs, options)
    if isinstance(runner, PackageDevices):
        for lane in list(devices.lanes):
            try:
                for case in runner.golden_inputs:
                    lane.run(case, None)
            except RlxError as err:
                devices.lanes.remove(lane)
                devices.left_out.append((lane.device, str(err)))
                lane.worker.close()
    if not devices.lanes:
        runner.fastest()  # where the policy leaves no device, this raises with its rules
        raise NoViableDeviceError(f"no device may serve {name!r}:", devices.left_out)
    _decide_batches(name, runner, inputs, devices, options)
    if devices.batched_along is not None:
        for lane in devices.lanes:
            _learn_sizes(lane, inputs, options.batch.max_batch)
            lane.cap()  # predicts all sizes, so that the first request need not wait for that
    return devices


def _decide_batches(
    name: str, runner: GraphDevices, inputs: Mapping[str, ValueType], devices: ModelDevices, options: ServeOptions
) -> None:
    """Leave requests joined only where rows are proved independent and no trial shows otherwise, or where it is said.

    The options may stand in for the proof, not for the trial.
    """
    from rlx_ort.deploy.triton import NO_BATCH_DIM

    dim = devices.batched_along
    if dim is None:
        devices.unbatched_because = "--max-batch is 1" if options.batch.max_batch < 2 else NO_BATCH_DIM
        return
    from rlx_ort.converters.row_independence import row_independence

    proof = row_independence(runner.graph, dim, runner.options)
    reason = "" if proof else f"rows are not proved independent: {proof}"
    if reason and options.batches_unproven(name):
        _log.warning("%s is batched as the options say, though %s", name, reason)
        reason = ""
    if not reason and (counter := next(filter(None, (_dependence(lane, inputs) for lane in devices.lanes)), "")):
        reason = counter
    if reason:
        _log.info("%s is not batched: %s", name, reason)
        devices.batched_along, devices.unbatched_because = None, reason


def _lanes(runner: GraphDevices, inputs: Mapping[str, ValueType], options: ServeOptions) -> ModelDevices:
    """Return the devices that run a model, each warmed by a run, and why others do not."""
    from rlx_ort.deploy.triton import batch_dim

    graph, dim = runner.graph, batch_dim(runner.graph)
    devices = ModelDevices(batched_along=dim if options.batch.max_batch > 1 else None)
    if runner.options.split is not None and (split := _split_lane(runner, inputs, options)) is not None:
        devices.lanes.append(split)
        return devices
    seen: dict[str, Device] = {}
    for row in runner.rank():
        device = row.device
        if row.blocker is not None:
            devices.left_out.append((device, row.blocker))
            continue
        place = f"{row.hardware} {device.index}" if row.hardware and device != Device.CPU else device.label
        if place in seen:  # gpu, vulkan and webgpu are one device
            devices.left_out.append((device, f"it is {SAME_DEVICE} {seen[place].label}"))
            continue
        other = next((lane.device for lane in devices.lanes if lane.device.family.gpu), None)
        if device.family.gpu == "any" and other is not None:
            devices.left_out.append((device, f"it chooses the GPU itself, and may be {SAME_DEVICE} {other.label}"))
            continue
        if len(devices.lanes) == options.devices:
            devices.left_out.append((device, f"{options.devices} devices run the model already"))
            continue
        predict = _predictor(graph, device, dim, row.predicted_ns, runner.options)
        lane = Lane(device, functools.partial(_run, runner, device), predict, options.batch.max_batch)
        try:
            opening = lane.run(made_up := even_inputs(inputs, 1), None)
            again = _timed(lane, 1, made_up)
            constant = {name: array for name, array in again.items() if agree(array, opening[name], _TOLERANCE)}
            lane.probe = functools.partial(_probe, runner, lane, made_up, constant)
            _fit(lane, runner)
        except InputError:
            pass  # made-up inputs do not fit; the first request warms it
        except RlxError as err:
            devices.left_out.append((device, str(err)))
            lane.worker.close()
            continue
        seen[place] = device
        devices.lanes.append(lane)
    return devices


def _split_lane(runner: GraphDevices, inputs: Mapping[str, ValueType], options: ServeOptions) -> Lane | None:
    """Return the stages of a graph that is cut by a plan as one lane, warmed by runs; None if it runs whole."""
    made_up = even_inputs(inputs, 1)
    compiled = runner.compile_resolved_with_inputs(made_up)
    devices: tuple[Device, ...] = getattr(compiled.placement, "devices", ())
    if not devices:
        return None

    def run(given: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        outputs = dict(runner.run_fastest(given).items())
        return outputs if wanted is None else {name: outputs[name] for name in wanted}

    lane = Lane(compiled.device, run, lambda rows: None, options.batch.max_batch)
    lane.devices = devices
    _timed(lane, 1, made_up)
    return lane


def started_devices(package: StartedPackage, inputs: Mapping[str, ValueType], options: ServeOptions) -> ModelDevices:
    """Return the CPU for a package on the compile cache, after a run of its golden inputs, or else of made-up ones."""
    names = [output.name for output in package.interface[1]]

    def run(given: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        outputs = dict(zip(names, package.run(given), strict=True))
        return outputs if wanted is None else {name: outputs[name] for name in wanted}

    lane = Lane(Device.CPU, run, lambda rows: None, options.batch.max_batch)
    with contextlib.suppress(InputError):  # made-up inputs do not fit; the first request warms it
        for case in package.golden_inputs or [even_inputs(inputs, 1)]:
            lane.worker.submit(functools.partial(lane.run, case, None)).result()
    return ModelDevices([lane])


def _predictor(
    graph: Graph, device: Device, dim: str | None, once_ns: float | None, options: CompileOptions
) -> Callable[[int], float | None]:
    from rlx_ort.converters.row_independence import UNNAMED
    from rlx_ort.selection.predict import batch_curve

    if dim in (None, UNNAMED):
        return lambda rows: once_ns
    return batch_curve(graph, device, dim, options).ns


def _fit(lane: Lane, runner: GraphDevices) -> None:
    """Let a lane pad all batches if its device compiles each size, joined ones if it records launches.

    It opens the sessions of sizes whose change is costly, and gets the host memory that its device reads best.
    """
    from rlx_ort.providers.registry import provider_of  # the server is ready sooner without these imports

    provider, compiled = provider_of(lane.device), runner.compile(lane.device)
    if provider is None:
        return
    lane.memory = functools.partial(provider.host_memory, lane.device)
    report = compiled.device_graph_report()
    if provider.compiles_per_shape:
        lane.padding = "always"
    elif report.recorded or report.sized is not None:
        lane.padding = "joined"
    if compiled.replans:
        lane.opens = lambda inputs: runner.compile(lane.device).open_sized(inputs)


def _run(
    runner: GraphDevices, device: Device, inputs: Mapping[str, Array], wanted: Sequence[str] | None
) -> dict[str, Array]:
    names = runner.graph.output_names
    if wanted is None or len(wanted) == len(names):
        return dict(zip(names, runner.run(device, inputs), strict=True))
    results = runner.compile(device).run_read_outputs(inputs, [names.index(name) for name in wanted])
    return dict(zip(wanted, results, strict=True))


def _timed(lane: Lane, rows: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run inputs twice, learn the shorter time, and return the outputs.

    It is done in the thread that runs batches: its first run takes some ms more than those that follow.
    """
    runs = lane.worker.submit(lambda: [timed(lambda: lane.run(inputs, None)) for _ in range(2)]).result()
    lane.learn(rows, min(ns for _, ns in runs))
    return runs[-1][0]


def _learn_sizes(lane: Lane, kinds: Mapping[str, ValueType], most: int) -> None:
    """Measure batches of 2, 4 and so on, until they take long; the predictions of larger ones follow from them."""
    rows, until_ns = 2, time.perf_counter_ns() + _LEARNING_NS
    with contextlib.suppress(RlxError):  # such as too little memory; the first batches of requests run singly then
        while rows <= most and time.perf_counter_ns() + 3 * lane.expected_ns(rows) < until_ns:
            inputs = even_inputs(kinds, rows)
            lane.run(inputs, None)  # the first run of a shape allocates
            _timed(lane, rows, inputs)
            rows *= 2


def _probe(runner: GraphDevices, lane: Lane, inputs: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """Let a device in again, or raise unless it gives the results that it gave when the model was loaded."""
    result = lane.run(inputs, None)
    tolerance = _TOLERANCE if runner.resilience is None else runner.resilience.tolerance
    for name, array in wanted.items():
        if not agree(result[name], array, tolerance):
            raise ServingError(f"{lane.device.display} gives different values for {name!r} in a batch", 503)
    runner.readmit(lane.device)


def _dependence(lane: Lane, kinds: Mapping[str, ValueType]) -> str:
    """Return how rows turn out to influence each other in runs of made-up and of extreme values, or an empty text."""
    for extreme in (False, True):
        try:
            inputs = even_inputs(kinds, _ROWS_CHECKED)
            if extreme:
                inputs = {name: _extreme(array) for name, array in inputs.items()}
            together = lane.run(inputs, None)
            for row in range(_ROWS_CHECKED):
                alone = lane.run({name: array[row : row + 1] for name, array in inputs.items()}, None)
                for name, array in alone.items():
                    if array.shape[:1] != (1,) or together[name].shape != (_ROWS_CHECKED, *array.shape[1:]):
                        return f"output {name!r} does not have a row for each of the inputs in a trial"
                    if not agree(array[0], together[name][row], _TOLERANCE):
                        return f"output {name!r} of a row depends on other rows in a trial"
        except RlxError as err:
            if not extreme:  # extreme integers may be no legal tokens
                return f"a trial run fails: {err}"
    return ""


def _extreme(array: Array) -> Array:
    """Return large values of both signs for floats, small different ones for integers, both for booleans."""
    if array.dtype == object:
        return array
    if array.dtype.kind == "b":
        return (spread(array.shape) < 0.5).astype(array.dtype)
    if array.dtype.kind in "iu":
        return (np.arange(1, array.size + 1) % 2).reshape(array.shape).astype(array.dtype)
    rows = 10.0 ** np.arange(len(array)).reshape(-1, *[1] * (array.ndim - 1))  # each row larger than that before
    return ((spread(array.shape) - 0.5) * rows).astype(array.dtype)
