"""`GraphDevices`: one graph, its weights, and every device it may run on. The front door of the package.

It joins two independent halves: `rlx_ort.selection` chooses a device, `rlx_ort.execution` runs the graph. A device that
is named, in code or in a variable, must take every node (strict); with an automatic choice the CPU may help (assisted).
`CompileOptions.placement` overrides both.

When a device refuses the graph at opening, an automatic choice remembers that and continues with the next device of
`rank`. A device named in the call raises an error instead, and `RLX_DEVICE` is skipped with a warning.

The halves are imported when a method first needs them: a warmed package runs without either.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.device_sessions import DeviceSessions
from rlx_ort.errors import (
    CancelledRunError,
    DeviceError,
    DeviceFallbackError,
    DeviceParseError,
    GraphError,
    InputError,
    NoViableDeviceError,
    RunError,
)
from rlx_ort.execution.interface import Outputs, ValueInfo, described, outputs_class
from rlx_ort.faults import is_device_failure
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.selection.policy import Adaptive, Benchmark, DevicePolicy, chain_with, device_chain_from_env, labels

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    import numpy.typing as npt

    from rlx_ort.adaptive import Choice, Follower
    from rlx_ort.execution.benchmark import DeviceBenchResult, InputSignature
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.placement import Placement
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.ir.dtype import DType
    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.tensor import TensorData
    from rlx_ort.resilience.failover import Failover, RunRecord
    from rlx_ort.resilience.limits import CancelToken
    from rlx_ort.resilience.options import Resilience
    from rlx_ort.resilience.quarantine import DeviceHealth
    from rlx_ort.resilience.trial import Choose
    from rlx_ort.selection.candidates import Candidates, DeviceCandidate
    from rlx_ort.selection.policy import Devices

T = TypeVar("T")
_GRACE_S = 1.0  # that an engine has to return at a time limit


def graph_param_names(graph: Graph) -> list[str]:
    """Return the names of the graph's parameters, in the order they were added; inputs are not among them."""
    return [value.name for value in graph.params]


