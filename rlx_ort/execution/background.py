"""The calls of a compiled graph that do not wait for a run, or wait for many."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx_ort.execution.inputs import InputPlan, ResidentFeeds
from rlx_ort.execution.pipeline import Pipeline, run_all, snapshot
from rlx_ort.execution.run_async import run_in_background

if TYPE_CHECKING:
    from rlx_ort.execution.engine_slot import Engine, EngineSlot

__all__ = ["BackgroundRuns"]


class BackgroundRuns(abc.ABC):
    """Committed, pipelined and awaited runs."""

    _inputs: InputPlan
    _last: tuple[list[int] | None, Sequence[Any]]
    _output_names: list[str]
    _pipeline: Pipeline
    _plain: bool
    _slot: EngineSlot

    @abc.abstractmethod
    def run(self, inputs: Mapping[str, Any] | None = None) -> list[Any]:
        """Run once and return the outputs."""

    @abc.abstractmethod
    def _engine(self) -> Engine:
        """Return an engine with the newest weights."""

    @abc.abstractmethod
    def _indices(self, indices: Sequence[int] | None) -> Sequence[int]:
        """Return the indices of outputs that were asked for, None for all, if there are such outputs."""

    @abc.abstractmethod
    def _run_now(self, inputs: Mapping[str, Any], indices: Sequence[int], *, on_device: bool = False) -> list[Any]:
        """Run with handles and the extent as they are, and return the listed outputs."""

    def commit_no_wait(
        self, inputs: Mapping[str, Any], outputs: Sequence[int] | None = (), *, on_device: bool = False
    ) -> None:
        """Run in the background, after the runs committed before; handles are fed.

        Arrays are copied, so they may be written to at once. Errors of the run come from `sync_pending`, and so do the
        listed outputs, which are kept until then; None means all, and by default they are dropped.

        Args:
            inputs: as in `run`.
            outputs: the indices of the outputs that `sync_pending` is to return.
            on_device: whether these are to stay on the device, as `DeviceTensor`, and not be copied to the host.

        Raises:
            InputError: an index names no output.
        """
        ready, wanted = snapshot(inputs), self._indices(outputs)
        self._pipeline.commit(lambda: self._run_now(ready, wanted, on_device=on_device))

    def sync_pending(self) -> list[list[Any]]:
        """Wait for the committed runs and return the outputs of those that were asked for some, in order.

        When a run failed, the first error is raised, and the outputs of the others are dropped.
        """
        return self._pipeline.sync()

    def run_pipelined(self, inputs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        """Run once for each set of inputs and return the outputs of each, equal to those of runs one by one.

        Runs that take long enough overlap, unless the graph has handles or the device runs one session at a time.

        Raises:
            InputError: an input is wrong.
            EngineError: a run failed.
        """
        results = run_all(self.run, inputs, overlap=self._plain and not self._slot.provider.exclusive)
        if results:
            self._note(results[-1].copy())  # those that overlap may end in another order
        return results

    async def run_async(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Run in a thread and return the outputs as `run` does; cancelling the task stops the run at its next node.

        Arrays are not copied: leave them alone until the run has ended. A run that uses handles goes on to its end,
        so that the handles are whole.

        Raises:
            InputError: an input is wrong.
            EngineError: the run failed.
        """
        return await run_in_background(*self.stoppable(inputs))

    def stoppable(self, inputs: Mapping[str, Any]) -> tuple[Callable[[], list[Any]], Callable[[], None]]:
        """Return a run to be called once, and what stops it at its next node, or before it begins.

        A run that uses handles, or inputs on a device, is not stopped.

        Raises:
            InputError: an input is wrong.
            ParamError: a parameter is not set.
        """
        if not self._plain:
            return lambda: self.run(inputs), _nothing
        engine = self._engine()
        feeds = self._inputs.feeds(inputs, engine)
        names = self._output_names
        if feeds.__class__ is ResidentFeeds:
            return lambda: self._note(engine.binder.run(feeds, names, ())), _nothing
        once = engine.binder.stoppable()
        return lambda: self._note(once.run(names, feeds)), once.stop

    def _note(self, outputs: list[Any]) -> list[Any]:
        """Keep a run's outputs as those of the last one, and return a list of them for the caller."""
        self._last = (None, outputs)
        return outputs.copy()


def _nothing() -> None:
    """Do nothing, where a run cannot be stopped."""
