"""`RouteTable`: which session answers inputs of a kind; the cache of decisions of a runner.

A route holds while the epoch of the process, the graph and the variables that were read are those from before the
choice. Whatever way a run is asked for, its steady state is a lookup here and the session's run.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from rlx_ort import environment, epoch
from rlx_ort.selection.policy import device_chain_from_env

if TYPE_CHECKING:
    from rlx_ort.adaptive import Follower
    from rlx_ort.device import Device
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.inputs import Kind
    from rlx_ort.execution.interface import Inputs, Outputs
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.split_plan import SplitPlan
    from rlx_ort.selection.policy import Devices


class Goal:
    """A way to choose a device automatically, which the inputs size."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<Goal {self.name}>"


FASTEST, RESOLVED, CHOSEN, CHAINED = map(Goal, ("fastest", "resolved", "chosen", "chained"))
HINT, TRY = "hint", "try"
Attempts: TypeAlias = "tuple[tuple[Device, str], ...]"
Key: TypeAlias = Hashable
"""What a run asks for: a `Goal`, a named device, `(HINT, device)`, or `(TRY, devices)`."""


def is_automatic(goal: Key) -> bool:
    """Return whether the device is chosen, and not named."""
    return goal.__class__ is Goal


def chain_of(goal: Key) -> Devices | None:
    """Return the devices that are tried one after the other, or None where there is no chain.

    Raises:
        DeviceParseError: a name in `RLX_DEVICE_CHAIN` does not parse.
    """
    if goal is CHAINED:
        return device_chain_from_env() or None
    return goal[1] if goal.__class__ is tuple and goal[0] is TRY else None


class Pick(NamedTuple):
    """A chosen device, whether the call or a variable named it, and its follower from run to run, if it has one.

    With a plan the graph runs in its stages; the device is that of the last one.
    """

    device: Device
    named: bool
    follower: Follower | None = None
    plan: SplitPlan | None = None

    @property
    def place(self) -> Device | SplitPlan:
        """Where sessions are opened."""
        return self.plan or self.device


class Route:
    """The session of a device that answers inputs of a kind.

    Attributes:
        is_like: returns whether inputs are of that kind.
        device: the device.
        run: runs the session on such inputs and returns outputs that have names.
        compiled: the compiled graph there.
        attempts: the devices that refuse the graph, with the reasons, for `last_attempts`; None for a named device.
        follower: follows a choice that later runs may change.
        watches: whether variables of the environment decide.
    """

    __slots__ = (
        "attempts",
        "chain",
        "compiled",
        "device",
        "epoch",
        "follower",
        "graph",
        "is_like",
        "named",
        "revision",
        "run",
        "watches",
    )

    def __init__(
        self,
        is_like: Kind,
        run: Callable[[Inputs], Outputs],
        pick: Pick,
        compiled: CompiledGraph,
        since: Moment,
        attempts: Attempts | None,
        watches: bool,
    ) -> None:
        self.is_like, self.run, self.watches = is_like, run, watches
        self.device, self.follower = pick.device, pick.follower
        self.compiled, self.attempts = compiled, attempts
        _, self.graph, self.revision, self.epoch, self.named, self.chain = since  # which takes longer to look at


_variable, (_DEVICE, _CHAIN) = environment.reader("DEVICE", "DEVICE_CHAIN")


class Moment(NamedTuple):
    """The state of things before a choice: a route of it holds while it is the present one."""

    routes: RouteTable
    graph: Graph
    revision: int
    epoch: int
    named: object
    chain: object


class RouteTable:
    """The routes of a runner for one state of its sessions; may be used from several threads."""

    def __init__(self) -> None:
        self._latest: dict[Key, Route] = {}
        self._by_sizes: dict[Any, Route] = {}
        self._last_sizes: dict[Key, Any] = {}
        self._sized: tuple[str, ...] = ()  # the inputs with open dims, whose sizes decide
        self._ends_s: float | None = None  # when a refusal stops to count

    def clear(self) -> None:
        """Let go of every session, also where a run in progress still refers to this table."""
        self._latest.clear()
        self._by_sizes.clear()

    def moment(self, graph: Graph) -> Moment:
        """Return the present state of things, from which a choice is made."""
        return Moment(self, graph, graph.revision, epoch.now, _variable(_DEVICE), _variable(_CHAIN))

    def find(self, goal: Key, inputs: Inputs) -> Route | None:
        """Return the route of such inputs, or None if there is none that holds."""
        route = self._latest.get(goal)
        if route is None or not route.is_like(inputs):
            route = self._of_sizes(goal, inputs)
            if route is None:
                return None
        if (
            route.epoch != epoch.now
            or route.graph.revision != route.revision
            or (route.watches and (_variable(_DEVICE) != route.named or _variable(_CHAIN) != route.chain))
            or (self._ends_s is not None and time.monotonic() >= self._ends_s)
            or (route.follower is not None and route.follower.device() != route.device)
        ):
            return None
        return route

    def put(
        self, goal: Key, inputs: Inputs, pick: Pick, compiled: CompiledGraph, since: Moment, attempts: Attempts | None
    ) -> None:
        """Let the next runs with such inputs go straight to the device, while nothing has changed since."""
        from rlx_ort.selection.graph_cache import named_dims, refusals_end_s

        watches = is_automatic(goal) and goal is not FASTEST
        if pick.follower is not None:  # measured for inputs of these shapes and dtypes
            kind = compiled.kind_of(inputs)
            if kind is not None:
                self._latest[goal] = Route(kind, compiled.run_checked, pick, compiled, since, attempts, watches)
            return
        if is_automatic(goal):
            self._sized = tuple(name for name, _ in named_dims(since.graph))
        self._ends_s = refusals_end_s(since.graph)
        self._latest.pop(goal, None)  # it may hold no more
        route = Route(lambda _: False, compiled.run_named, pick, compiled, since, attempts, watches)
        self._by_sizes[self._sizes(goal, inputs)] = route

    def _of_sizes(self, goal: Key, inputs: Inputs) -> Route | None:
        """Return the route of inputs of such sizes; if it is the last one again, it is the first one tried next."""
        sizes = self._sizes(goal, inputs)
        route = self._by_sizes.get(sizes)
        if route is None or self._last_sizes.get(goal) != sizes:
            self._last_sizes[goal] = sizes
            return route
        compiled = route.compiled
        kind = compiled.kind_of(inputs)
        if kind is not None:
            self._latest[goal] = route = copy.copy(route)
            route.is_like, route.run = kind, compiled.run_checked
        return route

    def _sizes(self, goal: Key, inputs: Inputs) -> Any:
        """Return a key of the choice for inputs of such sizes."""
        if goal.__class__ is not Goal or not self._sized:
            return goal
        try:
            return (goal, *[np.shape(inputs.get(name, ())) for name in self._sized])
        except (AttributeError, KeyError, TypeError, ValueError):  # wrong inputs, which the run refuses
            return goal
