"""`tune` finds the fastest variant that is right, and later openings take it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fault_provider import Doubling

from rlx_ort import CompileOptions, Device, EngineError, Graph, GraphDevices, open_package, timing, tuning
from rlx_ort.deploy.create import Recipe, create_package
from rlx_ort.execution import tunings
from rlx_ort.options.compile_options import OptimizationLevel
from rlx_ort.options.variant import Variant, variants_of
from rlx_ort.providers import registry
from rlx_ort.providers.base import EngineSession, SessionRequest
from rlx_ort.providers.null import NullSession

X = {"x": np.arange(4, dtype=np.float32)}
USUAL_NS, FAST_NS, FASTEST_NS = 6_000_000, 3_000_000, 1_000_000


class Tunable(Doubling):
    """Doubles; faster with 62 threads, fastest and wrong by 1 % without spinning, and refused with 63."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 1
        self.clock_ns = 0
        self.opened: list[CompileOptions] = []

    def question_scope(self, device: Device) -> str | None:
        """Return a scope that changes with the version."""
        return f"tunable {self.version}"

    def variants(self, device: Device, options: CompileOptions) -> Sequence[Variant]:
        """Return four variants, of which one is of no use for the graph."""
        threads = variants_of("intra_op_threads", [63, 62])
        return (*threads, *variants_of("spinning", [False]), *variants_of("sharing", ["raw"], ["Conv"]))

    def run_ns(self, options: CompileOptions) -> int:
        """Return the time of a run, which depends on the options."""
        many = options.intra_op_threads == 62
        return FASTEST_NS if options.spinning is False else FAST_NS if many else USUAL_NS

    def open(self, request: SessionRequest) -> EngineSession:
        """Open a session."""
        if request.options.intra_op_threads == 63:
            raise EngineError("63 are too many")
        self.opened.append(request.options)
        super().open(request)
        return _Session(self, request)


class _Session(NullSession):
    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        super().run(output_names, feeds)
        options = self.request.options
        self.provider.clock_ns += self.provider.run_ns(options)
        (x,) = feeds.values()
        return [x * np.float32(2.02 if options.spinning is False else 2)]


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tunable:
    """Return the provider, which is the only one, with an empty cache folder and a clock that its runs move."""
    provider = Tunable()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter_ns=lambda: provider.clock_ns))
    known = registry.ProviderRegistry((provider,))
    monkeypatch.setattr(registry, "default_registry", functools.cache(lambda: known))
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_RACE_S", 0.1)
    return provider


def graph(name: str = "doubled") -> Graph:
    """Return a graph of one Add."""
    made = Graph(name)
    x = made.input("x", [4])
    made.outputs = [x + x]
    return made


def opened_by(provider: Tunable, runner: GraphDevices) -> CompileOptions:
    """Return the options of the session that a runner opens."""
    runner.run("cpu", X)
    return provider.opened[-1]


def test_the_fastest_that_is_right_wins(provider: Tunable) -> None:
    """One that is off by 1 % is faster still, and not taken."""
    outcome = GraphDevices(graph()).tune(X, "cpu")
    assert outcome.variant.changes == {"intra_op_threads": 62}
    assert outcome.error == 0
    outcomes = {trial.variant: trial.note for trial in outcome.trials}
    assert outcomes["intra_op_threads=62"] == ""
    assert "0.01 of the largest value" in outcomes["intra_op_threads=62, spinning=False"]


