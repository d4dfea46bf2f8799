"""`rlx-ort package sign PACKAGE --key PRIVATE`: an OpenSSF model signature, inside the package."""

from __future__ import annotations

from pathlib import Path

import click

from rlx_ort.cli import options
from rlx_ort.cli.show import note, print_json, progress

__all__ = ["command"]


@click.command("sign")
@click.argument("package", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--key", required=True, type=options.FILE, help="A PEM file with an EC private key (P-256, P-384 or P-521)."
)
@click.option("--password-env", metavar="NAME", help="The environment variable that holds the key's password.")
@options.as_json
def command(package: Path, key: Path, password_env: str | None, as_json: bool) -> None:
    """Check every byte of a package and sign it.

    Needs the extra `sign`; works offline. A signature that is there is replaced.
    """
    import os

    from rlx_ort.deploy.package import Package, sign_package

    password = None if password_env is None else os.environ.get(password_env)
    if password_env is not None and not password:
        raise click.UsageError(f"the variable {password_env} is not set")
    with Package(package) as opened, progress(f"signing {package}"):
        sign_package(opened, key, password)
        digest = opened.sha256
    if as_json:
        print_json({"package": str(package), "sha256": digest, "signed": True})
    note(f"signed {package}; verify it with: rlx-ort package verify {package} --key PUBLIC_KEY")
