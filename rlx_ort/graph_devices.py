"""`GraphDevices`: one graph, its weights, and every device it may run on. The front door of the package.

It joins two independent halves: `rlx_ort.selection` chooses a device, `rlx_ort.execution` runs the graph. A device that
is named, in code or in a variable, must take every node (strict); with an automatic choice the CPU may help (assisted).
`CompileOptions.placement` overrides both.

When a device refuses the graph at opening, an automatic choice remembers that and continues with the next device of
`rank`. A device named in the call raises an error instead, and `RLX_DEVICE` is skipped with a warning.

The halves are imported when a method first needs them: a warmed package runs without either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, overload

from rlx_ort import environment
from rlx_ort.device import Device, DeviceLike, is_pair, with_options
from rlx_ort.device_sessions import DeviceSessions
from rlx_ort.errors import (
    CancelledRunError,
    DeviceError,
    DeviceFallbackError,
    DeviceParseError,
    GraphError,
    InputError,
    RunError,
)
from rlx_ort.execution.interface import Inputs, Outputs, ParamSetter, ValueInfo, described, inputs_by_name
from rlx_ort.faults import first_that_works, is_device_failure, those_that_work
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.routes import (
    CHAINED,
    CHOSEN,
    FASTEST,
    HINT,
    RESOLVED,
    TRY,
    Goal,
    Key,
    Moment,
    Pick,
    chain_of,
    is_automatic,
)
from rlx_ort.selection.policy import DevicePolicy, chain_with, device_chain_from_env, labels

if TYPE_CHECKING:
    from rlx_ort.adaptive import Choice
    from rlx_ort.execution.benchmark import DeviceBenchResult
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.placement import Placement
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.split_plan import SplitPlan
    from rlx_ort.options.variant import Variant
    from rlx_ort.resilience.failover import Failover, RunRecord
    from rlx_ort.resilience.limits import CancelToken
    from rlx_ort.resilience.options import Resilience
    from rlx_ort.resilience.quarantine import DeviceHealth
    from rlx_ort.selection.candidates import DeviceCandidate
    from rlx_ort.selection.policy import Devices
    from rlx_ort.tuning import Tuning

Cancel: TypeAlias = "CancelToken | None"
_Failed: TypeAlias = tuple[Device, Exception]
T = TypeVar("T")
_GRACE_S = 1.0  # that an engine has to return at a time limit


def graph_param_names(graph: Graph) -> list[str]:
    """Return the names of the graph's parameters, in the order they were added; inputs are not among them."""
    return [value.name for value in graph.params]