def test_one_that_is_faster_only_with_a_later_one_is_found(provider: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layout of convolutions may be with another precision."""
    steps = (*variants_of("intra_op_threads", [62]), *variants_of("optimization", ["extended"]))

    def run_ns(options: CompileOptions) -> int:
        many, extended = options.intra_op_threads == 62, options.optimization is OptimizationLevel.EXTENDED
        return {(True, False): 2 * USUAL_NS, (False, True): FAST_NS, (True, True): FASTEST_NS}.get(
            (many, extended), USUAL_NS
        )

    monkeypatch.setattr(provider, "variants", lambda device, options: steps)
    monkeypatch.setattr(provider, "run_ns", run_ns)
    outcome = GraphDevices(graph()).tune(X, "cpu")
    assert outcome.variant.changes == {"intra_op_threads": 62, "optimization": "extended"}
    assert outcome.run_ns == FASTEST_NS


def test_one_that_cannot_be_opened_is_a_row(provider: Tunable) -> None:
    """With the reason."""
    (row,) = [trial for trial in GraphDevices(graph()).tune(X, "cpu").trials if trial.variant == "intra_op_threads=63"]
    assert row.note == "63 are too many"
    assert row.run_ns is None


def test_variants_for_other_operators_are_not_tried(provider: Tunable) -> None:
    """The graph has no convolution."""
    assert not any("sharing" in trial.variant for trial in GraphDevices(graph()).tune(X, "cpu").trials)


def test_a_tolerance_of_the_caller_decides(provider: Tunable) -> None:
    """An error of 1 % is allowed."""
    outcome = GraphDevices(graph()).tune(X, "cpu", tolerance=0.02)
    assert outcome.variant.changes == {"intra_op_threads": 62, "spinning": False}
    assert outcome.error == pytest.approx(0.01, rel=1e-3)


def test_without_time_options_stay_as_they_are(provider: Tunable) -> None:
    """The variants are rows all the same."""
    outcome = GraphDevices(graph()).tune(X, "cpu", budget_s=0)
    assert not outcome.variant.changes
    assert {trial.note for trial in outcome.trials} == {"not tried, for lack of time"}


def test_the_runner_takes_the_winner(provider: Tunable) -> None:
    """Its sessions are opened anew."""
    runner = GraphDevices(graph())
    runner.run("cpu", X)
    runner.tune(X, "cpu")
    assert opened_by(provider, runner).intra_op_threads == 62
    assert str(runner.compile("cpu").variant) == "intra_op_threads=62"


def test_later_runners_take_the_winner(provider: Tunable) -> None:
    """Of a graph that is alike, with the same options."""
    GraphDevices(graph()).tune(X, "cpu")
    assert opened_by(provider, GraphDevices(graph())).intra_op_threads == 62


@pytest.mark.parametrize(
    "options",
    [CompileOptions(tuned=False), CompileOptions(intra_op_threads=1), CompileOptions(session_config={"a": "b"})],
    ids=["not wanted", "threads are given", "other options"],
)
def test_other_options_are_not_those_of_the_winner(provider: Tunable, options: CompileOptions) -> None:
    """They stay as the caller gave them."""
    GraphDevices(graph()).tune(X, "cpu")
    assert opened_by(provider, GraphDevices(graph(), options=options)) == dataclasses.replace(options)


def test_another_graph_or_version_takes_nothing(provider: Tunable) -> None:
    """A record holds for what was measured."""
    GraphDevices(graph()).tune(X, "cpu")
    other = Graph("doubled")
    other.outputs = [other.neg(other.input("x", [4]))]
    assert opened_by(provider, GraphDevices(other)).intra_op_threads is None
    provider.version = 2
    assert opened_by(provider, GraphDevices(graph())).intra_op_threads is None


@pytest.mark.parametrize(
    "text", ["{", '{"schema": 1}', '{"schema": 1, "variant": {"precision": "f99"}}', '{"schema": 9}']
)
def test_a_damaged_record_is_left_out(provider: Tunable, tmp_path: Path, text: str) -> None:
    """Options stay as they are."""
    GraphDevices(graph()).tune(X, "cpu")
    (record,) = (tmp_path / "tunings").glob("*.json")
    record.write_text(text, encoding="utf-8")
    assert opened_by(provider, GraphDevices(graph())).intra_op_threads is None


@pytest.fixture
def carried(provider: Tunable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Return a function that tunes, packs the record with some changes, and gives the package, on another machine."""

    def pack(changes: dict[str, Any]) -> Path:
        made = graph()
        GraphDevices(made).tune(X, "cpu")
        records = {key: {**record, **changes} for key, record in tunings.of_graph(made).items()}
        create_package(made, tmp_path / "p.rlx", Recipe(tunings=records))
        monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "other"))
        return tmp_path / "p.rlx"

    monkeypatch.setattr(tunings, "_carried", {})
    return pack


def test_a_package_carries_the_winner(provider: Tunable, carried: Callable[[dict[str, Any]], Path]) -> None:
    """To machines of the same hardware and versions; others do without."""
    package = carried({})
    with open_package(package) as runner:
        assert opened_by(provider, runner).intra_op_threads == 62
    provider.version = 2
    with open_package(package) as runner:
        assert opened_by(provider, runner).intra_op_threads is None


@pytest.mark.parametrize(
    "variant",
    [
        {"custom_op_libraries": ["/evil.so"]},
        {"intra_op_threads": 999},
        {"precision": "f16"},
        {"profile_prefix": "/tmp/p"},
    ],
    ids=lambda variant: next(iter(variant)),
)
def test_a_package_brings_no_options_that_the_provider_does_not_offer(
    provider: Tunable, carried: Callable[[dict[str, Any]], Path], variant: dict[str, Any]
) -> None:
    """A library would be native code; they are left out, all of the variant."""
    with open_package(carried({"variant": {"spinning": False, **variant}})) as runner:
        options = opened_by(provider, runner)
    assert options == CompileOptions(cache=options.cache, sharing=options.sharing)


def test_a_folder_that_cannot_be_written_is_no_error(provider: Tunable, tmp_path: Path) -> None:
    """The outcome says that it is not kept."""
    (tmp_path / "tunings").write_text("in the way", encoding="utf-8")
    assert not GraphDevices(graph()).tune(X, "cpu").kept


def test_options_of_the_caller_stay_in_a_variant() -> None:
    """Entries of mappings are added to the caller's."""
    given = CompileOptions(intra_op_threads=1, provider_options={"a": "1"})
    variant = Variant({"intra_op_threads": 62, "provider_options": {"a": "2", "b": "3"}, "precision": "f16"})
    changed = variant.of(given)
    assert changed.intra_op_threads == 1
    assert dict(changed.provider_options) == {"a": "1", "b": "3"}
    assert changed.precision.value == "f16"
