"""`tune`: find the fastest way to run a graph on a device for given inputs, by measurement, and check its results.

The options as they are start as champion. Each variant of the provider (`Provider.variants`) is added to the champion's
changes, opened, compared with an exact run, and raced against the champion in turns; it takes the champion's place if
it is right and faster. Variants that did not win are tried once more on top of those that won after them. No more than
two sessions are open at a time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rlx_ort.device import Device
from rlx_ort.device_sessions import SessionSet
from rlx_ort.execution import tunings
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.engine import bytes_in_use, open_slot
from rlx_ort.execution.session import working_provider
from rlx_ort.execution.weights import WeightStore
from rlx_ort.faults import is_device_failure
from rlx_ort.ir.graph import Graph
from rlx_ort.numerics import relative_error
from rlx_ort.options.compile_options import CompileOptions, PlacementRule, Precision
from rlx_ort.options.variant import ALLOWED, TOLERANCES, Variant, variants_of
from rlx_ort.providers.engine.process import budget
from rlx_ort.resilience.trial import disagreement
from rlx_ort.selection.predict import dims_of
from rlx_ort.selection.support import model_for
from rlx_ort.timing import in_row

WORTH = 0.98
"""A variant wins if its run takes at most this share of the champion's."""

_EXACT = Variant({"precision": "f32"})
_WARM_RUNS, _WARM_S = 8, 1.0  # a recording is made in them; slow runs end earlier
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 200
_ENOUGH = 10  # rounds with the same winner
_RACE_S = 1.5
_HOPELESS = 1.5  # times the champion's run, after warming up
_CLEARLY = 0.7  # share of the rounds that a winner is faster in
_TRIES = 2  # first looks at a variant's time
_PASSES = 2  # over all steps


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one variant.

    Attributes:
        variant: all its changes.
        run_ns: the median time of a run; None if it was not timed.
        ratio: that over the champion's in the same race.
        error: the largest error of an output, over its largest value; None if it did not run.
        memory_bytes: the growth of the process's use of the device's memory by opening and running it, None if unknown.
        open_ns: the time to open it and run it once.
        note: why it did not win, empty for a winner.
    """

    variant: str
    run_ns: float | None = None
    ratio: float | None = None
    error: float | None = None
    memory_bytes: int | None = None
    open_ns: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The outcome of `tune`.

    Attributes:
        device: the device.
        sizes: the sizes that were tuned for, by the name of the dim.
        variant: the fastest variant.
        usual_ns: the median time of a run with the options as they are, in the last race.
        run_ns: that of the fastest variant, in the same race.
        error: its largest error.
        tolerance: the largest error that was allowed.
        trials: every variant that was tried, in order; the last ones, of precisions that were not allowed, show what
            they would give.
        kept: whether the variant is kept on disk for the next opening.
    """

    device: Device
    sizes: Mapping[str, int]
    variant: Variant
    usual_ns: float
    run_ns: float
    error: float
    tolerance: float
    trials: Sequence[Trial] = field(repr=False, default=())
    kept: bool = True

    @property
    def speedup(self) -> float:
        """How many times as fast as with the options as they are."""
        return self.usual_ns / self.run_ns

    def document(self) -> dict[str, Any]:
        """Return the record that is kept, as JSON values."""
        changes = {
            name: dict(value) if isinstance(value, Mapping) else value for name, value in self.variant.changes.items()
        }
        facts = {"device": self.device.label, "sizes": dict(self.sizes), "variant": changes}
        times = {"usual_ns": self.usual_ns, "run_ns": self.run_ns, "error": self.error, "tolerance": self.tolerance}
        return {**facts, **times, "trials": [asdict(trial) for trial in self.trials]}


