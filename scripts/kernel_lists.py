"""Write providers/kernel_lists/: the kernels of execution providers, by minor version of ONNX Runtime.

    python scripts/kernel_lists.py live webgpu        or cuda, on the machine of the GPU gate
    python scripts/kernel_lists.py check

`live` reads the kernel registry of a provider that works here. DirectML's list was typed from its documentation.

A line names the versions of an operator that take the same types. The oldest list of a provider is whole. A later one
has the kernels that are new after `+`, and those that are gone after `-`. A version with the same kernels as the
version before gets no file of its own, because readers take the newest list that is not newer than the version asked
for. Element types inside sequences and optionals are listed like those of tensors, which is how claims are compared.
Kernels for the domain of ONNX Runtime's NHWC rewriting are left out: no model has it.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlx_ort.device import Device, parse_device
from rlx_ort.providers.base import KernelClaim
from rlx_ort.providers.claims import kernels_of, parse_list, whole_list
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.plugins import plugin_for
from rlx_ort.providers.registry import default_registry

FOLDER = Path(__file__).resolve().parents[1] / "providers" / "kernel_lists"
NOTE = "# an operator and version on several lines: only these combinations of element types have a kernel"
INTERNAL_DOMAIN = "com.ms.internal.nhwc"
OPEN_END = 2**31 - 1  # INT_MAX in KernelDef


def main() -> int:
    """Write or check lists and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(dest="job", required=True)
    jobs.add_parser("live", help="read the kernel registry of a provider that works here").add_argument("device")
    jobs.add_parser("check", help="exit with 1 when a list is not in its normal form or repeats the one before")
    args = parser.parse_args()
    if args.job == "check":
        problems = list(check())
        print("\n".join(problems) or "the lists are in order")
        return int(bool(problems))
    write_live(parse_device(args.device))
    return 0


def write(ep: str, version: str, claims: Iterable[KernelClaim], source: str) -> None:
    """Write the list of a provider and version, unless the version before has the same kernels.

    Raises:
        ValueError: there are no kernels.
    """
    lines = render(claims)
    if not lines:
        raise ValueError(f"no kernel of {ep} was found in {source}")
    major, minor = map(int, version.split(".")[:2])
    texts = whole_lists(ep)
    texts[major, minor] = "\n".join([f"# {ep}, ONNX Runtime {major}.{minor}", f"# source: {source}", NOTE, *lines, ""])
    older = max((known for known in texts if known < (major, minor)), default=None)
    if older and body(texts[older]) == lines:
        print(f"{major}.{minor} has the kernels of {older[0]}.{older[1]}; no file written")
        del texts[major, minor]
        path_of(ep, (major, minor)).unlink(missing_ok=True)
    before = ""
    for known, text in sorted(texts.items()):  # the one after the new list now differs from that
        path_of(ep, known).write_text(differences(text, before), encoding="utf-8", newline="\n")
        before = text
    print(f"{ep}: {len(texts)} lists, {sum(path.stat().st_size for path in lists(ep))} bytes")


def differences(text: str, before: str) -> str:
    """Return a list as it is stored: whole, or the lines that differ from those of the list before it."""
    lines, older = body(text), body(before)
    changed = one_line_each(lines)
    if before:
        changed = [f"- {line}" for line in one_line_each([line for line in older if line not in lines])]
        changed += [f"+ {line}" for line in one_line_each([line for line in lines if line not in older])]
    return "\n".join([*(line for line in text.splitlines() if line.startswith("#")), *changed, ""])


def one_line_each(lines: Iterable[str]) -> list[str]:
    """Return the lines with the versions joined that take the same types: `ai.onnx Abs 6-12,13+ T=f32`."""
    versions: dict[tuple[str, ...], list[str]] = {}
    for domain, op_type, version, *types in map(str.split, lines):
        versions.setdefault((domain, op_type, *types), []).append(version)
    return [" ".join([key[0], key[1], ",".join(listed), *key[2:]]) for key, listed in versions.items()]


