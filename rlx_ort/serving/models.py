"""A served model: its devices and queue, its metadata and statistics, and how long opening it may take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlx_ort.deploy.start import StartedPackage
from rlx_ort.deploy.triton import configured_type
from rlx_ort.device import Device
from rlx_ort.errors import CancelledRunError, RlxError, ServingError, TimeLimitError
from rlx_ort.execution.background import returned
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Shape, TensorType, ValueType
from rlx_ort.providers.engine.stopping import Stopped
from rlx_ort.resilience.limits import CancelToken, in_background, run_limited
from rlx_ort.serving import tracing
from rlx_ort.serving.lanes import Answer, Place
from rlx_ort.serving.model_devices import SAME_DEVICE, ModelDevices, started_devices, tried_devices
from rlx_ort.serving.options import ServeOptions
from rlx_ort.serving.pending import Ended, Pending, awaited
from rlx_ort.serving.protocol import Array, InferRequest, datatype_of
from rlx_ort.serving.scheduler import Scheduler
from rlx_ort.serving.statistics import Statistics

if TYPE_CHECKING:
    from rlx_ort.graph_devices import GraphDevices
    from rlx_ort.providers.engine.compiled.starts import Interface

T = TypeVar("T")

_GRACE_S = 1.0  # for the engine to return after it was asked to stop


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
        self._opening = CancelToken()
        self.inputs: Mapping[str, ValueType]
        self.outputs: Mapping[str, ValueType]
        if isinstance(opened, StartedPackage):
            self.inputs, self.outputs = ({each.name: _type_of(each) for each in side} for side in opened.interface)
            devices = started_devices(opened, self.inputs, options)
        else:
            self.inputs, self.outputs = opened.graph.input_types, opened.graph.output_types
            devices = tried_devices(name, opened, options)
        self.input_types = {name: datatype_of(kind, name) for name, kind in self.inputs.items()}
        self.output_types = {name: datatype_of(kind, name) for name, kind in self.outputs.items()}
        self.left_out, self.batched_along = devices.left_out, devices.batched_along
        self.unbatched_because = devices.unbatched_because
        self.scheduler = Scheduler(
            devices.lanes,
            batched=self.batched_along is not None,
            options=options.batch,
            on_batch=self.statistics.ran,
            on_failover=self.statistics.failed_over,
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
            devices = await opened_in_time(
                lambda: tried_devices(self.name, package.runner, self._options),
                self._options.load_limit_s,
                self._opening,
                _closed_lanes,
            )
        except Exception as err:  # whatever it is, the package is not the one that was started
            on_error(err)
            return
        self.left_out, self.batched_along = devices.left_out, devices.batched_along
        self.unbatched_because = devices.unbatched_because
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
        answer = await awaited(lambda ended: self.start(request, ended))
        tracing.add_phases(self.name, self.version, answer, begun_ns)
        return answer

    def start(self, request: InferRequest, ended: Ended, place: Place | None = None) -> Pending:
        """Begin an inference; see `Scheduler.accept`.

        Raises:
            ServingError: the request does not fit the model, or its queue refuses it.
        """
        begun_ns = time.perf_counter_ns()

        def counted(result: Answer | BaseException) -> None:
            took_ns = time.perf_counter_ns() - begun_ns
            if isinstance(result, Answer):
                self.statistics.answered(result.times, took_ns)
            elif isinstance(result, RlxError):
                self.statistics.spans["fail"].add(took_ns)
            ended(result)

        try:
            self._check(request)
            wanted = None if request.outputs is None else tuple([output.name for output in request.outputs])
            return self.scheduler.accept(
                request.inputs, wanted, counted, priority=request.priority, timeout_s=request.timeout_s, place=place
            )
        except RlxError:
            self.statistics.spans["fail"].add(time.perf_counter_ns() - begun_ns)
            raise

    def metadata(self, versions: Sequence[str]) -> dict[str, Any]:
        """Return the model's metadata in the protocol's form."""

        def tensors(kinds: Mapping[str, ValueType], types: Mapping[str, str]) -> list[dict[str, Any]]:
            return [{"name": name, "datatype": types[name], "shape": _open_shape(kind)} for name, kind in kinds.items()]

        return {
            "name": self.name,
            "versions": list(versions),
            "platform": "onnxruntime_onnx",
            "inputs": tensors(self.inputs, self.input_types),
            "outputs": tensors(self.outputs, self.output_types),
        }

    @property
    def key(self) -> tuple[str, str]:
        """Its name and version."""
        return self.name, self.version

    @property
    def devices(self) -> list[Device]:
        """The devices that run it."""
        return [device for lane in self.scheduler.lanes for device in lane.devices]

    def unused_devices(self) -> list[tuple[Device, str]]:
        """Return the devices that the policy names, or that work here, and that do not run it, with their reasons."""
        running, reasons, policy = self.devices, dict(self.left_out), self._options.policy
        otherwise = "it is the same device as another, or one too many" if self.is_complete else "it is being opened"
        named = () if policy is None else (*(policy.allow or ()), *policy.prefer)
        found = {device: reasons.get(device, otherwise) for device in named if device not in running}
        for device, reason in self.left_out:
            from rlx_ort.providers.registry import is_available  # the server is ready sooner without these imports

            is_other = device not in named and SAME_DEVICE not in reason
            if is_other and (policy is None or policy.allows(device)) and is_available(device):
                found[device] = reason
        return [(device, " ".join(reason.split())) for device, reason in found.items()]

    async def config(self) -> dict[str, Any]:
        """Return the model's configuration in the form of Triton's extension, once it is complete."""
        await self.completed()
        batched = self.batched_along is not None

        def tensors(kinds: Mapping[str, ValueType], types: Mapping[str, str]) -> list[dict[str, Any]]:
            dims = {name: _open_shape(kind)[1 if batched else 0 :] for name, kind in kinds.items()}
            return [{"name": name, "data_type": configured_type(types[name]), "dims": dims[name]} for name in kinds]

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
            **({"parameters": reasons} if (reasons := self._reasons()) else {}),
        }

    def _reasons(self) -> dict[str, dict[str, str]]:
        """Return why requests are not joined and allowed devices not used, as Triton's extension has parameters."""
        reasons = {f"not_used.{device.label}": reason for device, reason in self.left_out}
        if self.unbatched_because:
            reasons["not_batched"] = self.unbatched_because
        return {name: {"string_value": reason} for name, reason in reasons.items()}

    async def close(self) -> None:
        """Answer the requests that were accepted, then close the sessions."""
        await self.scheduler.close()
        self._opening.cancel()
        await self.completed()
        await asyncio.to_thread(self._opened.close)

    def discard(self) -> None:
        """Close a model that was never served; from any thread."""
        for lane in self.scheduler.lanes:
            lane.worker.close()
        self._opened.close()

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
            if len(rows) > 1:
                raise ServingError(f"the inputs have {sorted(rows)} rows; {self.name} takes as many of each", 400)
            if rows == {0}:
                raise ServingError(f"the inputs have no rows; {self.name} takes one or more", 400)
        for output in request.outputs or ():
            if output.name not in self.outputs:
                raise ServingError(f"{self.name} has no output {output.name!r}; it has {', '.join(self.outputs)}", 400)