def tune(
    graph: Graph,
    weights: WeightStore,
    device: Device,
    inputs: Mapping[str, Any],
    options: CompileOptions,
    *,
    rule: PlacementRule = PlacementRule.STRICT,
    tolerance: float | None = None,
    budget_s: float = 60.0,
    progress: Callable[[str], object] | None = None,
) -> Tuning:
    """Return the fastest variant for a graph on a device, and keep it for later openings with the same options.

    `options.precision` is the lowest precision that a variant may compute in; results are compared with f32. Where
    sizes that come back have sessions of their own, the variant is found for those of the inputs. Takes about
    `budget_s`; a variant that opens when it is over is still raced.

    Raises:
        RlxError: the graph cannot be opened or run in f32 with the options as they are.
    """
    options = options.on(device).with_(tuned=False)
    tolerance = TOLERANCES[options.precision] if tolerance is None else tolerance
    with contextlib.ExitStack() as sessions:
        search = _Search(graph, weights, device, inputs, options, rule, tolerance, sessions)
        return search.run(time.monotonic() + budget_s, progress or (lambda text: None))


class _Race(NamedTuple):
    """The median time of a run, the median of its ratios to the other's, and the share of rounds it was faster in."""

    run_ns: float
    ratio: float
    share: float

    @property
    def won(self) -> bool:
        """Whether it is faster by more than noise."""
        return self.ratio <= WORTH and self.share >= _CLEARLY


class _Entry(NamedTuple):
    """A variant that was tried, with its sessions."""

    variant: Variant
    trial: Trial
    compiled: CompiledGraph | None
    sessions: SessionSet