def check() -> Iterator[str]:
    """Yield the faults of the lists."""
    for ep in sorted({path.name.rpartition("-")[0] for path in lists("*")}):
        before = ""
        for version, text in whole_lists(ep).items():
            path = path_of(ep, version)
            if body(text) != render(parse_list(text)) or path.read_text("utf-8") != differences(text, before):
                yield f"{path.name} is not in the form that this script writes"
            if body(text) == body(before):
                yield f"{path.name} repeats the list before it"
            before = text


def whole_lists(ep: str) -> dict[tuple[int, int], str]:
    """Return the whole lists of a provider by version, oldest first."""
    texts: dict[tuple[int, int], str] = {}
    for path in lists(ep):
        texts[minor_of(path)] = whole_list(path.read_text("utf-8"), next(reversed(texts.values()), ""))
    return texts


def lists(ep: str) -> list[Path]:
    """Return the lists of a provider, oldest version first."""
    return sorted(FOLDER.glob(f"{ep}-*.txt"), key=minor_of)


def path_of(ep: str, version: tuple[int, int]) -> Path:
    """Return the file of a list."""
    return FOLDER / f"{ep}-{version[0]}.{version[1]}.txt"


def minor_of(path: Path) -> tuple[int, int]:
    """Return the version in the name of a list."""
    major, minor = path.stem.rpartition("-")[2].split(".")
    return int(major), int(minor)


def body(text: str) -> list[str]:
    """Return the lines of a list without its comments."""
    return [line for line in text.splitlines() if not line.startswith("#")]


def render(claims: Iterable[KernelClaim]) -> list[str]:
    """Return the lines of a list: kernels sorted, and joined where that adds no combination of types."""
    table: dict[tuple[str, str, int, int], list[dict[str, frozenset[str]]]] = collections.defaultdict(list)
    for claim in claims:
        if claim.domain != INTERNAL_DOMAIN:
            last = OPEN_END if claim.last_version is None else claim.last_version
            types = {name: frozenset(dtype.value for dtype in dtypes) for name, dtypes in claim.dtypes.items()}
            table[claim.domain or "ai.onnx", claim.op_type, claim.first_version, last].append(types)
    lines = []
    for (domain, op_type, first, last), kernels in sorted(table.items()):
        versions = f"{first}+" if last == OPEN_END else str(first) if first == last else f"{first}-{last}"
        rows = ([f"{name}={','.join(sorted(types))}" for name, types in sorted(row.items())] for row in joined(kernels))
        lines += sorted(" ".join([domain, op_type, versions, *row]) for row in rows)
    return lines


def joined(kernels: list[dict[str, frozenset[str]]]) -> list[dict[str, frozenset[str]]]:
    """Join kernels that are equal or differ in the types of one parameter only."""
    for a, b in itertools.combinations(kernels, 2):
        differing = [name for name in a if a[name] != b.get(name)]
        if a.keys() == b.keys() and len(differing) <= 1:
            both = {name: types | b[name] for name, types in a.items()}
            return joined([kernel for kernel in kernels if kernel is not a and kernel is not b] + [both])
    return kernels


def write_live(device: Device) -> None:
    """Write the list of a device that works here.

    Raises:
        ValueError: ONNX Runtime cannot list the provider's kernels here.
    """
    provider = default_registry().for_device(device)
    if not isinstance(provider, OrtProvider):
        raise ValueError(f"{device.display} is not a device of ONNX Runtime")
    problem = provider.missing(device)
    claims = None if problem else kernels_of(provider.ep_name)
    if claims is None:
        raise ValueError(f"no registry of {provider.ep_name}: {problem.reason if problem else 'it cannot be listed'}")
    plugin = plugin_for(provider.ep_name)
    core = runtime.describe_runtime()
    source = f"{plugin.distribution} {plugin.version} with {core}" if plugin else core
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    version = str(runtime.onnxruntime().__version__)
    write(provider.ep_name, version, claims, f"kernel registry of {source}, read on {today}")


if __name__ == "__main__":
    sys.exit(main())
