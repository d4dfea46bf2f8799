"""A process that judges the graphs of some seeds.

It says on stdout what it begins, so that its parent knows what ended it.

python -m generated.child DEVICE SEEDS SECONDS [--keep-sources] [--most WAYS] [--one JSON]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
import traceback
from dataclasses import asdict
from typing import Any, TextIO

from generated.graphs import quiet
from generated.judge import STUCK_S, Failure, judged, shrunk
from generated.ways import WAYS
from rlx_ort.device import Device
from rlx_ort.providers.engine import lent_outputs, replays

_SHRUNK_AT_MOST = 6
LENT_BYTES = replays.LENT_BYTES
_LATE_S = 10.0  # beyond its time, for a failure to be made smaller


def main(out: TextIO) -> None:
    """Judge the seeds and write a line of JSON for each event."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("seeds", type=json.loads)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--keep-sources", action="store_true")
    parser.add_argument("--most", type=int, default=len(WAYS))
    parser.add_argument("--one", type=json.loads, default={})
    given = parser.parse_args()
    device, end = Device(given.device), time.monotonic() + given.seconds
    with quiet():
        left = _SHRUNK_AT_MOST
        for seed in given.seeds:
            if time.monotonic() > end:
                break
            # On CUDA large outputs are in lent memory, and no graph has large ones: in every second one all are large.
            lent_outputs.LENT_BYTES = replays.LENT_BYTES = 1 if seed % 2 else LENT_BYTES

            def starting(way: str, seed: int = seed) -> None:
                faulthandler.dump_traceback_later(STUCK_S, exit=True)
                _say(out, {"seed": seed, "way": way})

            spoil = not given.keep_sources
            result = judged(device, seed, **given.one, starting=starting, spoil=spoil, most=given.most)
            distinct = {(failure.verdict, failure.text): failure for failure in reversed(result.failures)}
            found = [*distinct.values()]
            if found and left and not given.one:
                left -= 1
                _say(out, {"seed": seed, "way": found[-1].way, "failing": found[-1].as_dict()})
                found[-1] = smaller(device, found[-1], starting, spoil, end + _LATE_S)
            _say(out, {"seed": seed, **asdict(result), "failures": [failure.as_dict() for failure in found]})
        _say(out, {"ended": True})


def smaller(device: Device, failure: Failure, starting: Any, spoil: bool, until: float) -> Failure:
    """Return a failure of the same verdict and way on the smallest graph that shows it and is found until a time."""
    smallest = failure

    def fails(skip: tuple[int, ...], outputs: tuple[int, ...] | None) -> bool:
        nonlocal smallest
        if time.monotonic() > until:
            return False
        for found in judged(device, failure.seed, skip, outputs, [failure.way], starting, spoil).failures:
            if found.verdict == failure.verdict:
                smallest = found
                return True
        return False

    if fails((), None):
        shrunk(fails, failure.seed)
    return smallest


def _say(out: Any, event: dict[str, Any]) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # some engines print
    try:
        main(channel)
    except Exception:
        _say(channel, {"broken": traceback.format_exc()})
