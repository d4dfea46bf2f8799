"""A runner and its compiled graph in random orders of calls, against the parameters that were set last."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlx_ort import DevicePolicy, Graph, GraphDevices, RunError

CPU = DevicePolicy.only("cpu")
NUMBERS = st.integers(-8, 8)  # exact in f32, products and sums too
ROWS = st.integers(0, 3)


class RunnerMachine(RuleBasedStateMachine):
    """The model: `x * w + b` of the present `w` and `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = 1, 0
        graph = Graph("state")
        x = graph.input("x", ["n", 2])
        w, b = (graph.param(name, [2], data=self.row(value)) for name, value in (("w", 1), ("b", 0)))
        graph.outputs = [x * w + b]
        self.runner = GraphDevices(graph, CPU)
        self.compiled = self.runner.compile("cpu")

    def row(self, value: int) -> np.ndarray:
        """Return two equal elements."""
        return np.full(2, value, np.float32)

    def check(self, found: np.ndarray, x: np.ndarray) -> None:
        """Compare with the model."""
        np.testing.assert_array_equal(found, x * self.w + self.b)

    @rule(way=st.sampled_from(["run", "run_resolved", "run_fastest", "run_chosen"]), value=NUMBERS, rows=ROWS)
    def run(self, way: str, value: int, rows: int) -> None:
        """Run the runner."""
        x = np.full((rows, 2), value, np.float32)
        found = self.runner.run("cpu", {"x": x}) if way == "run" else getattr(self.runner, way)({"x": x})
        self.check((found[1] if way == "run_chosen" else found)[0], x)

    @rule(way=st.sampled_from(["run", "run_read_outputs", "run_slots", "run_raw", "commit"]), value=NUMBERS, rows=ROWS)
    @precondition(lambda self: not self.compiled.closed)
    def run_compiled(self, way: str, value: int, rows: int) -> None:
        """Run the compiled graph."""
        x = np.full((rows, 2), value, np.float32)
        if way == "commit":
            self.compiled.commit_no_wait({"x": x})
            self.compiled.sync_pending()
            return
        given = [x] if way == "run_slots" else {"x": x}
        self.check(np.array(getattr(self.compiled, way)(given)[0]).reshape(x.shape), x)

    @rule(name=st.sampled_from("wb"), value=NUMBERS, by_compiled=st.booleans())
    def set_param(self, name: str, value: int, by_compiled: bool) -> None:
        """Set one parameter."""
        (self.compiled if by_compiled else self.runner).set_param(name, self.row(value))
        setattr(self, name, value)

    @rule(w=NUMBERS, b=NUMBERS)
    def update(self, w: int, b: int) -> None:
        """Set both together."""
        with self.runner.update_params():
            self.runner.set_param("w", self.row(w))
            self.runner.set_param("b", self.row(b))
        self.w, self.b = w, b

    @rule(how=st.sampled_from(["invalidate_cache", "close", "set_policy"]))
    def forget(self, how: str) -> None:
        """Close the sessions."""
        self.runner.set_policy(CPU) if how == "set_policy" else getattr(self.runner, how)()

    @rule()
    def close_compiled(self) -> None:
        """Close the compiled graph; it refuses to run."""
        self.compiled.close()
        with pytest.raises(RunError):
            self.compiled.run({"x": np.ones((1, 2), np.float32)})

    @rule()
    def compile(self) -> None:
        """Compile again, or get the same."""
        self.compiled = self.runner.compile("cpu")

    @rule(make=st.sampled_from([copy.copy, copy.deepcopy, pickle.dumps]))
    def copy(self, make: object) -> None:
        """Copies are refused."""
        for each in (self.runner, self.compiled):
            with pytest.raises(RunError):
                make(each)  # type: ignore[operator]

    @rule(value=NUMBERS)
    def run_in_threads(self, value: int) -> None:
        """Run in threads while this one forgets the sessions."""
        x = np.full((2, 2), value, np.float32)
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(self.runner.run_resolved, {"x": x}) for _ in range(4)]
            self.runner.invalidate_cache()
            for each in runs:
                self.check(each.result(10)[0], x)

    @invariant()
    def takes_the_graph(self) -> None:
        """The CPU is never noted as refusing."""
        assert self.runner.devices()

    def teardown(self) -> None:
        """Close the sessions."""
        self.runner.close()


TestRunner = RunnerMachine.TestCase
TestRunner.settings = settings(
    max_examples=12, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
