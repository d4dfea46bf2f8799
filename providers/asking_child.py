"""The child process in which providers that compile are asked, since some nodes end the process (QNN 2.7.0).

It runs `answer_tasks` of `asking.py`: it reads tasks from standard input, one JSON line each, writes a line per answer
to standard output, and is ended after `_IDLE_S` without a task. When it dies, its exit code is the answer to the
question it was at, and another child continues.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlx_ort.providers.hardware import NO_WINDOW

_IDLE_S = 10.0  # of a child before it is ended: starting one takes half a second
_START_S = 30.0  # for importing ONNX Runtime and a provider's libraries from a slow disk

_log = logging.getLogger(__name__)


def ask_in_child(
    title: str, task: Mapping[str, Any], sheets: Sequence[Sequence[str]], budget_s: float
) -> dict[str, str]:
    """Return the answer to each question by its key; `sheets` has the key and the child's texts of each."""
    global _timer
    answers: dict[str, str] = {}
    left = list(sheets)
    with _child_lock:
        deadline = time.monotonic() + budget_s
        while left and time.monotonic() < deadline:
            child = _child()
            line = json.dumps({**task, "sheets": left}).encode() + b"\n"
            verdicts, ended = child.asked(line, len(left), deadline)
            answers.update(verdicts)
            left = left[len(verdicts) :]
            if not left:
                break
            child.end()
            if ended is None:
                break  # out of time, or the child cannot be used at all
            key = left.pop(0)[0]
            answers[key] = f"asking about it ended the process of {title} (exit code {ended})"
            _log.warning("%s: a question ended its process with exit code %s", title, ended)
        _timer = threading.Timer(_IDLE_S, _end_child)
        _timer.daemon = True
        _timer.start()
    return {key: answer for key, answer in answers.items() if answer}


class _Child:
    """A process that answers questions, task after task, until its input ends. Only its parent uses and ends it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # `-P` keeps the current folder from the path, so that no package that lies there is executed.
        command = [sys.executable, "-P", "-c", "from rlx_ort.providers.asking import answer_tasks; answer_tasks()"]
        self.environment = environment
        self.parent = os.getpid()
        self._patience_s = _START_S
        self._process = subprocess.Popen(  # noqa: S603  # this Python with a fixed command
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            creationflags=NO_WINDOW,
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self.parent == os.getpid() and self._process.poll() is None

    def asked(self, task: bytes, count: int, deadline: float) -> tuple[dict[str, str], int | None]:
        """Return its answers in order, and its exit code; None if it was too slow or did not start."""
        writer = threading.Thread(target=_write, args=(self._process.stdin, task), daemon=True)
        writer.start()
        answers: dict[str, str] = {}
        patience_s = max(deadline - time.monotonic(), 0.1) + self._patience_s
        try:
            while len(answers) < count:
                line = self._lines.get(timeout=patience_s)
                if not line:
                    return answers, self._process.wait(timeout=_START_S)
                self._patience_s = 0.0
                if line.startswith(b"{"):
                    document = json.loads(line)
                    if "key" in document:
                        answers[document["key"]] = document["answer"]
                patience_s = max(deadline - time.monotonic(), 0.1)
        except (queue.Empty, subprocess.TimeoutExpired):
            return answers, None
        return answers, 0

    def end(self) -> None:
        if self.parent != os.getpid():
            return
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes


_child_lock = threading.Lock()
_current: _Child | None = None
_timer: threading.Timer | None = None


def _child() -> _Child:
    """Return the child, restarted if the settings changed."""
    global _current
    if _timer is not None:
        _timer.cancel()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_import_path()), "PYTHONUTF8": "1"}
    if _current is None or not _current.alive or _read_by_us(_current.environment) != _read_by_us(environment):
        if _current is not None:
            _current.end()
        _current = _Child(environment)
    return _current


def _import_path() -> list[str]:
    """Return this process's import path; the current folder is in it only if this package was imported from there."""
    home = str(Path(__file__).resolve().parents[2])
    here = str(Path.cwd()) if "" in sys.path else ""
    return [path or here for path in sys.path if path or os.path.realpath(here) == home]


def _read_by_us(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("RLX_") or name == "PYTHONPATH"}


@atexit.register
def _end_child() -> None:
    global _current
    with _child_lock:
        child, _current = _current, None
        if child is not None:
            child.end()


def _write(pipe: IO[bytes], data: bytes) -> None:
    try:
        pipe.write(data)
        pipe.flush()
    except (OSError, ValueError):
        return  # the child is gone; its exit code is read later


def _read(pipe: IO[bytes], lines: queue.Queue[bytes]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(b"")
