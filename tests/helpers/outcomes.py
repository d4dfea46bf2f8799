"""A log of what became of each test, for processes that may end in the middle of one.

`pytest --outcomes FILE` appends a line of JSON when a test begins and when it ends. Tests that ended in an earlier call
with the same file are not run again, and `--at-most N` leaves what is beyond the Nth for the next call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

__all__ = ["OutcomeLog", "read_outcomes"]


def read_outcomes(log: Path) -> list[dict[str, Any]]:
    """Return a record for each test that began: its id, its outcome or nothing, the reason, and seconds."""
    found: dict[str, dict[str, Any]] = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        entry = json.loads(line)
        found.setdefault(entry["test"], {"outcome": "", "why": "", "seconds": 0.0}).update(entry)
    return list(found.values())


class OutcomeLog:
    """The plugin behind `--outcomes`."""

    def __init__(self, path: Path, at_most: int = 0) -> None:
        self._path = path
        self._at_most = at_most
        self._now: dict[str, Any] = {}

    @pytest.hookimpl(trylast=True)  # after `--shard`
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what ended in an earlier call, and what is beyond the number that this one may run."""
        done = {entry["test"] for entry in read_outcomes(self._path) if entry["outcome"]}
        left = [item for item in items if item.nodeid not in done]
        items[:] = left[: self._at_most] if self._at_most else left

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins."""
        self._now = {"test": nodeid, "outcome": "passed", "why": "", "seconds": 0.0}
        self._write({"test": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of a test's setup, call and teardown."""
        self._now["seconds"] = round(self._now["seconds"] + report.duration, 2)
        if report.passed:
            return
        known = getattr(report, "wasxfail", None)
        if report.skipped:
            where = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
            outcome, why = ("skipped", where[2].removeprefix("Skipped: ")) if known is None else ("xfailed", known)
        else:
            outcome, why = "failed", f"{report.when}: {report.longreprtext}"
        if self._now["outcome"] != "failed":
            self._now.update(outcome=outcome, why=why)

    def pytest_runtest_logfinish(self) -> None:
        """Write what became of the test."""
        self._write(self._now)

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(entry) + "\n")
