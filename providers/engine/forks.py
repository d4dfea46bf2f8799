"""Refusal of devices in a process that was forked after they were used: driver state does not survive a fork."""

from __future__ import annotations

import os
from collections.abc import Callable

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError

__all__ = ["forbid_in_forks"]

_REMEDY = "start workers with multiprocessing.get_context('spawn')"


def forbid_in_forks(device: Device) -> Callable[[], None]:
    """Return a check that refuses the device in every process but this one."""
    owner = os.getpid()

    def check() -> None:
        if os.getpid() != owner:
            reason = f"this process was forked from one that had {device.display} in use"
            raise DeviceUnavailableError(device, reason, _REMEDY)

    return check
