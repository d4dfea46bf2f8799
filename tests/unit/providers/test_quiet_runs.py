"""When runs wait for the device, and what is left to be freed before a session goes; with a session that counts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from rlx_ort.providers import quiet_runs
from rlx_ort.providers.quiet_runs import RUNS_A_WAIT, TIMED_RUNS, QuietRuns

SHARED, QUIET, LAST = "waits", "does not wait", "the last run"
SMALL = {"x": np.zeros(4, np.float32)}


class Session:
    """Notes the options of its runs; each one that does not wait leaves a buffer, which the next that waits frees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.buffers = 0
        self.failure = ""

    def run(self, names: Any, feeds: Any, options: Any) -> list[Any]:
        """Run."""
        self.seen.append(options)
        if self.failure:
            raise RuntimeError(self.failure)
        self.buffers = self.buffers + 1 if options == QUIET else 0
        return [feeds["x"]]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return a session whose runs are short, whatever the clock says."""
    monkeypatch.setattr(quiet_runs, "SHORT_NS", 1 << 60)
    return Session()


def made(session: Session) -> QuietRuns:
    """Return the runs of a session."""
    return QuietRuns(session.run, SHARED, QUIET, lambda: LAST, (RuntimeError,))


def run(quiet: QuietRuns, times: int, feeds: Any = SMALL, options: Any = SHARED) -> None:
    """Run some times."""
    for _ in range(times):
        quiet.run(["y"], feeds, options)


def test_short_runs_do_not_wait_but_one_in_some(session: Session) -> None:
    """The first few are timed; then buffers add up to a number and are freed."""
    quiet = made(session)
    run(quiet, TIMED_RUNS + 2 * (RUNS_A_WAIT + 1))
    wanted = [SHARED] * TIMED_RUNS + ([QUIET] * RUNS_A_WAIT + [SHARED]) * 2
    assert session.seen == wanted


def test_the_last_run_frees_what_others_left(session: Session) -> None:
    """A session with buffers would abort the process when it is destroyed."""
    quiet = made(session)
    run(quiet, TIMED_RUNS + 5)
    assert session.buffers == 5
    assert quiet.end()
    assert (session.seen[-1], session.buffers) == (LAST, 0)


def test_nothing_is_run_where_nothing_is_left(session: Session) -> None:
    """Closing a session that did not run costs nothing."""
    quiet = made(session)
    run(quiet, TIMED_RUNS)
    assert quiet.end()
    assert session.seen == [SHARED] * TIMED_RUNS


def test_a_last_run_that_fails_is_reported(session: Session) -> None:
    """The session must be kept then."""
    quiet = made(session)
    run(quiet, TIMED_RUNS + 1)
    session.failure = "out of memory"
    assert not quiet.end()
    assert not quiet.end()


def test_a_run_that_failed_leaves_something_to_free(session: Session) -> None:
    """ONNX Runtime frees nothing at the end of a run that fails, even of one that waits."""
    quiet = made(session)
    run(quiet, TIMED_RUNS)
    session.failure = "stopped"
    with pytest.raises(RuntimeError):
        run(quiet, 1, options="of the caller")
    session.failure = ""
    assert quiet.end()
    assert session.seen[-1] == LAST


def test_runs_with_options_of_their_own_wait(session: Session) -> None:
    """They may be stopped."""
    quiet = made(session)
    run(quiet, TIMED_RUNS)
    run(quiet, 1, options="of the caller")
    assert session.seen[-1] == "of the caller"


@pytest.mark.parametrize("limit", ["SHORT_NS", "MOST_BYTES"])
def test_long_runs_and_large_inputs_wait(session: Session, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """The wait is nothing to them, and a last run would be long, or its inputs kept in vain."""
    monkeypatch.setattr(quiet_runs, limit, 0)
    quiet = made(session)
    run(quiet, TIMED_RUNS + 5)
    assert set(session.seen) == {SHARED}
    assert quiet.over


def test_all_runs_wait_once_two_have_met() -> None:
    """Each run in flight has buffers of its own, of which a last run finds one set only."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Session):
        def run(self, names: Any, feeds: Any, options: Any) -> list[Any]:
            found = super().run(names, feeds, options)
            if options == QUIET:
                inside.set()
                assert go_on.wait(10)
            return found

    session = Slow()
    quiet = made(session)
    run(quiet, TIMED_RUNS)
    assert not quiet.over
    threads = [threading.Thread(target=run, args=(quiet, 1)) for _ in range(2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert session.seen[-1] == QUIET  # the second waits for the first
    go_on.set()
    for thread in threads:
        thread.join()
    run(quiet, 2)
    assert session.seen[TIMED_RUNS:] == [QUIET, LAST, SHARED, SHARED, SHARED]
    assert session.buffers == 0
