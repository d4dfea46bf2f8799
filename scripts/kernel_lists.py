"""Write providers/kernel_lists/: the kernels of execution providers, by minor version of ONNX Runtime.

    pip download --no-deps onnxruntime-gpu==1.31.1
    python scripts/kernel_lists.py wheel onnxruntime_gpu-1.31.1-*.whl CUDAExecutionProvider
    python scripts/kernel_lists.py live webgpu
    python scripts/kernel_lists.py table FILE DmlExecutionProvider 1.24 "docs/OperatorKernels.md at commit ..."
    python scripts/kernel_lists.py check

`wheel` reads the kernel registry of a GPU package without a GPU: the libraries that it links and the system lacks are
replaced by stubs whose functions return 0. It needs Linux, gcc, readelf and the Python version of the wheel. `live`
reads the registry of a provider that works here. `table` takes a table typed in the form of the lists.

A line names the versions of an operator that take the same types. The oldest list of a provider is whole. A later one
has what the list before it lacks after `+`, and what it has no more after `-`. A version with the same kernels as the
version before gets no file of its own, because readers take the newest list that is not newer than the version asked
for. Element types inside sequences and optionals are listed like those of tensors, which is how claims are compared.
Kernels for the domain of ONNX Runtime's NHWC rewriting are left out: no model has it.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlx_ort.device import Device, parse_device
from rlx_ort.providers.base import KernelClaim
from rlx_ort.providers.claims import kernels_of, parse_list, whole_list
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.values import element_dtypes
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.plugins import plugin_for
from rlx_ort.providers.registry import default_registry

FOLDER = Path(__file__).resolve().parents[1] / "providers" / "kernel_lists"
NOTE = "# an operator and version on several lines: only these combinations of element types have a kernel"
INTERNAL_DOMAIN = "com.ms.internal.nhwc"
OPEN_END = 2**31 - 1  # INT_MAX in KernelDef

PRESENT = ("libdl", "librt", "libpthread", "libstdc++", "libm.", "libgcc", "libc.", "ld-linux", "libonnx")
LIBRARY_OF = {  # by the first letters of a symbol, longest first
    "cublasLt": "libcublasLt.", "cublas": "libcublas.", "curand": "libcurand.", "cudnn": "libcudnn.",
    "cufft": "libcufft.", "cuda": "libcudart.", "cu": "libcuda.", "createNvOnnxParser": "libnvonnxparser.",
    "getNvOnnxParser": "libnvonnxparser.",
}  # fmt: skip
STUBS = {  # the functions whose results are used while the libraries load
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *p) { *p = 1; return 0; }",
    "cudaGetDevice": "int cudaGetDevice(int *p) { *p = 0; return 0; }",
    "cudaGetDeviceProperties_v2": "int cudaGetDeviceProperties_v2(char *p, int d) { memset(p, 0, 1000); return 0; }",
    "cudaGetDeviceProperties": "int cudaGetDeviceProperties(char *p, int d) { memset(p, 0, 700); return 0; }",
    "cudaMemGetInfo": "int cudaMemGetInfo(size_t *a, size_t *b) { *a = *b = 1ul << 34; return 0; }",
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int *p) { *p = 13000; return 0; }",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *p) { *p = 13000; return 0; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "stub"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "stub"; }',
    "__cudaRegisterFatBinary": "static void *h[4]; void *__cudaRegisterFatBinary(void *x) { return h; }",
}
DUMP = """
import json, os, sys
from onnxruntime.capi import onnxruntime_pybind11_state as state
kernels = [
    [kernel.domain, kernel.op_name, *kernel.version_range, dict(kernel.type_constraints)]
    for kernel in state.get_all_opkernel_def() if kernel.provider == sys.argv[1]
]
print(json.dumps(kernels), flush=True)
os._exit(0)  # the stubs do not survive the shutdown of the libraries
"""


def main() -> int:
    """Write or check lists and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(dest="job", required=True)
    wheel = jobs.add_parser("wheel", help="read the kernel registry of a wheel for Linux")
    wheel.add_argument("wheel", type=Path)
    wheel.add_argument("ep")
    jobs.add_parser("live", help="read the kernel registry of a provider that works here").add_argument("device")
    table = jobs.add_parser("table", help="take a table in the form of the lists")
    for name in ("table", "ep", "version", "source"):
        table.add_argument(name)
    jobs.add_parser("check", help="exit with 1 when a list is not in its normal form or repeats the one before")
    args = parser.parse_args()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    match args.job:
        case "check":
            problems = list(check())
            print("\n".join(problems) or "the lists are in order")
            return int(bool(problems))
        case "wheel":
            package, version = args.wheel.name.split("-")[:2]
            registry = f"kernel registry of {package.replace('_', '-')} {version}"
            write(args.ep, version, from_wheel(args.wheel, args.ep), f"{registry}, read without a GPU on {today}")
        case "live":
            ep, version, source, claims = from_live(parse_device(args.device))
            write(ep, version, claims, f"{source} on {today}")
        case "table":
            table_claims = parse_list(whole_list(Path(args.table).read_text(encoding="utf-8"), ""))
            write(args.ep, args.version, table_claims, f"{args.source}, read on {today}")
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
    return [" ".join([key[0], key[1], ",".join(found), *key[2:]]) for key, found in versions.items()]


