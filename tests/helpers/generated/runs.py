"""Judges fresh or kept seeds on a device, in child processes: one that dies costs its own graph and no other."""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from op_tests.cases import DTYPES, runnable_kinds

from generated.graphs import made_of
from generated.judge import LEAVES, STUCK_S, Failure, kinds_in, shrunk
from generated.ways import WAYS

__all__ = ["KNOWN", "Report", "chosen", "kept_seeds", "known_reason", "never_equal", "run_cases"]

_DATA = Path(__file__).parents[2] / "data" / "generated"
_HELPERS = Path(__file__).parents[1]
_STACKS_CHARS = 6_000
_BATCH = 400
_CRASHES_SHRUNK = 3


@dataclass
class Report:
    """What a run found.

    Attributes:
        device: where they ran.
        graphs: the number of graphs.
        counts: verdict -> the number of cases; a case is one graph in one way at one size.
        failures: the cases that are wrong, crashed the process, or raised an untyped error.
        known: the reason -> how many failures have it.
        seconds: how long it took.
        covered: seed -> what ran equal in its graph: op kinds, dtypes and ways, each with what it is.
    """

    device: str
    graphs: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[Failure] = field(default_factory=list)
    known: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0
    covered: dict[int, set[tuple[str, str]]] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        """Add what another run found."""
        self.graphs += other.graphs
        self.counts += other.counts
        self.failures += other.failures
        self.known += other.known
        self.seconds += other.seconds
        self.covered |= other.covered

    @property
    def cases(self) -> int:
        """The number of cases."""
        return self.counts.total()

    def __str__(self) -> str:
        rate = self.cases / max(self.seconds, 1e-9)
        head = (
            f"{self.device}: {self.cases} cases of {self.graphs} graphs in {self.seconds:.0f} s, {rate:.0f} a second "
        )
        head += "(a case: one graph in one way at one size): "
        counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.counts.items()))
        known = [f"known, {count} times: {reason}" for reason, count in self.known.items()]
        covered = [_coverage(self.covered)] if self.graphs > 1 else []
        return "\n".join(
            [head + counts, *covered, *known, *(described(failure, self.device) for failure in self.failures)]
        )


def chosen(covered: Mapping[int, set[tuple[str, str]]]) -> list[int]:
    """Return few seeds that cover as much as all: each adds something to those before it."""
    left, found = set().union(*covered.values()), []
    while left:
        best = max(covered, key=lambda seed: len(covered[seed] & left))
        found.append(best)
        left -= covered[best]
    return sorted(found)


def never_equal(covered: Mapping[int, set[tuple[str, str]]]) -> dict[str, list[str]]:
    """Return the op kinds, dtypes and ways that never ran equal."""
    found: set[tuple[str, str]] = set().union(*covered.values())
    return {what: [name for name in names if (what, name) not in found] for what, names in _every().items()}


def _every() -> dict[str, list[str]]:
    kinds = [kind for kind in runnable_kinds() if kind not in LEAVES]
    return {"op kinds": kinds, "dtypes": [dtype.value for dtype in DTYPES], "ways": [*WAYS]}


def _coverage(covered: Mapping[int, set[tuple[str, str]]]) -> str:
    """Return how many op kinds, dtypes and ways ran equal, and which never did."""
    missed, texts = never_equal(covered), []
    for what, names in _every().items():
        missing = missed[what]
        never = f" (never: {', '.join(missing)})" if missing else ""
        texts.append(f"{len(names) - len(missing)} of {len(names)} {what}{never}")
    return f"ran equal: {', '.join(texts)}"


def _line(failure: Failure) -> str:
    return f"{failure.verdict} in the way {failure.way!r}, seed {failure.seed}: {failure.text}"


def described(failure: Failure, device: str) -> str:
    """Return a failure as text, with the command that shows it again."""
    one = json.dumps({"skip": failure.skip, "outputs": failure.outputs, "ways": [failure.way]})
    return (
        f"{failure.verdict} in the way {failure.way!r}, seed {failure.seed}, ops {', '.join(failure.kinds)}: "
        f"{failure.text}\n{failure.graph}\n"
        f"again: python scripts/generate_cases.py --device {device} --first {failure.seed} --graphs 1 --one '{one}'"
    )


def _known() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((_DATA / "known.toml").read_text(encoding="utf-8")).get("fault", [])
    return found


KNOWN = _known()
"""Failures that are known, each with a reason and what it is recognised by."""


def kept_seeds() -> list[int]:
    """Return the seeds whose graphs once failed."""
    found: list[int] = tomllib.loads((_DATA / "seeds.toml").read_text(encoding="utf-8"))["seeds"]
    return found


def known_reason(failure: Failure, device: str) -> str | None:
    """Return why a failure is known, or None."""
    for entry in KNOWN:
        if (
            device.partition(":")[0] in entry["devices"]
            and failure.verdict in entry["verdicts"]
            and failure.way in entry.get("ways", [failure.way])
            and set(entry.get("kinds", ())) <= set(failure.kinds)
            and re.search(entry.get("text", ""), failure.text)
        ):
            return str(entry["reason"])
    return None


