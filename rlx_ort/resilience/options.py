"""`Resilience`: how a runner reacts to devices that fail."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlx_ort.execution.residency import parse_budgets


@dataclass(frozen=True, slots=True)
class Resilience:
    """How a runner reacts to devices that fail; give it to `GraphDevices(..., resilience=Resilience())`.

    Attributes:
        failover: whether a run that fails because of its device is answered by the next device of the ranking.
        backoff_s: seconds that a device is quarantined after its first failure; each further failure doubles them.
        backoff_max_s: the longest quarantine in seconds.
        parity: whether a device must reproduce the result of a healthy device before it leaves quarantine.
        tolerance: largest difference allowed by that check, relative to the largest value of the output. For f16 and
            bf16 outputs it is at least eight times their epsilon. Integers, strings and bools must be equal.
        timeout_s: time limit in seconds of each attempt at a run, opening the session included; None for no limit.
            With a limit, each run is handed to a worker thread.
        grace_s: seconds that the engine has to return after it was asked to stop. If it does not, the caller is
            answered all the same, and the device is quarantined with its session.
        device_memory: memory budgets of devices, such as `cuda=8GB`, for all sessions of this process from now on, in
            place of `RLX_DEVICE_MEMORY`.
    """

    failover: bool = True
    backoff_s: float = 1.0
    backoff_max_s: float = 300.0
    parity: bool = True
    tolerance: float = 1e-3
    timeout_s: float | None = None
    grace_s: float = 1.0
    device_memory: str = ""

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            check_timeout(self.timeout_s)
        for name in ("backoff_s", "backoff_max_s", "tolerance", "grace_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; give a finite number of at least 0")
        if self.backoff_max_s < self.backoff_s:
            raise ValueError(f"backoff_max_s ({self.backoff_max_s}) is less than backoff_s ({self.backoff_s})")
        parse_budgets(self.device_memory)


def check_timeout(timeout_s: float) -> float:
    """Return a time limit in seconds if it is one.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s is {timeout_s}; give a finite number of seconds above 0, or None for no limit")
    return timeout_s
