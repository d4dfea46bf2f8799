"""The `rlx-ort` command. Commands are in the files of this folder, each imported when it is first needed.

This file is the one place where an `RlxError` becomes text on stderr and an exit code. Any other exception is a bug in
this package, and its traceback is shown.
"""

from __future__ import annotations

import io
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any, cast

import click

from rlx_ort.cli import show
from rlx_ort.cli.interrupts import Interrupts
from rlx_ort.cli.options import loudness
from rlx_ort.errors import RlxError, advising_options, near_names

__all__ = ["Commands", "main"]

_COMMANDS = (
    *("devices", "doctor", "inspect", "report", "calibrate", "bench", "tune", "split", "run", "genai", "serve"),
    *("convert", "compare", "package", "cache"),
)

_INTERRUPTED = 130
_HELP = frozenset({"-h", "--help"})
_HELP_ONLY = "rlx_ort.help_only"
_EXIT_CODES = """\b
Exit codes:
  0  done
  1  another failure, or `doctor` found an error
  2  wrong usage: an option, a path or a device name
  3  a device cannot be used
  4  a graph or model is wrong or cannot be translated
  5  a run failed: inputs, parameters, placement or the engine
  6  a device could not be measured
  7  a model package is broken
  8  two models or devices differ by more than the tolerance
  9  a file cannot be written
  10  an optional package is missing
  130  Ctrl-C
  143  a request to terminate
  149  Ctrl-Break on Windows
"""


class Commands(click.Group):
    """A group whose commands are imported when they are needed.

    Args:
        where: the commands as `module:name`, by name and in the order in which a newcomer needs them.
        settings: as in `click.Group`.
    """

    def __init__(self, *args: Any, where: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._where = where

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self._where)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return its command."""
        where = self._where.get(cmd_name)
        return None if where is None else cast(click.Command, pkgutil.resolve_name(where))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of a name; for an unknown one the nearest are suggested."""
        if not args[0].startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no command {args[0]!r}; {near_names(args[0], self._where)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a `RlxError` becomes a message and its exit code, and so does a signal.

        With --json it becomes a document as well.
        """
        as_json = "--json" in ctx.args
        ctx.meta.setdefault(_HELP_ONLY, not _HELP.isdisjoint(ctx.args))
        try:
            with advising_options():
                return super().invoke(ctx)
        except click.exceptions.Exit:  # of a command in this one
            raise
        except BaseException as err:  # raised again unless the command is to end
            interrupts = ctx.find_object(Interrupts)
            code = 0 if interrupts is None else interrupts.exit_code
            if code or isinstance(err, KeyboardInterrupt):
                if as_json:
                    show.print_failure(ctx, "Interrupted", "the command was interrupted", code or _INTERRUPTED)
                click.echo("Interrupted", err=True)
                ctx.exit(code or _INTERRUPTED)
            if isinstance(err, click.ClickException) and as_json:
                show.print_failure(ctx, "UsageError", err.format_message(), err.exit_code)
            if not isinstance(err, RlxError):
                raise
            text = str(err)
            if as_json:
                show.print_failure(ctx, type(err).__name__, text, err.exit_code)
            click.echo(f"Error: {text}", err=True)
            ctx.exit(err.exit_code)


@click.group(
    cls=Commands,
    where={name: f"rlx_ort.cli.{name}:command" for name in _COMMANDS},
    epilog=_EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
    params=loudness(),
)
@click.version_option(package_name="rlx_ort", prog_name="rlx-ort")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Build or import a model once; run it on the best ONNX Runtime device of this machine.

    Every command that reports takes --json: one JSON document on stdout and nothing else, with the number of its schema
    as `schema`, and `error` if it failed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # pipes and files get UTF-8 on every system
            stream.reconfigure(encoding="utf-8", errors="replace")
    from rlx_ort import environment  # not for `--help`

    if not ctx.meta[_HELP_ONLY] and ctx.invoked_subcommand != "doctor":  # which reports a typo among its findings
        from rlx_ort.selection.policy import DevicePolicy

        DevicePolicy.from_env()
    if environment.get("ENGINE_WARNINGS") is None:  # such as one for each session on CUDA, about plugins
        ctx.with_resource(environment.override({"ENGINE_WARNINGS": "0"}))
    if ctx.invoked_subcommand != "serve":  # which drains at a signal
        ctx.obj = ctx.with_resource(Interrupts())
