"""`SplitPlan`: a graph cut into stages, each for one device; a value that is shown, edited, kept and given back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlx_ort.device import Device
from rlx_ort.errors import InputError
from rlx_ort.fields import Fields, parse

_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """Nodes of a graph that run on one device, in the graph's order, from behind the stage before.

    Attributes:
        device: the device.
        last: the name of the last node.
        memory_bytes: the counted peak of its session's memory.
        run_ns: the predicted time of a run without the values that are moved; None if nothing is known.
        moved_bytes: the values that it gets from stages on other devices in a run.
    """

    device: Device
    last: str
    memory_bytes: int = field(default=0, compare=False)
    run_ns: float | None = field(default=None, compare=False)
    moved_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The stages of a graph, in order; plans with the same cuts, devices and budgets are equal.

    `GraphDevices.plan` counts the figures; those of a plan that was edited are counted again when it is used.

    Attributes:
        stages: the stages.
        budgets: the bytes that all stages of a device may take together, by device.
        sizes: the sizes of named dims that were planned for.
        run_ns: the predicted time of one run, the moving of values included; None if nothing is known.
        streams: whether the stages of a device do not fit together, so that each run opens them one after the other.
    """

    stages: tuple[Stage, ...]
    budgets: tuple[tuple[Device, int], ...] = ()
    sizes: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    run_ns: float | None = field(default=None, compare=False)
    streams: bool = False

    @property
    def device(self) -> Device:
        """The device of the last stage, which makes most outputs."""
        return self.stages[-1].device

    @property
    def devices(self) -> tuple[Device, ...]:
        """Each device once, in the order of the stages."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages))

    def document(self) -> dict[str, Any]:
        """Return it as JSON values, for `SplitPlan.read`."""
        stages = [{**asdict(stage), "device": stage.device.label} for stage in self.stages]
        budgets = {device.label: nbytes for device, nbytes in self.budgets}
        facts = {"schema": _SCHEMA, "budgets": budgets, "sizes": dict(self.sizes), "streams": self.streams}
        return {**facts, "run_ns": self.run_ns, "stages": stages}

    @classmethod
    def read(cls, data: bytes | Mapping[str, Any], source: str = "the plan") -> SplitPlan:
        """Return the plan of a JSON text or its values. Figures may be left out; `source` names it in messages.

        Raises:
            InputError: it is no plan.
        """
        fields = parse(data, source, InputError) if isinstance(data, bytes) else Fields(dict(data), source, InputError)
        fields.only("schema", "budgets", "sizes", "streams", "run_ns", "stages")
        if fields.count("schema", _SCHEMA) != _SCHEMA:
            fields.fail(f"is of another version than {_SCHEMA}", "schema")
        stages = []
        for each in fields.objects("stages"):
            each.only("device", "last", "memory_bytes", "run_ns", "moved_bytes")
            device = each.parsed("device", Device)
            memory_bytes, moved_bytes = each.count("memory_bytes", 0), each.count("moved_bytes", 0)
            stages.append(Stage(device, each.name("last"), memory_bytes, _time(each), moved_bytes))
        if not stages:
            fields.fail("has no stages", "stages")
        budgets = fields.fields("budgets").each(Fields.count)
        try:
            limits = tuple((Device(name), nbytes) for name, nbytes in budgets.items())
        except ValueError as err:
            raise InputError(f"{fields.at('budgets')}: {err}") from err
        sizes = fields.fields("sizes").each(Fields.count)
        return cls(tuple(stages), limits, tuple(sizes.items()), _time(fields), fields.flag("streams", False))


def _time(fields: Fields) -> float | None:
    return None if fields.raw.get("run_ns") is None else fields.number("run_ns")