def check() -> Iterator[str]:
    """Yield what is wrong with the lists."""
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
            types = {name: frozenset(dtype.value for dtype in found) for name, found in claim.dtypes.items()}
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


def from_live(device: Device) -> tuple[str, str, str, tuple[KernelClaim, ...]]:
    """Return the execution provider of a device that works here, ONNX Runtime's version, the source and the kernels.

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
    version = str(runtime.onnxruntime().__version__)
    return provider.ep_name, version, f"kernel registry of {source}, read", claims


def from_wheel(wheel: Path, ep: str) -> list[KernelClaim]:
    """Return the kernels of an execution provider, read from a wheel in a process of its own.

    Raises:
        subprocess.CalledProcessError: the wheel's libraries do not load with the stubs.
    """
    with tempfile.TemporaryDirectory() as folder:
        unpacked, stubs = Path(folder) / "unpacked", Path(folder) / "stubs"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        stubs.mkdir()
        build_stubs(unpacked / "onnxruntime" / "capi", stubs)
        env = {**os.environ, "LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": str(unpacked)}
        command = [sys.executable, "-c", DUMP, ep]
        answer = subprocess.run(command, env=env, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    kernels = []
    for domain, op_type, first, last, constraints in json.loads(answer.splitlines()[-1]):
        dtypes = {name: element_dtypes(types) for name, types in constraints.items()}
        domain = "" if domain == "ai.onnx" else domain
        kernels.append(KernelClaim(domain, op_type, first, None if last == OPEN_END else last, dtypes))
    return kernels


def build_stubs(capi: Path, target: Path) -> None:
    """Build an empty library for each one that the libraries of a wheel link and the system lacks."""
    needed: set[str] = set()
    symbols: dict[str, dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    unversioned: set[str] = set()
    for library in [*capi.glob("libonnxruntime_providers_*.so"), *capi.glob("onnxruntime_pybind11*.so")]:
        names = re.findall(r"NEEDED.*\[(.*)\]", _readelf("-d", library))
        needed |= {name for name in names if not name.startswith(PRESENT)}
        for fields in map(str.split, _readelf("--dyn-syms", library).splitlines()):
            if len(fields) < 8 or fields[6] != "UND":
                continue
            symbol, _, version = fields[7].replace("@@", "@").partition("@")
            if version.startswith("lib"):
                symbols[version][version].add(symbol)
            elif not version and fields[4] != "WEAK" and not symbol.startswith(("_", "Py", "Provider_")):
                unversioned.add(symbol)
    for symbol in unversioned:
        prefix = next((name for start, name in LIBRARY_OF.items() if symbol.startswith(start)), "libnvinfer.")
        for library_name in needed:
            if library_name.startswith(prefix):
                symbols[library_name][""].add(symbol)
    for library_name in needed:
        _build_stub(target / library_name, symbols[library_name])


def _build_stub(library: Path, symbols: dict[str, set[str]]) -> None:
    """Build one library from its symbols by version; the version of those without one is empty."""
    source, script = library.with_suffix(".c"), library.with_suffix(".map")
    code = ["#include <stddef.h>", "#include <string.h>"]
    code += [STUBS.get(symbol, f"long {symbol}() {{ return 0; }}") for symbol in sorted(set().union(*symbols.values()))]
    source.write_text("\n".join(code) + "\n", encoding="utf-8")
    command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(library), str(source)]
    command.append(f"-Wl,-soname,{library.name}")
    nodes = [f"{version} {{ global: {'; '.join(sorted(found))}; }};" for version, found in symbols.items() if version]
    if nodes:
        script.write_text("\n".join(nodes), encoding="utf-8")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)


def _readelf(option: str, library: Path) -> str:
    command = ["readelf", option, "-W", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