@dataclass(eq=False, repr=False)
class _Search:
    """One call of `tune`; `opened` closes the sessions that are still open at its end."""

    graph: Graph
    weights: WeightStore
    device: Device
    inputs: Mapping[str, Any]
    options: CompileOptions
    rule: PlacementRule
    tolerance: float
    opened: contextlib.ExitStack

    def __post_init__(self) -> None:
        self.provider = working_provider(self.device)
        self.sizes = dims_of(self.graph, self.inputs)
        sessions, compiled = self._open(_EXACT)
        compiled.run(self.inputs)
        if compiled.engine().sized is not None:  # where sizes get sessions of their own, it is these that count
            self.options = self.options.with_(dims={**self.options.dims, **self.sizes}, sized_sessions=0)
        sessions.close()
        self.wanted: Sequence[Any] = ()
        self.trials: list[Trial] = []

    def run(self, end: float, progress: Callable[[str], object]) -> Tuning:
        """Return the outcome; no other variant is opened after `end`."""
        progress("the exact results")
        sessions, compiled = self._open(_EXACT)
        self.wanted = compiled.run(self.inputs)
        sessions.close()
        first = self._try(Variant())
        if first.trial.note:  # the options as they are fail, or exceed the tolerance
            first.sessions.close()
            self.trials.append(first.trial)
            first = self._try(_EXACT)
        champion, tried = first, set[str]()
        for step in _PASSES * tunings.steps(self.provider, self.device, self.options):
            variant = champion.variant.joined(step)
            options = champion.variant.of(self.options)
            known = variant.of(self.options).key == options.key or str(variant) in tried
            if known or not self._matters(step, options):
                continue
            tried.add(str(variant))
            if time.monotonic() > end:
                self.trials.append(Trial(str(variant), note="not tried, for lack of time"))
                continue
            progress(str(variant))
            challenger = self._try(variant, champion)
            self.trials.append(challenger.trial)
            won = not challenger.trial.note
            (champion if won else challenger).sessions.close()
            champion = challenger if won else champion
        usual_ns = run_ns = self._median_ns(champion)
        if champion is not first:  # each step may have seemed faster by noise
            progress("the fastest against the options as they are")
            first = self._try(first.variant)
            race = self._race(champion, first)
            usual_ns, run_ns = race.run_ns / race.ratio, race.run_ns
            if not race.won:
                champion, run_ns = first, usual_ns
        lower = {*self.provider.precisions}.difference(ALLOWED[self.options.precision])
        for step in variants_of("precision", [each.value for each in Precision if each in lower]):
            if time.monotonic() < end:
                progress(f"{step}, to see its gain")
                other = self._try(champion.variant.joined(step), champion)
                other.sessions.close()
                self.trials.append(replace(other.trial, note=f"not allowed; {other.trial.note or 'faster'}"))
        error, device = champion.trial.error or 0.0, self.device
        times = (usual_ns, run_ns, error, self.tolerance, tuple(self.trials))
        tuning = Tuning(device, self.sizes, champion.variant, *times, kept=True)
        with contextlib.closing(open_slot(self.provider, device, self.graph, self.weights, self.options)) as slot:
            key = tunings.key_of(self.provider, device, slot.exported, self.options)
        kept = key is not None and tunings.keep(key, {**tuning.document(), "graph": tunings.digest_of(self.graph)})
        return tuning if kept else replace(tuning, kept=False)

    def _open(self, variant: Variant) -> tuple[SessionSet, CompiledGraph]:
        options = variant.of(self.options)
        if options.intra_op_threads is None:  # the second session of a process would get the cores that are left
            options = options.with_(intra_op_threads=budget().total)
        sessions = SessionSet(options)
        self.opened.callback(sessions.close)
        return sessions, sessions.compiled(self.graph, self.weights, self.device, self.rule)

    def _matters(self, step: Variant, options: CompileOptions) -> bool:
        """Return whether a step matters to the operators that the graph has with some options."""
        model = model_for(self.provider, self.graph, options) if step.operators else None
        return not step.operators or (model is not None and any(node.op_type in step.operators for node in model.nodes))

    def _try(self, variant: Variant, champion: _Entry | None = None) -> _Entry:
        """Open a variant, compare its results, and race it against the champion if it is right."""
        name, before, begun = str(variant), bytes_in_use(self.provider, self.device), time.perf_counter_ns()
        sessions, compiled = SessionSet(self.options), None
        try:
            sessions, compiled = self._open(variant)
            outputs = compiled.run(self.inputs)
            open_ns = time.perf_counter_ns() - begun
            self._warm(compiled)
            after = bytes_in_use(self.provider, self.device)
            error = max(map(_error, outputs, self.wanted), default=0.0)
            memory = None if before is None or after is None else max(after - before, 0)
            problem = disagreement(list(self.wanted), list(outputs), self.tolerance)
            trial = Trial(name, None, None, error, memory, open_ns, problem)
            entry = _Entry(variant, trial, compiled, sessions)
            if champion is None:
                return entry
            if problem:
                return entry._replace(trial=replace(trial, run_ns=self._median_ns(entry)))
            race = self._race(entry, champion)
            note = "" if race.won else "not faster"
            return entry._replace(trial=replace(trial, run_ns=race.run_ns, ratio=race.ratio, note=note))
        except Exception as err:
            if not is_device_failure(err):
                raise
            return _Entry(variant, Trial(name, note=str(err).splitlines()[0]), compiled, sessions)

    def _warm(self, compiled: CompiledGraph) -> None:
        end = time.monotonic() + _WARM_S
        for _ in range(_WARM_RUNS):
            compiled.run(self.inputs)
            if time.monotonic() > end:
                break

    def _race(self, challenger: _Entry, champion: _Entry) -> _Race:
        """Run two variants in turns, either of them first as often as the other."""
        mine: list[float] = []
        ratios: list[float] = []
        end = time.monotonic() + _RACE_S
        while len(ratios) < _FEWEST_ROUNDS or (time.monotonic() < end and len(ratios) < _MOST_ROUNDS):
            times = [self._median_ns(each, 1) for each in (challenger, champion)[:: 1 if len(ratios) % 2 else -1]]
            own, other = times if len(ratios) % 2 else times[::-1]
            mine.append(own)
            ratios.append(own / other)
            hopeless = len(ratios) == _TRIES and min(ratios) > _HOPELESS
            if hopeless or (len(ratios) >= _ENOUGH and (max(ratios) < WORTH or min(ratios) > 1)):
                break
        share = sum(ratio < 1 for ratio in ratios) / len(ratios)
        return _Race(statistics.median(mine), statistics.median(ratios), share)

    def _median_ns(self, entry: _Entry, runs: int = _FEWEST_ROUNDS) -> float:
        assert entry.compiled is not None  # noqa: S101  # it ran before
        return statistics.median(in_row(partial(entry.compiled.run, self.inputs), runs))


def _error(got: Any, want: Any) -> float:
    return relative_error(got, want) if isinstance(want, np.ndarray) else 0.0