def run_cases(
    device: str,
    seeds: Sequence[int],
    *,
    seconds: float = 1e9,
    one: dict[str, Any] | None = None,
    keep_sources: bool = False,
    most: int = len(WAYS),
    failing: Callable[[str], None] = lambda text: None,
) -> Report:
    """Judge the graphs of the seeds, each in `most` ways at most, until all are done or the time is over.

    `failing` is called with a line about each failure before it is made smaller, which can take a while.
    """
    report, at, begun = Report(device), 0, time.monotonic()
    options = [*(["--keep-sources"] if keep_sources else []), "--most", str(most)]
    options += ["--one", json.dumps(one)] if one else []
    while at < len(seeds) and time.monotonic() - begun < seconds:
        left = seconds - (time.monotonic() - begun)
        last: dict[str, Any] = {"seed": seeds[at]}
        said, stacks = time.monotonic(), ""
        for event in _events([device, json.dumps([*seeds[at : at + _BATCH]]), str(left), *options]):
            if "stacks" in event:
                stacks = event["stacks"]
                continue
            last, said = event, time.monotonic()
            if "failing" in event:
                failing(_line(Failure(**event["failing"])))
            if "failures" not in event:
                continue
            report.graphs += 1
            at += 1
            covered = {("op kinds", kind) for kind in event["kinds"]} | {("dtypes", kind) for kind in event["dtypes"]}
            equal = {("ways", way) for way, counts in event["ways"].items() if counts.get("equal")}
            report.covered[event["seed"]] = covered | equal if equal else set()
            for counts in event["ways"].values():
                report.counts.update(counts)
            for found in event["failures"]:
                _note(report, Failure(**{**found, "kinds": tuple(found["kinds"])}))
        if not last.get("ended"):
            way = last.get("way", "start")
            verdict = "unjudged" if way == "reference" else "CRASH"  # plain ONNX Runtime died of a changed model
            report.counts[verdict] += 1
            report.graphs += 1
            at += 1
            if verdict == "CRASH":
                stuck = time.monotonic() - said > STUCK_S - 1
                until = begun + seconds if report.counts["CRASH"] <= _CRASHES_SHRUNK else 0.0
                failing(_line(Failure("CRASH", last["seed"], way, "stuck" if stuck else "the process died")))
                failure = _crash(device, last["seed"], way, options, until=until, stuck=stuck)
                _note(report, replace(failure, text=f"{failure.text}\n{stacks}".rstrip()))
    report.seconds = time.monotonic() - begun
    return report


def _note(report: Report, failure: Failure) -> None:
    reason = known_reason(failure, report.device)
    if reason is None:
        report.failures.append(failure)
    else:
        report.known[reason] += 1


def _crash(device: str, seed: int, way: str, options: Sequence[str], *, until: float, stuck: bool) -> Failure:
    """Return the death of a process as a failure, on the smallest graph that is found until a time."""

    def fails(skip: tuple[int, ...], outputs: tuple[int, ...] | None) -> bool:
        if (skip or outputs) and time.monotonic() > until:
            return False
        one = json.dumps({"skip": skip, "outputs": outputs, "ways": [way]})
        rest = [option for option in options if option == "--keep-sources"]
        return not any(e.get("ended") for e in _events([device, json.dumps([seed]), "60", *rest, "--one", one]))

    if way == "import":  # so it would be here
        return Failure("CRASH", seed, way, "the process died")
    if stuck:
        return Failure("CRASH", seed, way, f"the process did not answer within {STUCK_S:.0f} s", (), str(made_of(seed)))
    alone = way not in ("start", "close") and fails((), None)
    skip, outputs = shrunk(fails, seed) if alone and time.monotonic() < until else ((), None)
    made = made_of(seed, skip, outputs)
    text = "the process died" if alone else "the process died, and not in this way alone"
    return Failure("CRASH", seed, way, text, tuple(sorted(kinds_in(made))), str(made), skip, outputs)


def _events(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what a child says, last the stacks of its threads if it was stuck or died; what it logs is dropped."""
    with (
        tempfile.TemporaryDirectory() as cache,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
    ):
        path = os.pathsep.join([str(_HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1", "RLX_CACHE_DIR": cache}
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "generated.child", *arguments]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8", env=environment
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                event = json.loads(line) if line.endswith("\n") else {}
                if "broken" in event:
                    raise RuntimeError(f"the generator is at fault:\n{event['broken']}")
                if event:
                    yield event
            child.wait()
            log.seek(0)
            written = log.read()
            at = max(map(written.rfind, ("Timeout (", "Fatal Python error")))
            if at >= 0:
                yield {"stacks": written[max(0, at - _STACKS_CHARS // 4) : at + _STACKS_CHARS]}
            elif child.returncode:
                yield {"stacks": f"exit status {child.returncode}: {written[-_STACKS_CHARS:]}"}
        finally:
            child.stdout.close()
            child.kill()
            child.wait()