def device_lines(models: Sequence[ServedModel]) -> list[str]:
    """Return the devices of each model in a line, and a line for each reason why others do not run some of them."""
    lines = [", ".join(f"{model.name} on {', '.join(device.label for device in model.devices)}" for model in models)]
    refused: dict[tuple[str, str], list[str]] = {}
    for model in models:
        for device, reason in model.unused_devices():
            refused.setdefault((reason, device.label), []).append(model.name)
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (reason, label), names in refused.items():
        groups.setdefault((reason, tuple(names)), []).append(label)
    for (reason, alike), labels in groups.items():
        whose = "" if len(alike) == len(models) else f"{', '.join(alike)} "
        lines.append(f"{whose}not on {', '.join(labels)}: {reason}")
    return lines


async def opened_in_time(
    call: Callable[[], T], limit_s: float, cancel: CancelToken, discard: Callable[[T], object]
) -> T:
    """Return the result of a call that opens a model; a result that nobody waits for any more is discarded.

    Raises:
        TimeLimitError: it took longer than `limit_s` seconds, or the token was cancelled.
    """
    made: list[T] = []
    failed = False

    def keep() -> None:
        nonlocal failed
        try:
            made.append(call())
        except Stopped:
            raise
        except BaseException:  # also a limit of its own
            failed = True
            raise

    def discard_late(future: Future[None] | None = None) -> None:
        with contextlib.suppress(Exception):  # nobody waits for the result
            while made:
                discard(made.pop())

    def limited() -> T:
        try:
            run_limited(keep, limit_s, _GRACE_S, cancel, lambda future: future.add_done_callback(discard_late))
        except BaseException:
            discard_late()
            raise
        return made.pop()

    future = in_background(limited)
    try:
        await returned(future)
        return future.result()
    except (CancelledRunError, TimeLimitError) as err:
        if failed:
            raise
        ended = isinstance(err, CancelledRunError)
        raise TimeLimitError(
            "opening was cancelled" if ended else f"it took longer than {limit_s:g} s to open"
        ) from err
    finally:
        del future  # an error that it holds has this frame, and would keep files mapped until garbage is collected


def _closed_lanes(devices: ModelDevices) -> None:
    for lane in devices.lanes:
        lane.worker.close()


def _type_of(declared: Interface) -> TensorType:
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
