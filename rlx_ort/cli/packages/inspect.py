"""`rlx-ort package inspect PACKAGE`: the settings, variants and files of a package. Opens no session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.show import binary_size, emit, print_facts, print_table

if TYPE_CHECKING:
    from rlx_ort.deploy.package import Package


@click.command("inspect")
@options.package
@options.as_json
def command(package: Package, as_json: bool) -> None:
    """Show what a package holds.

    Structure, names, sizes and small files are checked; large weights are not read. `verify` reads everything.
    """
    emit(_described(package), as_json, _print)


def _described(package: Package) -> dict[str, Any]:
    index = package.index
    policy = index.policy
    return {
        "package": str(package.path),
        "form": "folder" if package.is_folder else "file",
        **{key: getattr(index, key) for key in ("name", "version", "serial", "license", "verify_on_first_use")},
        **{key: dict(getattr(index, key)) for key in ("provenance", "requires", "dims", "tolerances")},
        "sha256": package.sha256,
        "signature": package.signature_state,
        "policy": {
            "allow": None if policy.allow is None else [device.label for device in policy.allow],
            "deny": [device.label for device in policy.deny],
            "prefer": [device.label for device in policy.prefer],
            "pick": type(policy.pick_strategy()).__name__.lower(),
        },
        "buckets": None if index.buckets is None else {"dim": index.buckets[0], "ranges": list(index.buckets[1])},
        "variants": [
            {"name": name, "device": item.device, "precision": item.precision.value, "own_weights": bool(item.rounded)}
            for name, item in index.variants.items()
        ],
        "golden_cases": len(index.cases),
        "tensors": len(index.tensors),
        "files": [
            {"name": name, "bytes": entry.size, "sha256": entry.sha256} for name, entry in sorted(index.files.items())
        ],
    }


def _print(document: dict[str, Any]) -> None:
    policy = document["policy"]
    rules = [f"only {', '.join(policy['allow'])}"] if policy["allow"] is not None else []
    rules += [f"{verb} {', '.join(policy[verb])}" for verb in ("deny", "prefer") if policy[verb]]
    facts = [
        ("package", f"{document['package']} ({document['form']})"),
        ("name", " ".join(filter(None, (document["name"], document["version"], f"serial {document['serial']}")))),
        ("sha256", document["sha256"]),
        ("signature", document["signature"]),
        ("license", document["license"] or "not stated"),
        ("policy", f"{'; '.join(rules) or 'any device'}, by {policy['pick']}"),
        ("dims", ", ".join(f"{name}={size}" for name, size in document["dims"].items()) or "none fixed"),
        ("golden cases", f"{document['golden_cases']}{', run at first use' * document['verify_on_first_use']}"),
    ]
    facts += [(f"provenance {key}", text) for key, text in document["provenance"].items()]
    facts += [(f"requires {key}", text) for key, text in document["requires"].items()]
    print_facts(facts)
    rows = [(row["name"], row["device"], row["precision"], row["own_weights"]) for row in document["variants"]]
    print_table(("variant", "device", "precision", "own weights"), rows)
    files = [(row["name"], binary_size(row["bytes"]), row["sha256"][:16]) for row in document["files"]]
    print_table(("file", "size", "sha256"), files)
