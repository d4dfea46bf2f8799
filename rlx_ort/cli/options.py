"""Options and arguments that several commands share: one named object each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rlx_ort.selection.policy import DevicePolicy

__all__ = ["as_json", "deny", "dims", "model", "only", "policy_of", "prefer"]


def _parse_dims(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text in values:
        name, equals, size = text.rpartition("=")
        if not (name and equals and size.isascii() and size.isdigit()):
            raise click.BadParameter(f"{text!r} is not NAME=SIZE with a whole number, as in batch=4", ctx, param)
        if sizes.setdefault(name, int(size)) != int(size):
            raise click.BadParameter(f"{name!r} is given twice, as {sizes[name]} and {size}", ctx, param)
    return sizes


model = click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
"""The model file: ONNX or the IR's JSON, told apart by content."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else.")

dims = click.option(
    "--dim", "dims", multiple=True, metavar="NAME=SIZE", callback=_parse_dims, help="Fix a named dim; may be repeated."
)

_ONLY = "Allow these devices only, as in cpu,webgpu."
only = click.option("--only", metavar="DEVICES", help=_ONLY)
shown = click.option("--only", "--device", "only", metavar="DEVICES", help=_ONLY)
"""For commands that run on no device, so that `--device` can only mean this."""

deny = click.option("--deny", metavar="DEVICES", help="Never use these devices.")

prefer = click.option("--prefer", metavar="DEVICES", help="Prefer these devices where predictions are close.")


def policy_of(only: str | None, deny: str | None, prefer: str | None) -> DevicePolicy:
    """Return the policy of the RLX_* variables, narrowed by the options.

    `--only` replaces RLX_DEVICES; `--deny` and `--prefer` add to RLX_DENY_DEVICES and RLX_PREFER_DEVICES.

    Raises:
        DeviceParseError: a device name, in an option or a variable, does not parse.
    """
    from dataclasses import replace

    from rlx_ort.device import parse_device_list
    from rlx_ort.selection.policy import DevicePolicy

    policy = DevicePolicy.from_env()
    if only:
        policy = replace(policy, allow=tuple(parse_device_list(only)))
    if deny:
        policy = policy.with_deny(parse_device_list(deny))
    if prefer:
        policy = policy.with_prefer(parse_device_list(prefer))
    return policy
