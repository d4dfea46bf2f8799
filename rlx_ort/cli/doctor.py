"""`rlx-ort doctor`: the problems of this installation, and how to repair them."""

from __future__ import annotations

from typing import Any

import click

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import emit, print_table, progress


@options.command("doctor")
def command(as_json: bool = options.AS_JSON) -> None:
    """Find problems of this installation, and the repair.

    The exit code is 1 when something is broken; warnings leave it at 0.
    """
    from rlx_ort.providers import diagnosis

    with progress("looking at the installation and its drivers"):
        findings = diagnosis.diagnose()
    try:
        rlx_ort.DevicePolicy.from_env()
    except rlx_ort.DeviceParseError as err:
        remedy = "correct or unset the variable; docs/environment.md lists all of them"
        findings.insert(0, diagnosis.Finding("variable", diagnosis.Severity.ERROR, str(err), remedy))
    rows = [
        {"code": finding.code, "level": finding.severity.value, "what": finding.what, "remedy": finding.remedy}
        for finding in findings
    ]
    emit({"findings": rows}, as_json, _print)
    click.get_current_context().exit(int(any(finding.severity is diagnosis.Severity.ERROR for finding in findings)))


def _print(document: dict[str, Any]) -> None:
    """Print the findings, and each repair below them in a line of its own that is not broken."""
    rows = document["findings"]
    print_table(("level", "what was found"), [(row["level"], row["what"]) for row in rows])
    for row in rows:
        if row["remedy"]:
            click.echo(f"for {row['code']}:\n  {row['remedy']}")