class GraphDevices(ParamSetter):
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
    """

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
        self._sessions.take(graph, weights)

    def _prepare(
        self,
        policy: DevicePolicy | None,
        options: CompileOptions | None,
        resilience: Resilience | None = None,
        load: Callable[[], tuple[Graph, WeightStore]] | None = None,
    ) -> None:
        """Set everything but the graph and its weights, which `load` reads when they are first needed."""
        if options is not None and not isinstance(options, CompileOptions):
            raise InputError(
                f"options are CompileOptions, as in CompileOptions(dims={{...}}); got {type(options).__name__}"
            )
        policy = DevicePolicy() if policy is None else _checked(policy)
        self._sessions = DeviceSessions(policy, options or CompileOptions(), load)
        self._failover: Failover | None = None
        if resilience is not None:
            from rlx_ort.resilience.failover import Failover

            self._failover = Failover(self._sessions, resilience)
        self.last_attempts: tuple[tuple[Device, str], ...] = ()

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
        return self._sessions.graph

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
        return self._sessions.policy

    @property
    def options(self) -> CompileOptions:
        """How graphs are compiled."""
        return self._sessions.options

    @property
    def weights(self) -> WeightStore:
        """The parameters' data, shared by all devices."""
        self._sessions.follow_graph()
        return self._sessions.weights

    @property
    def last_choice(self) -> Choice | None:
        """The last choice of the adaptive strategy, with predictions and measurements; None before."""
        return self._sessions.last_choice

    # Which device

    def devices(self) -> list[Device]:
        """Return the devices that take the whole graph, so that `run(device)` accepts them, in the policy's order.

        Found once and kept until `invalidate_cache`, or until a device refuses at opening, which is then left out. An
        automatic choice may also take a device that the CPU has to help: `rank` has those as well.
        """
        return self._sessions.strict_devices()

    def report(self) -> list[DeviceCandidate]:
        """Return a new report: one row a device, with the reason why it is blocked."""
        return self._sessions.candidates().report()

    def rank(self, inputs: Inputs | None = None) -> list[DeviceCandidate]:
        """Return a row for every device the policy allows, the best choice first, blocked ones last.

        Automatic choices follow this order. The inputs size the predictions; see `rlx_ort.rank`.
        """
        return self._sessions.candidates(inputs).rank()

    def fastest(self, inputs: Inputs | None = None) -> Device:
        """Return the device with the smallest predicted time now; `RLX_DEVICE` is ignored.

        The inputs size the prediction. No session is opened: a device is passed over once it has refused the graph in
        `compile_fastest` or another automatic choice.

        Raises:
            NoViableDeviceError: no device may be chosen; it lists the reasons.
        """
        return self._sessions.candidates(inputs).fastest()

    def resolve(self, device: DeviceLike | None = None) -> Device:
        """Return the device to use: the one given, else `RLX_DEVICE`, else the fastest.

        Raises:
            DeviceError: the device given cannot be used, or none can.
            LegalizeError: the device given does not take the graph.
        """
        return self._sessions.resolve(None if device is None else self._device(device))

    def resolve_chain(self, device: DeviceLike | None = None) -> Device:
        """Return the first device that may run the graph: the one given, then those of `RLX_DEVICE_CHAIN`.

        Without a chain this is `resolve`. With one, `RLX_DEVICE` is ignored.

        Raises:
            NoViableDeviceError: none of them may.
        """
        from rlx_ort.selection.resolve import resolve_device_chain

        if not device_chain_from_env():
            return self.resolve(device)
        chain = chain_with(None if device is None else self._device(device))
        return resolve_device_chain(self.graph, chain, self.policy, self.options)

    def resolve_with_inputs(self, inputs: Inputs, device: DeviceLike | None = None) -> Device:
        """Return the device to use for inputs of these sizes; under the benchmark strategy the fastest measured one.

        Under the adaptive strategy devices are measured if their predictions are too close. The winner is remembered
        for the shapes and dtypes of the inputs; under the adaptive strategy another device replaces it while it is
        faster in runs of `run_resolved_with_inputs`. Both strategies ignore `RLX_DEVICE`.

        Raises:
            DeviceFallbackError: every device failed in the benchmark.
            NoViableDeviceError: no device may be chosen.
        """
        return self._sessions.pick(CHOSEN, inputs).device if device is None else self.resolve(device)

    # Weights

    def sync_params_to_all(self) -> None:
        """Open stale sessions again now, on every device that was compiled, and not at their next run.

        Raises:
            ParamError: a parameter is not set.
        """
        self._sessions.current.reopen_stale()

    # Compile

    def compile(self, device: DeviceLike) -> CompiledGraph:
        """Return the graph compiled for a device; the second call returns the same object, until it is closed.

        Closing it releases its handles and other state; the session belongs to the runner and stays open. A graph that
        was chosen automatically shares all state with the one that was named, so a handle bound in one is in both.

        Raises:
            NoViableDeviceError: the policy refuses the device.
            DeviceUnavailableError: the device does not work here.
            PlacementError: it does not take every node; see `CompileOptions.placement`.
        """
        return self._sessions.compiled(self._device(device), named=True)

    def compile_fastest(self) -> CompiledGraph:
        """Return the graph compiled for the fastest device that takes it; see `fastest` and `rank`.

        While a parameter is unset no session is opened, and the first device is assumed to take the graph.

        Raises:
            NoViableDeviceError: no device takes the graph; it lists the reasons.
        """
        return self._open_first(FASTEST)[1]

    def compile_resolved(self, device: DeviceLike | None = None) -> CompiledGraph:
        """Return the graph compiled for the device given, else `RLX_DEVICE`, else the fastest that takes it.

        Raises:
            DeviceError: the device given cannot be used, or no device takes the graph.
            LegalizeError: the device given does not take the graph.
            PlacementError: the device given does not take every node.
        """
        return self._open_first(RESOLVED if device is None else (HINT, self._device(device)))[1]

    def compile_chain(self, device: DeviceLike | None = None) -> CompiledGraph:
        """Return the graph compiled for the first that takes it of the device given and those of `RLX_DEVICE_CHAIN`.

        Without a chain this is `compile_resolved`.

        Raises:
            DeviceFallbackError: every device of the chain refused.
        """
        if not device_chain_from_env():
            return self.compile_resolved(device)
        from rlx_ort.selection.resolve import run_with_fallback

        attempts: list[tuple[Device, str]] = []
        chain = chain_with(None if device is None else self._device(device))
        try:
            return run_with_fallback(self.graph, self.policy, chain, self.compile, self.options, attempts)[1]
        finally:
            self.last_attempts = tuple(attempts)

    def compile_resolved_with_inputs(self, inputs: Inputs, device: DeviceLike | None = None) -> CompiledGraph:
        """Return the graph compiled for the device that `resolve_with_inputs` returns, or the next that takes it."""
        return self._open_first(CHOSEN, inputs)[1] if device is None else self.compile_resolved(device)

    def warm_all(self, progress: Callable[[Device], object] | None = None) -> list[Device]:
        """Open a session on every device that an automatic choice may take, and return those that took the graph.

        The others are logged, and `report` has the reason. `progress` is called with each device before its turn.

        Raises:
            ParamError: a parameter is not set, so no session can be opened.
        """
        import logging  # not needed by a start from the compile cache

        log = logging.getLogger(__name__)

        def opened(device: Device) -> None:
            if progress is not None:
                progress(device)
            self._sessions.open(device, named=False).open()

        def failed(device: Device, error: Exception) -> None:
            log.warning("%s is not warmed up: %s", device.display, error)

        return [device for device, _ in those_that_work(self._sessions.candidates().devices(), opened, failed)]

    def placement(self, device: DeviceLike) -> Placement:
        """Return where each node is on a device; compiles the graph if that was not done.

        Raises:
            ParamError: a parameter is not set, so no session can be opened.
            DeviceError: the policy refuses the device, or it does not work here.
        """
        device = self._device(device)
        sessions = self._sessions
        slot = sessions.current.slot(device)
        return (slot and slot.placement) or sessions.compiled(device, named=False).placement

    def variant(self, device: DeviceLike) -> Variant | None:
        """Return the variant that `tune` found and the device's session runs in; None without one, or a session."""
        slot = self._sessions.current.slot(self._device(device))
        return None if slot is None else slot.variant

    # Run

    @overload
    def run(
        self, device: DeviceLike | None, inputs: Inputs, *, timeout_s: float | None = None, cancel: Cancel = None
    ) -> Outputs: ...
    @overload
    def run(
        self, inputs: Inputs, device: DeviceLike | None = None, *, timeout_s: float | None = None, cancel: Cancel = None
    ) -> Outputs: ...
    def run(  # type: ignore[misc]  # which takes the arguments in both orders
        self,
        first: Any = None,
        second: Any = None,
        /,
        *,
        device: Any = None,
        inputs: Any = None,
        timeout_s: float | None = None,
        cancel: Cancel = None,
    ) -> Outputs:
        """Run on a device and return the outputs in order and by name; see `compile` and `CompiledGraph.run`.

        `run(device, inputs)` and `run(inputs, device)` are the same; without a device this is `run_resolved`.

        Args:
            first: the device or the inputs.
            second: the other one.
            device: the device, by name.
            inputs: input name -> array, or any object with `__dlpack__`, such as a tensor of PyTorch.
            timeout_s: ends the run after so many seconds, in a worker thread as `rlx_ort.limited` does. With
                `resilience` it is the limit of each attempt.
            cancel: ends the run when it is cancelled.

        Raises:
            TimeLimitError: the time limit is over.
            CancelledRunError: the run was cancelled.
        """
        if second is None or not (first.__class__ is str or first.__class__ is Device):
            first, second = self._asked(first, second, device, inputs)
        run = self._run if self._failover is None else self._failover.run  # one step less in each run
        return run(first, second, timeout_s, cancel)[1]

    def _asked(self, first: Any, second: Any, device: Any, inputs: Any) -> tuple[Key, Inputs]:
        """Return the goal and the inputs of a call of `run`, whose arguments may come in either order."""
        for given in (first, second):
            if isinstance(given, Mapping) and inputs is None:
                inputs = given
            elif given is not None:
                if device is not None:
                    wanted = "one device and one mapping of inputs, as in run('cpu', {'x': array})"
                    raise InputError(f"run takes {wanted}; got {type(given).__name__} as well")
                device = given
        goal = RESOLVED if device is None else self._device(device)
        if inputs is None:
            names = ", ".join(f"{value.name!r}: ..." for value in self.inputs)
            raise InputError(f"run needs the inputs, as in run('cpu', {{{names}}})")
        return goal, inputs

    def _device(self, device: DeviceLike) -> Device:
        """Return a device; the provider options of a pair become those of its sessions, which are then opened again."""
        found, given = with_options(device)
        if given and self._sessions.give_options(found, given):
            self.invalidate_cache()
        return found

    def __call__(self, *given: Any, **named: Any) -> Outputs:
        """Run as `run_resolved` on inputs by name, `runner(x=array)`, in order, `runner(array)`, or on a dict."""
        if given:
            named = inputs_by_name([value.name for value in self.inputs], given, named)
        run = self._run if self._failover is None else self._failover.run
        return run(RESOLVED, named)[1]

    async def run_async(
        self, inputs: Inputs, device: DeviceLike | None = None, *, timeout_s: float | None = None, cancel: Cancel = None
    ) -> Outputs:
        """Run as `run_resolved` in a thread; cancelling the task stops the run at its next node.

        Arrays are not copied: do not change them before the run has ended.
        """
        from rlx_ort.execution.background import run_in_background

        return await run_in_background(lambda: self.run_resolved(inputs, device, timeout_s=timeout_s, cancel=cancel))

    def run_dlpack(
        self, inputs: Inputs, device: DeviceLike | None = None, *, timeout_s: float | None = None, cancel: Cancel = None
    ) -> Outputs:
        """Run on the device of `run_resolved` and return outputs that stay there: objects with `__dlpack__`.

        `torch.from_dlpack(outputs["y"])` makes a tensor of one; see `CompiledGraph.run_dlpack`. Also with `resilience`
        no other device answers where that one fails: the caller's next step needs the outputs on the same device.
        """
        goal = RESOLVED if device is None else (HINT, self._device(device))
        return self._run(goal, inputs, timeout_s, cancel, True)[1]

    def run_resolved(
        self, inputs: Inputs, device: DeviceLike | None = None, *, timeout_s: float | None = None, cancel: Cancel = None
    ) -> Outputs:
        """Run on the device given, else `RLX_DEVICE`, else the fastest for these inputs that takes the graph."""
        known = device.__class__ is str or device.__class__ is Device  # `in` would build a tuple in each run
        goal = RESOLVED if device is None else (HINT, device if known else self._device(device))
        run = self._run if self._failover is None else self._failover.run
        return run(goal, inputs, timeout_s, cancel)[1]

    def run_fastest(self, inputs: Inputs, *, timeout_s: float | None = None, cancel: Cancel = None) -> Outputs:
        """Run on the device that is predicted to be fastest for these inputs and takes the graph; see `rank`.

        With `resilience`, another device answers where that one fails.

        Raises:
            NoViableDeviceError: no device takes the graph; it lists the reasons.
            RunError: the run failed; without `resilience` no other device is tried then, see `run_try`.
        """
        run = self._run if self._failover is None else self._failover.run
        return run(FASTEST, inputs, timeout_s, cancel)[1]

    def run_resolved_with_inputs(
        self, inputs: Inputs, device: DeviceLike | None = None, *, timeout_s: float | None = None, cancel: Cancel = None
    ) -> Outputs:
        """Run on the device that `resolve_with_inputs` returns; see `run_chosen`."""
        return self.run_chosen(inputs, device, timeout_s=timeout_s, cancel=cancel)[1]

    def run_chosen(
        self, inputs: Inputs, device: DeviceLike | None = None, *, timeout_s: float | None = None, cancel: Cancel = None
    ) -> tuple[Device, Outputs]:
        """Run on the device that `resolve_with_inputs` returns, and return it with the outputs.

        Under the adaptive strategy the run is timed, and where a device that took the winner's place fails, the
        winner answers.

        Raises:
            DeviceError: no device may be chosen, or the one given cannot be used.
            RunError: the run failed.
        """
        run = self._run if self._failover is None else self._failover.run
        return run(CHOSEN if device is None else (HINT, self._device(device)), inputs, timeout_s, cancel)

    def run_try(
        self, chain: Devices, inputs: Inputs, *, timeout_s: float | None = None, cancel: Cancel = None
    ) -> tuple[Device, Outputs]:
        """Run on the first device of a chain that works, and return it with the outputs.

        A device that refuses or fails, when compiling or when running, is an attempt; the next one is tried.
        `timeout_s` limits all attempts together, with `resilience` each one.

        Raises:
            DeviceFallbackError: every device refused or failed; `attempts` has the reasons.
            InputError: the inputs do not fit the graph, which would fail everywhere.
            ParamError: a parameter is not set.
        """
        goal = TRY, (chain if isinstance(chain, (str, Device)) else tuple(chain))
        try:
            if self._failover is None:
                return self._run(goal, inputs, timeout_s, cancel)
            return self._supervised(goal, inputs, self._failover, timeout_s, cancel)
        except TypeError:  # a pair with provider options has no hash, so that no route was looked up
            given: Any = [goal[1]] if is_pair(goal[1]) else goal[1]
            if isinstance(given, (str, Device)) or not any(map(is_pair, given)):
                raise
        return self.run_try([self._device(each) for each in given], inputs, timeout_s=timeout_s, cancel=cancel)

    def run_chain(
        self, inputs: Inputs, device: DeviceLike | None = None, *, timeout_s: float | None = None, cancel: Cancel = None
    ) -> tuple[Device, Outputs]:
        """Run on the device given, then on those of `RLX_DEVICE_CHAIN`; the first that works answers.

        With neither, run on the device that `resolve` returns. The limits are those of `run_try`.

        Raises:
            DeviceFallbackError: every device refused or failed.
            InputError: the inputs do not fit the graph.
            ParamError: a parameter is not set.
        """
        if device is not None:
            return self.run_try(chain_with(self._device(device)), inputs, timeout_s=timeout_s, cancel=cancel)
        try:
            return self._run(CHAINED, inputs, timeout_s, cancel)
        except (DeviceError, GraphError) as err:
            if isinstance(err, DeviceFallbackError):
                raise
            raise DeviceFallbackError(self.last_attempts or [(Device.CPU, str(err))]) from err

    def benchmark(self, inputs: Inputs, runs: int = 10) -> list[DeviceBenchResult]:
        """Time the graph on every device that an automatic choice may take: a warm-up, then `runs` runs; fastest first.

        Devices that fail come last, with the reason. For some seconds adaptive choices for the graph use the times.
        """
        return self._sessions.benchmark(inputs, runs)

    def plan(
        self,
        inputs: Inputs | None = None,
        budgets: Mapping[DeviceLike, int | str] | str | None = None,
        *,
        overlap: bool = False,
    ) -> SplitPlan:
        """Return the fastest way to cut the graph into stages over several devices within their memory.

        Opens no session. `CompileOptions(split=plan)` runs by the plan; `plan.document()` is JSON that may be edited.

        Args:
            inputs: give the sizes of open dims.
            budgets: the bytes that the stages of each device may take, such as `{"cuda": "8GB", "cpu": "16GB"}` or
                `"cuda=8GB,cpu=16GB"`; by default all that sessions may take on each device that works here.
            overlap: plan for `run_pipelined`, where the slowest stage counts, and not for the time of one run.

        Raises:
            MemoryBudgetError: no plan keeps the budgets; it says by how much they are short.
            NoViableDeviceError: no device can be planned for.
        """
        from rlx_ort.selection.predict import dims_of
        from rlx_ort.selection.splitting import budgets_of, memory_limits, plan_split

        sessions = self._sessions
        options, graph = sessions.options, sessions.follow_graph()
        known = memory_limits(sessions.usable_devices(), options) if budgets is None else budgets_of(budgets)
        return plan_split(graph, known, options, dims_of(graph, inputs or {}), overlap=overlap)

    # Health

    def tune(
        self,
        inputs: Inputs,
        device: DeviceLike | None = None,
        *,
        tolerance: float | None = None,
        budget_s: float = 60.0,
        progress: Callable[[str], object] | None = None,
    ) -> Tuning:
        """Find the fastest variant of the options on a device by measurement, and use it from now on.

        Variants are compared with an exact run on these inputs, in f32, and may compute in `options.precision` where
        that is lower; `tolerance` is the largest error of an output over its largest value, by default that of the
        precision in `tuning.TOLERANCES`. The winner is kept in the cache folder for this graph, device, hardware,
        versions and options; where sizes that come back have sessions of their own, it is that of the inputs' sizes.

        Takes about `budget_s`, opens the sessions of the runner anew, and has two more open meanwhile. `device` is the
        one predicted to be fastest by default. `progress` is called with the name of each variant.

        Raises:
            RlxError: the device cannot run the graph in f32 with the options as they are.
        """
        from rlx_ort.tuning import tune

        rule = self.options.placement or (PlacementRule.ASSISTED if device is None else PlacementRule.STRICT)
        device = self.fastest(inputs) if device is None else self._device(device)
        given = (self._sessions.follow_graph(), self.weights, device, inputs, self.options)
        tuning = tune(*given, rule=rule, tolerance=tolerance, budget_s=budget_s, progress=progress)
        self.invalidate_cache()
        return tuning

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
        return self._failover.health()

    @property
    def resilience(self) -> Resilience | None:
        """How it reacts to devices that fail; None if it raises their errors."""
        return None if self._failover is None else self._failover.options

    def readmit(self, device: DeviceLike) -> None:
        """Use a device in quarantine again, which the caller has checked."""
        if self._failover is not None:
            self._failover.quarantine.readmit(Device(device))

    # State

    def invalidate_cache(self) -> None:
        """Close every session and forget the devices, which refused, and the benchmark winners; the weights stay.

        The registry keeps the results of its probes for the whole process.
        """
        self._sessions.forget()

    def set_policy(self, policy: DevicePolicy) -> None:
        """Replace the policy and forget the old one's decisions; see `invalidate_cache`.

        Raises:
            DeviceParseError: it is no `DevicePolicy`.
        """
        self._sessions.policy = _checked(policy)
        self.invalidate_cache()

    def close(self) -> None:
        """Close every session; runs in other threads finish first. The runner stays usable and compiles again."""
        self._sessions.current.ended = True
        self.invalidate_cache()

    def __reduce_ex__(self, protocol: object, /) -> NoReturn:
        """Refuse to be copied or pickled: a copy would share the sessions, and closing it would close these.

        Raises:
            RunError: always.
        """
        raise RunError("a runner is neither copied nor pickled; make another with GraphDevices(graph, weights=weights)")

    def __repr__(self) -> str:
        return f"<GraphDevices {self.graph.name!r}, compiled for {labels(self._sessions.current.devices)}>"

    # How a run is answered

    def _open_first(self, goal: Key, inputs: Inputs | None = None) -> tuple[Pick, CompiledGraph]:
        """Return the first choice that takes the graph, compiled for it; keep who refuses an automatic choice."""
        sessions = self._sessions
        try:
            return sessions.again_if_closed(lambda: sessions.open_first(goal, inputs))
        finally:
            if goal.__class__ is Goal:
                self.last_attempts = tuple(sessions.refusals().items())

    def _supervised(
        self, goal: Key, inputs: Inputs, failover: Failover, timeout_s: float | None, cancel: Cancel
    ) -> tuple[Device, Outputs]:
        """Run on the first device of a chain that works; the first one is tried at once if it worked before."""

        def run(device: Device) -> Outputs:
            return failover.run(device, inputs, timeout_s, cancel)[1]

        route = self._sessions.routes.find(goal, inputs)
        failed = None
        if route is not None:
            device = route.device
            del route  # which keeps the session
            try:
                outputs = run(device)
            except Exception as err:  # raised again unless another device may do better
                if not is_device_failure(err):
                    raise
                failed = device, err
            else:
                self.last_attempts = ()
                return device, outputs
        return self._first_of(goal, inputs, run, failed)

    def _first_of(
        self, goal: Key, inputs: Inputs, run: Callable[[Device], Outputs], failed: _Failed | None = None
    ) -> tuple[Device, Outputs]:
        """Run on the first device of a chain that works, and keep it; `failed` has just been tried."""
        from rlx_ort.selection.resolve import run_with_fallback

        sessions, attempts = self._sessions, list[tuple[Device, str]]()
        since = sessions.moment()

        def tried(device: Device) -> Outputs:
            nonlocal failed
            if failed is not None and failed[0] == device:
                error, failed = failed[1], None
                raise error
            return run(device)

        chain = chain_of(goal) or ()
        try:
            device, outputs = run_with_fallback(self.graph, self.policy, chain, tried, self.options, attempts)
        finally:
            self.last_attempts = tuple(attempts)
        if not attempts:
            compiled = sessions.compiled(device, named=True)
            since.routes.put(goal, inputs, Pick(device, named=True), compiled, since, ())
        return device, outputs

    def _run(
        self, goal: Key, inputs: Inputs, timeout_s: float | None = None, cancel: Cancel = None, on_device: bool = False
    ) -> tuple[Device, Outputs]:
        """Run as asked for, within limits if there are any, and return the device with the outputs; see `Key`.

        With `on_device` the outputs stay on the device. No other device answers for one that fails, but in a chain.
        """
        if timeout_s is not None or cancel is not None:
            return self._limited(lambda: self._run(goal, inputs, on_device=on_device), timeout_s, cancel)
        sessions = self._sessions
        current = sessions.current
        route = sessions.routes.find(goal, inputs)
        if route is None:
            return self._answered(goal, inputs, on_device)
        device, follower = route.device, route.follower
        begun = 0 if follower is None else time.perf_counter_ns()
        try:
            outputs = route.compiled.run_named(inputs, on_device=True) if on_device else route.run(inputs)
        except CancelledRunError:
            if current.ended or not route.compiled.closed:
                raise
        except Exception as err:  # raised again unless another device may do better
            if not is_device_failure(err):
                raise
            if chain_of(goal) is not None:
                return self._answered(goal, inputs, on_device, (device, err))
            self._move_on(goal, Pick(device, False, follower), err)
        else:
            if follower is not None:
                follower.note(device, time.perf_counter_ns() - begun)
            if route.attempts is not None:
                self.last_attempts = route.attempts
            return device, outputs
        return self._answered(goal, inputs, on_device)

    def _move_on(self, goal: Key, pick: Pick, error: Exception) -> None:
        """Return if a run that failed on a device is made again: where a follower had left the one that was chosen."""
        if goal is CHAINED:
            raise DeviceFallbackError([*self.last_attempts, (pick.device, str(error))]) from error
        if pick.follower is None or pick.device == pick.follower.home:
            raise error
        pick.follower.drop(pick.device)

    def _answered(
        self, goal: Key, inputs: Inputs, on_device: bool, failed: _Failed | None = None
    ) -> tuple[Device, Outputs]:
        """Choose a device, open its session, run, and keep the route; `failed` has failed already in a chain."""
        sessions = self._sessions
        if chain_of(goal) is not None:
            return self._first_of(goal, inputs, lambda device: self._run(device, inputs)[1], failed)

        def run(choice: tuple[Moment, Pick, CompiledGraph]) -> tuple[Device, Outputs]:
            since, pick, compiled = choice
            begun = time.perf_counter_ns()
            outputs = compiled.run_named(inputs, on_device=on_device)
            if pick.follower is not None:
                pick.follower.note(pick.device, time.perf_counter_ns() - begun)
            refusals = self.last_attempts if is_automatic(goal) else None
            since.routes.put(goal, inputs, pick, compiled, since, refusals)
            return pick.device, outputs

        choices = iter(lambda: (sessions.moment(), *self._open_first(goal, inputs)), None)  # without an end
        found = sessions.again_if_closed(
            lambda: first_that_works(choices, run, lambda choice, error: self._move_on(goal, choice[1], error))
        )
        assert found is not None  # noqa: S101  # there is always another choice
        return found[1]

    def _limited(self, run: Callable[[], T], timeout_s: float | None, cancel: Cancel) -> T:
        """Return the result of a run within limits; sessions whose engine does not return are given up."""
        from rlx_ort.resilience.limits import run_limited
        from rlx_ort.resilience.options import check_timeout

        def stuck(_: object) -> None:
            for device in self._sessions.current.devices:
                self._sessions.drop(device)

        if timeout_s is not None:
            check_timeout(timeout_s)
        return run_limited(run, timeout_s, _GRACE_S, cancel, stuck)


def _checked(policy: DevicePolicy) -> DevicePolicy:
    if not isinstance(policy, DevicePolicy):
        raise DeviceParseError(repr(policy), f"a policy is a DevicePolicy, such as DevicePolicy.only({policy!r})")
    return policy


def resilience_from_env() -> Resilience | None:
    """Return the value of `RLX_RESILIENCE`; see `Resilience.from_env`."""
    if not environment.get("RESILIENCE"):  # a warmed package starts without the import
        return None
    from rlx_ort.resilience.options import Resilience

    return Resilience.from_env()
