"""`Resilience`: how a runner reacts to devices that fail."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rlx_ort import environment
from rlx_ort.errors import DeviceParseError
from rlx_ort.execution.residency import parse_budgets


@dataclass(frozen=True, slots=True)
class Resilience:
    """How a runner reacts to devices that fail; give it to `GraphDevices(..., resilience=Resilience())`.

    Attributes:
        bridge: whether a device that is ready answers while a faster one opens in the background.
        failover: whether a run that fails because of its device is answered by the next device of the ranking.
        backoff_s: seconds that a device is quarantined after its first failure; each further failure doubles them.
        backoff_max_s: the longest quarantine in seconds.
        parity: whether a device must reproduce the result of a healthy device before it leaves quarantine, and before
            it is used after opening in the background.
        tolerance: largest difference allowed by that check, relative to the largest value of the output. It is at least
            0.01 where a device computes in tf32 or f16, 0.04 in bf16. Integers, strings and bools must be equal.
        timeout_s: time limit in seconds of each attempt at a run, opening the session included; None for no limit.
            With a limit, each run is handed to a worker thread.
        grace_s: seconds that the engine has to return after it was asked to stop. If it does not, the caller is
            answered all the same, and the device is quarantined with its session.
        device_memory: memory budgets of devices, such as `cuda=8GB`, for all sessions of this process from now on, in
            place of `RLX_DEVICE_MEMORY`.
    """

    bridge: bool = True
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

    @classmethod
    def from_env(cls) -> Resilience | None:
        """Return the value of `RLX_RESILIENCE`; None where it is unset or off.

        Raises:
            DeviceParseError: the variable is neither a switch nor settings by the names of the attributes.
        """
        text = (environment.get("RESILIENCE") or "off").strip().lower()
        switch = _SWITCHES.get(text)
        if switch is not None:
            return cls() if switch else None
        known = {field.name: field.default for field in fields(cls)}
        settings: dict[str, bool | float | str] = {}
        try:
            for piece in filter(None, text.replace(";", ",").split(",")):
                name, _, value = piece.partition("=")
                name, value = name.strip(), value.strip()
                if isinstance(known[name], bool):
                    settings[name] = _SWITCHES[value]
                else:
                    settings[name] = value if isinstance(known[name], str) else float(value)
            return cls(**settings)  # type: ignore[arg-type]  # by the kind of each default
        except (KeyError, ValueError) as err:
            names = ", ".join(known)
            message = f"RLX_RESILIENCE={text!r} is neither on, off nor settings such as timeout_s=2,bridge=off: {err}"
            raise DeviceParseError(text, f"{message}; the settings are {names}") from err


_SWITCHES = {**dict.fromkeys(("1", "on", "true", "yes"), True), **dict.fromkeys(("0", "off", "false", "no", ""), False)}


def check_timeout(timeout_s: float) -> float:
    """Return a time limit in seconds if it is one.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s is {timeout_s}; give a finite number of seconds above 0, or None for no limit")
    return timeout_s
