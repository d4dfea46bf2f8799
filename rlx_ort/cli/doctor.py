"""`rlx-ort doctor`: what is wrong with this installation, and how to repair it."""

from __future__ import annotations

import click

from rlx_ort.cli import options
from rlx_ort.cli.show import emit, print_table, progress


@click.command("doctor")
@options.as_json
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Find what is broken here, and the repair.

    The exit code is 1 when something is broken; warnings leave it at 0.
    """
    from rlx_ort.providers import diagnosis

    with progress("looking at the installation and its drivers"):
        findings = diagnosis.diagnose()
    rows = [
        {"code": finding.code, "level": finding.severity.value, "what": finding.what, "remedy": finding.remedy}
        for finding in findings
    ]
    table = [(row["level"], "\n".join(filter(None, (row["what"], row["remedy"])))) for row in rows]
    emit({"findings": rows}, as_json, lambda document: print_table(("level", "what was found, and what to do"), table))
    ctx.exit(int(any(finding.severity is diagnosis.Severity.ERROR for finding in findings)))