class GraphDevices:
    """Runs one graph on whichever devices are asked for or chosen, one session a device, one copy of the weights.

    Methods may be called from several threads. Devices are given as `Device` or by name. Making one compiles
    nothing and probes nothing.

    Args:
        graph: the graph; if it grows later, it is compiled again.
        policy: which devices may be chosen; everything by default. The constructor reads no variables: `from_env`,
            `load`, `open_package` and the command line take the policy of the `RLX_*` variables.
        options: how to compile.
        weights: the store of another runner or compiled graph, to share its weights; a new one by default.
        resilience: how to react to devices that fail; by default an error of a run is raised. See docs/resilience.md.

    Attributes:
        last_attempts: the devices that refused or failed in the last `run_try` or chain, with the reason; after an
            automatic choice, all that are known to refuse the graph.
        last_choice: the last choice of the adaptive strategy, with predictions and measurements; None before.
    """

    _sessions: DeviceSessions
    _devices: tuple[Set[Device], list[Device]] | None
    _winners: dict[InputSignature, Follower]
    _revision: int
    _named: type[Outputs]

    def __init__(
        self,
        graph: Graph,
        policy: DevicePolicy | None = None,
        options: CompileOptions | None = None,
        weights: WeightStore | None = None,
        *,
        resilience: Resilience | None = None,
    ) -> None:
        self._prepare(policy, options, resilience)
        self._take(graph, weights)

    def _prepare(
        self, policy: DevicePolicy | None, options: CompileOptions | None, resilience: Resilience | None = None
    ) -> None:
        """Set everything but the graph and its weights; see `_take`."""
        if policy is not None and not isinstance(policy, DevicePolicy):
            raise DeviceParseError(repr(policy), f"a policy is a DevicePolicy, such as DevicePolicy.only({policy!r})")
        if options is not None and not isinstance(options, CompileOptions):
            raise InputError(
                f"options are CompileOptions, as in CompileOptions(dims={{...}}); got {type(options).__name__}"
            )
        self._policy = policy or DevicePolicy()
        self._options = options or CompileOptions()
        fixed = self._options.placement
        self._by_name, self._by_choice = (
            self._options.with_(placement=fixed or rule) for rule in (PlacementRule.STRICT, PlacementRule.ASSISTED)
        )
        self._lock = threading.RLock()
        self._failover: Failover | None = None
        if resilience is not None:
            from rlx_ort.resilience.failover import Failover

            self._failover = Failover(resilience)
        self.last_attempts: tuple[tuple[Device, str], ...] = ()
        self.last_choice: Choice | None = None
        self._forget()

    def _take(self, graph: Graph, weights: WeightStore | None = None) -> None:
        from rlx_ort.execution.weights import WeightStore
        from rlx_ort.ir.graph import check_dims, require_graph

        require_graph(graph)
        if self._options.dims:
            check_dims(graph, self._options.dims)
        self._weights = WeightStore.for_graph(graph) if weights is None else weights
        self._revision = graph.revision
        self._named = outputs_class(graph.output_names)
        self._graph = graph

    @classmethod
    def from_env(cls, graph: Graph, options: CompileOptions | None = None) -> GraphDevices:
        """Return a runner with the policy and the resilience that the `RLX_*` variables describe.

        Raises:
            DeviceParseError: one of the variables does not parse.
        """
        return cls(graph, DevicePolicy.from_env(), options, resilience=resilience_from_env())

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self._graph

    @property
    def inputs(self) -> list[ValueInfo]:
        """The name, dtype and dims of each input."""
        return described({value.name: value.type for value in self.graph.inputs})

    @property
    def outputs(self) -> list[ValueInfo]:
        """The name, dtype and dims of each output."""
        graph = self.graph
        return described({name: value.type for name, value in zip(graph.output_names, graph.outputs, strict=True)})

    @property
    def policy(self) -> DevicePolicy:
        """Which devices may be chosen."""
        return self._policy

    @property
    def options(self) -> CompileOptions:
        """How graphs are compiled."""
        return self._options

    @property
    def weights(self) -> WeightStore:
        """The parameters' data, shared by all devices."""
        return self._weights

    # Which device

    def devices(self) -> list[Device]:
        """Return the devices that take the whole graph, so that `run(device)` accepts them, in the policy's order.

        Found once and kept until `invalidate_cache`, or until a device refuses at opening, which is then left out. An
        automatic choice may also take a device that the CPU has to help: `rank` has those as well.
        """
        strict = self._candidates(options=self._by_name)
        with self._lock:
            if self._devices is None or self._devices[0] != strict.refused.keys():
                self._devices = strict.refused.keys(), strict.devices()
            return list(self._devices[1])

    def report(self) -> list[DeviceCandidate]:
        """Return a new report: one row a device, with what blocks it."""
        return self._candidates().report()

    def rank(self, inputs: Mapping[str, Any] | None = None) -> list[DeviceCandidate]:
        """Return a row for every device the policy allows, the best choice first, blocked ones last.

        Automatic choices follow this order. The inputs size the predictions; see `rlx_ort.rank`.
        """
        return self._candidates(inputs).rank()

    def fastest(self, inputs: Mapping[str, Any] | None = None) -> Device:
        """Return the device with the smallest predicted time now; `RLX_DEVICE` is ignored.

        The inputs size the prediction. No session is opened: a device is passed over once it has refused the graph in
        `compile_fastest` or another automatic choice.

        Raises:
            NoViableDeviceError: no device may be chosen; it lists the reasons.
        """
        return self._candidates(inputs).fastest()

    def resolve(self, device: Device | str | None = None) -> Device:
        """Return the device to use: the one given, else `RLX_DEVICE`, else the fastest.

        Raises:
            DeviceError: the device given cannot be used, or none can.
            LegalizeError: the device given does not take the graph.
        """
        from rlx_ort.selection.resolve import resolve_device

        return resolve_device(self.graph, device, self._policy, self._options)

    def resolve_chain(self, device: Device | str | None = None) -> Device:
        """Return the first device that may run the graph: the one given, then those of `RLX_DEVICE_CHAIN`.

        Without a chain this is `resolve`. With one, `RLX_DEVICE` is ignored.

        Raises:
            NoViableDeviceError: none of them may.
        """
        from rlx_ort.selection.resolve import resolve_device_chain

        if not device_chain_from_env():
            return self.resolve(device)
        return resolve_device_chain(self.graph, chain_with(device), self._policy, self._options)

    def resolve_with_inputs(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> Device:
        """Return the device to use for inputs of these sizes; under the benchmark strategy the fastest measured one.

        Under the adaptive strategy devices are measured if their predictions are too close. The winner is remembered
        for the shapes and dtypes of the inputs; under the adaptive strategy another device replaces it while it is
        faster in runs of `run_resolved_with_inputs`. Both strategies ignore `RLX_DEVICE`.

        Raises:
            DeviceFallbackError: every device failed in the benchmark.
            NoViableDeviceError: no device may be chosen.
        """
        if device is not None:
            return self.resolve(device)
        return self._choice(inputs)[0]

    # Weights

    def set_param(self, name: str, array: npt.ArrayLike | TensorData, *, cast: bool = False) -> None:
        """Give a parameter new data on every device; see `WeightStore.set`.

        Raises:
            ParamError: no such parameter, another shape, or another dtype than declared.
        """
        self._follow_graph()
        self.weights.set(name, array, cast=cast)

    def set_param_typed(
        self, name: str, data: bytes | bytearray | memoryview, dtype: DType | str, *, cast: bool = False
    ) -> None:
        """Give a parameter the elements in raw little-endian bytes; see `WeightStore.set_typed`.

        Raises:
            ParamError: no such parameter, a wrong number of bytes, or another dtype than declared.
        """
        self._follow_graph()
        self.weights.set_typed(name, data, dtype, cast=cast)

    def update_params(self) -> contextlib.AbstractContextManager[None]:
        """Return a `with` block whose `set_param` calls take effect together, when it ends without an error."""
        return self.weights.update()

    def sync_params_to_all(self) -> None:
        """Open stale sessions again now, on every device that was compiled, and not at their next run.

        Raises:
            ParamError: a parameter is not set.
        """
        self._sessions.reopen_stale()

    # Compile

    def compile(self, device: Device | str) -> CompiledGraph:
        """Return the graph compiled for a device; the second call returns the same object, until it is closed.

        Closing it releases its handles and other state; the session belongs to the runner and stays open. A graph that
        was chosen automatically shares all state with the one that was named, so a handle bound in one is in both.

        Raises:
            NoViableDeviceError: the policy refuses the device.
            DeviceUnavailableError: the device does not work here.
            PlacementError: it does not take every node; see `CompileOptions.placement`.
        """
        return self._compiled(device if device.__class__ is Device else Device(device), named=True)

    def compile_fastest(self) -> CompiledGraph:
        """Return the graph compiled for the fastest device that takes it; see `fastest` and `rank`.

        While a parameter is unset no session is opened, and the first device is assumed to take the graph.

        Raises:
            NoViableDeviceError: no device takes the graph; it lists the reasons.
        """
        return self._open_first(lambda: (self.fastest(), False))

    def compile_resolved(self, device: Device | str | None = None) -> CompiledGraph:
        """Return the graph compiled for the device given, else `RLX_DEVICE`, else the fastest that takes it.

        Raises:
            DeviceError: the device given cannot be used, or no device takes the graph.
            LegalizeError: the device given does not take the graph.
            PlacementError: the device given does not take every node.
        """
        return self._open_first(self._resolved) if device is None else self._compiled(self.resolve(device), named=True)

    def compile_chain(self, device: Device | str | None = None) -> CompiledGraph:
        """Return the graph compiled for the first that takes it of the device given and those of `RLX_DEVICE_CHAIN`.

        Without a chain this is `compile_resolved`.

        Raises:
            DeviceFallbackError: every device of the chain refused.
        """
        if not device_chain_from_env():
            return self.compile_resolved(device)
        return self._first_of(chain_with(device), self.compile)[1]

    def compile_resolved_with_inputs(
        self, inputs: Mapping[str, Any], device: Device | str | None = None
    ) -> CompiledGraph:
        """Return the graph compiled for the device that `resolve_with_inputs` returns, or the next that takes it."""
        return self.compile_resolved(device) if device is not None else self._open_first(lambda: self._choice(inputs))

    def warm_all(self, progress: Callable[[Device], object] | None = None) -> list[Device]:
        """Open a session on every device that an automatic choice may take, and return those that took the graph.

        The others are logged, and `report` has the reason. `progress` is called with each device before its turn.

        Raises:
            ParamError: a parameter is not set, so no session can be opened.
        """
        import logging  # not needed by a start from the compile cache

        warm = []
        for device in self._candidates().devices():
            if progress is not None:
                progress(device)
            try:
                self._opened(device, named=False).open()
            except Exception as err:  # raised again unless the device is at fault
                if not is_device_failure(err):
                    raise
                logging.getLogger(__name__).warning("%s is not warmed up: %s", device.display, err)
            else:
                warm.append(device)
        return warm

    def placement(self, device: Device | str) -> Placement:
        """Return where each node is on a device; compiles the graph if that was not done.

        Raises:
            ParamError: a parameter is not set, so no session can be opened.
            DeviceError: the policy refuses the device, or it does not work here.
        """
        device = Device(device)
        return self._sessions.placement(device) or self._compiled(device, named=False).placement

    # Run

    def run(
        self,
        device: Device | str,
        inputs: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
    ) -> Outputs:
        """Run on a device and return the outputs in order and by name; see `compile` and `CompiledGraph.run`.

        Args:
            device: the device.
            inputs: input name -> array, or any object with `__dlpack__`, such as a tensor of PyTorch.
            timeout_s: ends the run after so many seconds, in a worker thread as `rlx_ort.limited` does. With
                `resilience` it is the limit of each attempt.
            cancel: ends the run when it is cancelled.

        Raises:
            TimeLimitError: the time limit is over.
            CancelledRunError: the run was cancelled.
        """
        failover = self._failover
        if failover is not None:
            outputs = failover.run_named(self, inputs, Device(device), timeout_s, cancel)
        elif timeout_s is not None or cancel is not None:
            return self._limited(lambda: self.run(device, inputs), timeout_s, cancel)
        else:
            outputs = self._again_if_closed(lambda: self.compile(device).run(inputs))
        return self._named(outputs)

    def __call__(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> Outputs:
        """Run as `run_resolved` on inputs by name, `runner(x=array)`, or on a dict of them."""
        if inputs is not None and not isinstance(inputs, Mapping):
            names = ", ".join(f"{value.name}=..." for value in self.inputs)
            raise InputError(f"inputs are given by name, as in runner({names}); got {type(inputs).__name__}")
        return self.run_resolved({**(inputs or {}), **named})

    async def run_async(
        self,
        inputs: Mapping[str, Any],
        device: Device | str | None = None,
        *,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
    ) -> Outputs:
        """Run as `run_resolved` in a thread; cancelling the task stops the run at its next node.

        Arrays are not copied: do not change them before the run has ended.
        """
        from rlx_ort.execution.background import run_in_background

        return await run_in_background(lambda: self.run_resolved(inputs, device, timeout_s=timeout_s, cancel=cancel))

    def run_dlpack(
        self,
        inputs: Mapping[str, Any],
        device: Device | str | None = None,
        *,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
    ) -> Outputs:
        """Run on the device of `run_resolved` and return outputs that stay there: objects with `__dlpack__`.

        `torch.from_dlpack(outputs["y"])` makes a tensor of one; see `CompiledGraph.run_dlpack`. Also with `resilience`
        no other device answers where that one fails: the caller's next step needs the outputs on the same device.
        """
        if timeout_s is not None or cancel is not None:
            return self._limited(lambda: self.run_dlpack(inputs, device), timeout_s, cancel)

        def run() -> list[Any]:
            if device is None:
                return list(self._open_first(lambda: self._resolved(inputs)).run_dlpack(inputs))
            return list(self.compile_resolved(device).run_dlpack(inputs))

        return self._named(self._again_if_closed(run))

    def run_resolved(
        self,
        inputs: Mapping[str, Any],
        device: Device | str | None = None,
        *,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
    ) -> Outputs:
        """Run on the device given, else `RLX_DEVICE`, else the fastest for these inputs that takes the graph."""
        failover = self._failover
        if device is None:
            if failover is not None:
                return failover.run(self, inputs, GraphDevices._resolved, timeout_s, cancel, "resolved")
            return self._run_choice(inputs, GraphDevices._resolved, timeout_s, cancel)
        if failover is None and (timeout_s is not None or cancel is not None):
            return self._limited(lambda: self.run_resolved(inputs, device), timeout_s, cancel)
        return self.run(self.resolve(device), inputs, timeout_s=timeout_s, cancel=cancel)

    def run_fastest(
        self, inputs: Mapping[str, Any], *, timeout_s: float | None = None, cancel: CancelToken | None = None
    ) -> Outputs:
        """Run on the device that is predicted to be fastest for these inputs and takes the graph; see `rank`.

        With `resilience`, another device answers where that one fails.

        Raises:
            NoViableDeviceError: no device takes the graph; it lists the reasons.
            RunError: the run failed; without `resilience` no other device is tried then, see `run_try`.
        """
        failover = self._failover
        if failover is not None:
            return failover.run(self, inputs, _predicted, timeout_s, cancel, "fastest")
        return self._run_choice(inputs, _predicted, timeout_s, cancel)

    def run_resolved_with_inputs(
        self,
        inputs: Mapping[str, Any],
        device: Device | str | None = None,
        *,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
    ) -> Outputs:
        """Run on the device that `resolve_with_inputs` returns; see `run_chosen`."""
        return self.run_chosen(inputs, device, timeout_s=timeout_s, cancel=cancel)[1]

    def run_chosen(
        self,
        inputs: Mapping[str, Any],
        device: Device | str | None = None,
        *,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
    ) -> tuple[Device, Outputs]:
        """Run on the device that `resolve_with_inputs` returns, and return it with the outputs.

        Under the adaptive strategy the run is timed, and where a device that took the winner's place fails, the
        winner answers.

        Raises:
            DeviceError: no device may be chosen, or the one given cannot be used.
            RunError: the run failed.
        """
        failover = self._failover
        if failover is None and (timeout_s is not None or cancel is not None):
            return self._limited(lambda: self.run_chosen(inputs, device), timeout_s, cancel)
        if device is not None:
            device = self.resolve(device)
            return device, self.run(device, inputs, timeout_s=timeout_s, cancel=cancel)
        follower: Follower | None = None

        def choose() -> tuple[Device, bool]:
            nonlocal follower
            follower = self._follower(inputs)
            return self._resolved(inputs) if follower is None else (self._followed(follower), False)

        if failover is not None:
            key = "" if isinstance(self._policy.pick_strategy(), (Benchmark, Adaptive)) else "resolved"
            outputs = failover.run(self, inputs, lambda *_: choose(), timeout_s, cancel, key)
            last = failover.last_run
            assert last is not None  # noqa: S101  # `run` has just recorded this one
            assert last.device is not None  # noqa: S101  # a run that returns was answered by a device
            if follower is not None:
                follower.note(last.device, int(last.seconds * 1e9))
            return last.device, outputs
        while True:
            sessions = self._sessions
            compiled = self._open_first(choose)
            begun = time.perf_counter_ns()
            try:
                outputs = self._named(compiled.run(inputs))
            except CancelledRunError:
                if not self._replaced(sessions):
                    raise
            except Exception as err:  # raised again unless the device is at fault
                if follower is None or compiled.device == follower.home or not is_device_failure(err):
                    raise
                follower.drop(compiled.device)
            else:
                if follower is not None:
                    follower.note(compiled.device, time.perf_counter_ns() - begun)
                return compiled.device, outputs

    def run_try(
        self,
        chain: Devices,
        inputs: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
    ) -> tuple[Device, Outputs]:
        """Run on the first device of a chain that works, and return it with the outputs.

        A device that refuses or fails, when compiling or when running, is an attempt; the next one is tried.
        `timeout_s` limits all attempts together, with `resilience` each one.

        Raises:
            DeviceFallbackError: every device refused or failed; `attempts` has the reasons.
            InputError: the inputs do not fit the graph, which would fail everywhere.
            ParamError: a parameter is not set.
        """
        if self._failover is None and (timeout_s is not None or cancel is not None):
            return self._limited(lambda: self.run_try(chain, inputs), timeout_s, cancel)
        return self._first_of(chain, lambda device: self.run(device, inputs, timeout_s=timeout_s, cancel=cancel))

    def run_chain(
        self,
        inputs: Mapping[str, Any],
        device: Device | str | None = None,
        *,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
    ) -> tuple[Device, Outputs]:
        """Run on the device given, then on those of `RLX_DEVICE_CHAIN`; the first that works answers.

        With neither, run on the device that `resolve` returns. The limits are those of `run_try`.

        Raises:
            DeviceFallbackError: every device refused or failed.
            InputError: the inputs do not fit the graph.
            ParamError: a parameter is not set.
        """
        chain = chain_with(device)
        if chain:
            return self.run_try(chain, inputs, timeout_s=timeout_s, cancel=cancel)
        if timeout_s is not None or cancel is not None:
            return self._limited(lambda: self.run_chain(inputs), timeout_s, cancel)
        try:
            compiled = self._open_first(lambda: self._resolved(inputs))
        except (DeviceError, GraphError) as err:
            attempts = self.last_attempts
            raise DeviceFallbackError(attempts or [(Device.CPU, str(err))]) from err
        try:
            return compiled.device, self._named(compiled.run(inputs))
        except Exception as err:  # raised again unless the device is at fault
            if not is_device_failure(err):
                raise
            raise DeviceFallbackError([*self.last_attempts, (compiled.device, str(err))]) from err

    def benchmark(self, inputs: Mapping[str, Any], runs: int = 10) -> list[DeviceBenchResult]:
        """Time the graph on every device that an automatic choice may take: a warm-up, then `runs` runs; fastest first.

        Devices that fail come last, with the reason. For some seconds adaptive choices for the graph use the times.
        """
        from rlx_ort.adaptive import learn_from
        from rlx_ort.execution.benchmark import benchmark_devices

        rows = benchmark_devices(self._candidates().devices(), self._to_time, inputs, runs)
        learn_from(rows, self.graph, self._by_choice, inputs)
        return rows

    # Health

    @property
    def last_run(self) -> RunRecord | None:
        """How the last run of this thread was answered; None before the first, and without `resilience`."""
        return None if self._failover is None else self._failover.last_run

    def health(self) -> list[DeviceHealth]:
        """Return the health of each device that may be chosen or has failed, the best choice first.

        Raises:
            RunError: the runner has no `resilience`.
        """
        if self._failover is None:
            raise RunError("health needs a runner with GraphDevices(..., resilience=Resilience())")
        return self._failover.health(self)

    # State

    def invalidate_cache(self) -> None:
        """Close every session and forget the devices, which refused, and the benchmark winners; the weights stay.

        The registry keeps the results of its probes for the whole process.
        """
        with self._lock:
            sessions = self._sessions
            self._forget()
        sessions.close()
        graph = getattr(self, "_graph", None)  # a packaged one may not have been read
        if graph is not None:
            from rlx_ort.selection.graph_cache import forget

            forget(graph)

    def set_policy(self, policy: DevicePolicy) -> None:
        """Replace the policy and forget what the old one decided; see `invalidate_cache`.

        Raises:
            DeviceParseError: it is no `DevicePolicy`.
        """
        if not isinstance(policy, DevicePolicy):
            raise DeviceParseError(repr(policy), f"a policy is a DevicePolicy, such as DevicePolicy.only({policy!r})")
        with self._lock:
            self._policy = policy
            self.invalidate_cache()

    def close(self) -> None:
        """Close every session; runs in other threads finish first. The runner stays usable and compiles again."""
        self._sessions.ended = True
        self.invalidate_cache()

    def __enter__(self) -> GraphDevices:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object, /) -> NoReturn:
        """Refuse to be copied or pickled: a copy would share the sessions, and closing it would close these.

        Raises:
            RunError: always.
        """
        raise RunError("a runner is neither copied nor pickled; make another with GraphDevices(graph, weights=weights)")

    def __repr__(self) -> str:
        return f"<GraphDevices {self.graph.name!r}, compiled for {labels(self._sessions.devices)}>"

    def _forget(self) -> None:
        self._sessions = DeviceSessions(self._options)
        self._devices = None
        self._winners = {}
        if self._failover is not None:
            self._failover.forget_sessions()

    def _follow_graph(self) -> None:
        """Close the sessions if the graph has grown, so that it is compiled again."""
        graph = self.graph
        if graph.revision != self._revision:
            with self._lock:
                self.invalidate_cache()
                self._revision = graph.revision
                self._named = outputs_class(graph.output_names)
                self.weights.declare_from(graph)

    def _resolved(self, inputs: Mapping[str, Any] | None = None) -> tuple[Device, bool]:
        """Return `RLX_DEVICE` or the fastest device for the inputs, and whether it was named."""
        from rlx_ort.selection.resolve import choice

        self._follow_graph()
        return choice(self.graph, None, self._policy, self._options, inputs)

    def _choice(self, inputs: Mapping[str, Any]) -> tuple[Device, bool]:
        """Return the device of the policy's strategy for the inputs, and whether it was named."""
        follower = self._follower(inputs)
        return self._resolved(inputs) if follower is None else (self._followed(follower), False)

    def _followed(self, follower: Follower) -> Device:
        """Return the current device of a follower, or its first one while that holds the caller's state."""
        first = self._sessions.find(follower.home, self._by_choice.placement or PlacementRule.ASSISTED)
        if first is not None and first.has_handles:
            return follower.home
        return follower.device(self._refusals(self._by_choice))

    def _follower(self, inputs: Mapping[str, Any]) -> Follower | None:
        """Return the follower of the winner under a strategy that measures, or None under another one."""
        pick = self._policy.pick_strategy()
        if not isinstance(pick, (Benchmark, Adaptive)):
            return None
        from rlx_ort.execution.benchmark import input_signature

        self._follow_graph()
        key, winners = input_signature(inputs), self._winners  # another thread may begin with an empty map meanwhile
        follower = winners.get(key)
        if follower is not None and follower.home not in self._refusals(self._by_choice):
            return follower
        from rlx_ort.adaptive import Choice, Follower, choose

        candidates = self._candidates(inputs)
        if isinstance(pick, Adaptive):
            found = choose(candidates, inputs, self._to_time, pick.runs)
            self.last_choice = found
        else:
            rows = self.benchmark(inputs, pick.runs)
            if not rows:
                return Follower(self.graph, Choice(self.fastest(inputs), "predicted"), ())
            if rows[0].median_exec_ns is None:
                raise DeviceFallbackError((row.device, row.failure) for row in rows)
            found = Choice(rows[0].device, "measured")
        sizes = tuple(sorted(candidates.dims.items()))
        winners[key] = follower = Follower(self.graph, found, sizes)
        return follower

    def _has_winner(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether devices were measured for such inputs."""
        from rlx_ort.execution.benchmark import input_signature

        return input_signature(inputs) in self._winners

    def _candidates(self, inputs: Mapping[str, Any] | None = None, options: CompileOptions | None = None) -> Candidates:
        """Return the devices for an automatic choice as of now, or for other options."""
        from rlx_ort.selection.candidates import Candidates

        self._follow_graph()
        return Candidates(self.graph, self._policy, options or self._by_choice, inputs)

    def _refusals(self, options: CompileOptions) -> dict[Device, str]:
        from rlx_ort.selection.graph_cache import refusals

        return refusals(self.graph, options)

    def _replaced(self, sessions: DeviceSessions) -> bool:
        """Return whether another thread has made the runner forget these sessions, without closing it."""
        return self._sessions is not sessions and not sessions.ended

    def _again_if_closed(self, run: Callable[[], T]) -> T:
        """Return the result of a run, made again where its session was closed before it began.

        `invalidate_cache` and `set_policy` of another thread close the sessions; `close` ends the runs that wait.
        """
        while True:
            sessions = self._sessions
            try:
                return run()
            except CancelledRunError:
                if not self._replaced(sessions):
                    raise

    def _first_of(self, chain: Devices, work: Callable[[Device], T]) -> tuple[Device, T]:
        """Return the first device of a chain on which the work succeeds, and its result; keep the attempts."""
        from rlx_ort.selection.resolve import run_with_fallback

        attempts: list[tuple[Device, str]] = []
        try:
            return run_with_fallback(self.graph, self._policy, chain, work, self._options, attempts)
        finally:
            self.last_attempts = tuple(attempts)

    def _open_first(self, choose: Callable[[], tuple[Device, bool]]) -> CompiledGraph:
        """Return the graph compiled for the first choice that takes it, and keep who refuses."""
        from rlx_ort.selection.resolve import open_first

        try:
            return self._again_if_closed(lambda: open_first(choose, self._opened))
        finally:
            self.last_attempts = tuple(self._refusals(self._by_name).items())

    def _run_choice(
        self, inputs: Mapping[str, Any], choose: Choose, timeout_s: float | None, cancel: CancelToken | None
    ) -> Outputs:
        """Run on the first choice that takes the graph."""
        if timeout_s is not None or cancel is not None:
            return self._limited(lambda: self._run_choice(inputs, choose, None, None), timeout_s, cancel)
        outputs = self._again_if_closed(lambda: self._open_first(lambda: choose(self, inputs)).run(inputs))
        return self._named(outputs)  # not sooner: a graph that has grown is followed first

    def _limited(self, run: Callable[[], T], timeout_s: float | None, cancel: CancelToken | None) -> T:
        """Return the result of a run within limits; sessions whose engine does not return are given up."""
        from rlx_ort.resilience.limits import run_limited
        from rlx_ort.resilience.options import check_timeout

        def stuck(_: object) -> None:
            for device in self._sessions.devices:
                self._sessions.drop(device)

        if timeout_s is not None:
            check_timeout(timeout_s)
        return run_limited(run, timeout_s, _GRACE_S, cancel, stuck)

    def _to_time(self, device: Device) -> CompiledGraph:
        """Return a graph whose runs do not change the handles of the compiled graph that callers have."""
        found = self._opened(device, named=False)
        return found.clone() if found.has_handles else found

    def _opened(self, device: Device, named: bool, sessions: DeviceSessions | None = None) -> CompiledGraph:
        """Return the graph compiled for a device, with its session open unless a parameter is still to be set."""
        compiled = self._compiled(device, named, sessions)
        if not compiled.is_open:
            with self._remembering(device, compiled.rule):
                compiled.open(required=False)
        return compiled

    def _remembering(self, device: Device, rule: PlacementRule) -> contextlib.AbstractContextManager[None]:
        from rlx_ort.selection.graph_cache import remembered

        return remembered(self.graph, device, self._options.with_(placement=rule))

    def _compiled(self, device: Device, named: bool, sessions: DeviceSessions | None = None) -> CompiledGraph:
        """Return the graph compiled for a device, among these sessions or the present ones."""
        self._follow_graph()
        rule = (self._by_name if named else self._by_choice).placement or PlacementRule.STRICT
        sessions = sessions or self._sessions
        found = sessions.find(device, rule)
        if found is not None:
            return found
        refusal = self._policy.refusal(device)
        if refusal is not None:
            raise NoViableDeviceError(f"{device.display} may not run graph {self.graph.name!r}: it is {refusal}")
        with self._remembering(device, rule):
            return sessions.compiled(self.graph, self.weights, device, rule)


def resilience_from_env() -> Resilience | None:
    """Return what `RLX_RESILIENCE` asks for; see `Resilience.from_env`."""
    if not environment.get("RESILIENCE"):  # a warmed package starts without the import
        return None
    from rlx_ort.resilience.options import Resilience

    return Resilience.from_env()


def _predicted(runner: GraphDevices, inputs: Mapping[str, Any]) -> tuple[Device, bool]:
    """Return the device that is predicted to be fastest, which nobody named."""
    return runner.fastest(inputs), False
