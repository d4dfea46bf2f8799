"""Judges damaged models in child processes with limits on time and memory, and counts what came of them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

import psutil

__all__ = ["LIMIT_S", "Task", "Verdict", "judged", "sample"]

Task: TypeAlias = tuple[str, str, int]
"""("file", a kind, a number) or ("operator", "", a number)."""

LIMIT_S = 20.0
"""Seconds for one stage of one model; most take milliseconds."""
_START_S = 120.0
_ADDRESSES_BYTES = 8 << 30
_RESIDENT_BYTES = 1 << 30
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one model.

    Attributes:
        task: which model.
        title: its kind or operator.
        outcome: `typed error`, `answer`, `opened` (it could not be fed), `untyped error`, `crash`, `hang` or `memory`;
            the last three with the stage at which it happened.
        error: the message.
        plain: what plain ONNX Runtime does: `refuses: ...`, `opens`, `same`, `differs: ...`, or how it ended.
    """

    task: Task
    title: str
    outcome: str
    error: str
    plain: str

    @property
    def is_defect(self) -> bool:
        """Whether this must not happen, whatever the model is; it may ask for outputs of gigabytes."""
        good = ("typed error", "answer", "opened", "memory at run")
        return self.outcome not in good or self.plain.startswith("differs")

    def __str__(self) -> str:
        return f"{self.task[0]} {self.title} {self.task[2]}: {self.outcome}; {self.error[:300]}; plain {self.plain}"


def judged(tasks: Iterable[Task], children: int = 2) -> Iterator[Verdict]:
    """Yield the verdict on each task, in any order."""
    waiting: queue.Queue[Task] = queue.Queue()
    for task in tasks:
        waiting.put(task)
    count = waiting.qsize()
    done: queue.Queue[Verdict | BaseException] = queue.Queue()
    stop = threading.Event()
    threads = [threading.Thread(target=_work, args=(waiting, done, stop)) for _ in range(children)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(count):
            verdict = done.get()
            if isinstance(verdict, BaseException):
                raise verdict
            yield verdict
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _work(waiting: queue.Queue[Task], done: queue.Queue[Verdict | BaseException], stop: threading.Event) -> None:
    child: _Child | None = None
    try:
        while not stop.is_set():
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            if child is None:
                child = _Child()
            verdict = child.judge(task)
            done.put(verdict)
            if not child.alive:
                child.end()
                child = None
    except BaseException as err:
        done.put(err)
    finally:
        if child is not None:
            child.end()


class _Child:
    """A process that judges one model after the other."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "damaged_models.judge", str(_ADDRESSES_BYTES)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()
        ready, _ = self._line(_START_S)
        if ready is None:
            self.end()
            raise RuntimeError(f"the process that judges models did not start: exit code {self._process.returncode}")

    @property
    def alive(self) -> bool:
        """Whether another model can be judged."""
        return self._process.poll() is None

    def judge(self, task: Task) -> Verdict:
        """Return the verdict on a model; the process is gone afterwards if the model ended it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()
        stage, facts = "start", {"title": task[1], "outcome": "", "error": "", "plain": ""}
        while True:
            line, reason = self._line(_START_S if stage == "start" else LIMIT_S)
            if line is None:
                self._process.kill()
                code = self._process.wait()
                ended = f"crash ({code})" if reason == "crash" else reason
                if stage == "plain":
                    return Verdict(task, facts["title"], facts["outcome"], facts["error"], f"ends in a {ended}")
                return Verdict(task, facts["title"], f"{ended} at {stage}", "", "")
            facts.update({key: value for key, value in line.items() if key != "stage"})
            stage = line["stage"]
            if stage == "done":
                return Verdict(task, **facts)

    def _line(self, limit_s: float) -> tuple[dict[str, Any] | None, str]:
        """Return the next line of the process, or None and why there is none: crash, hang or memory."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                line = self._lines.get(timeout=_LOOK_S)
            except queue.Empty:
                try:
                    if psutil.Process(self._process.pid).memory_info().rss > _RESIDENT_BYTES:
                        return None, "memory"
                except psutil.Error:
                    return None, "crash"
                continue
            return (json.loads(line), "") if line else (None, "crash")
        return None, "hang"

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue


def _read(pipe: IO[bytes], lines: queue.Queue[bytes]) -> None:
    for line in pipe:
        if line.startswith(b"{"):
            lines.put(line)
    lines.put(b"")


def sample(kinds: Sequence[str], files: int, operators: int, start: int = 0) -> list[Task]:
    """Return tasks: `files` numbers of each kind and `operators` operators, from a number on."""
    tasks: list[Task] = [("file", kind, number) for kind in kinds for number in range(start, start + files)]
    return tasks + [("operator", "", number) for number in range(start, start + operators)]
