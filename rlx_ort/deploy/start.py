"""Starts a warmed package on one device in the shortest time: from the compile cache alone, without reading the model.

`start_package` reads only the index of the package, and the names and sizes of its other files. Everything else is left
to `open_package`. This module imports few others, because importing them would take longer than the start.
"""

from __future__ import annotations

import gc
import hashlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_ort.deploy.container import compare_files, open_container, read_index
from rlx_ort.deploy.copies import PackageCopy
from rlx_ort.deploy.names import SPLIT, required_key
from rlx_ort.providers.engine.compiled.starts import SavedSession, find_quick

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from rlx_ort.deploy.open import PackageDevices
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.graph_devices import GraphDevices


def start_package(
    path: str | os.PathLike[str],
    device: str = "cpu",
    *,
    require_signature: str | os.PathLike[str] | None = None,
    sha256: str | None = None,
    min_serial: int = 0,
) -> StartedPackage:
    """Return a package ready to run on a device, from the entry that `rlx-ort package warm` left in the compile cache.

    A package that was not warmed here, or for another device than the CPU, is opened in full; see `SavedSession` for
    the first runs of the others.

    Of the package's own files only the index, `rlx.json`, is read here: its digest is the key of the entries that
    the cache has of the verified package. Names and sizes of all other files are compared with the index, their
    bytes when the package is opened in full, which then must have the same index. A package whose signature is required
    is opened in full at once.

    Args:
        path: the package, a folder or a file.
        device: the device's name.
        require_signature: as in `open_package`.
        sha256: as in `open_package`.
        min_serial: as in `open_package`.

    Raises:
        PackageError: there is no package at the path, or it cannot be opened in full either.
        IntegrityError: its contents contradict the index, or it is not the package that was asked for.
        DeviceError: the device cannot be used.
    """
    key = required_key(require_signature)
    if device == "cpu" and key is None:
        started = quick_start(path, sha256=sha256, min_serial=min_serial)
        if started is not None:
            return started
    started = StartedPackage(Path(path), device, require_signature=key, sha256=sha256, min_serial=min_serial)
    started.compiled  # noqa: B018  # errors belong to the start, not to the first run
    return started


def quick_start(
    path: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    min_serial: int = 0,
    pack: bool = True,
    opens: Callable[..., PackageDevices] | None = None,
) -> StartedPackage | None:
    """Return a package started on the CPU from the compile cache alone; None if it must be opened in full.

    The `RLX_*` variables that restrict devices are applied by a full opening, and so is a signature.

    Args:
        path: the package, a folder or a file.
        sha256: as in `open_package`.
        min_serial: as in `open_package`.
        pack: whether weights are packed after the first runs; not worth it if the package is opened in full soon.
        opens: opens the package in full in place of `open_package`, called with the path, `sha256`, `min_serial`.

    Raises:
        PackageError: there is no package at the path.
        IntegrityError: its files are not those that its index lists.
    """
    from rlx_ort import environment

    if environment.get("DEVICES") or environment.get("DENY_DEVICES"):
        return None
    collecting, path = gc.isenabled(), Path(path)
    gc.disable()  # imports create no garbage
    container = open_container(path)
    try:
        raw = read_index(container)
        digest = hashlib.sha256(raw).hexdigest()
        quick = find_quick(digest) if sha256 is None or digest == sha256.lower() else None
        if quick is None:  # opening another package than was asked for in full raises the error
            return None
        index = json.loads(raw)  # the package with this very index was verified when it was warmed
        compare_files(container, {name: (entry["size"], entry["crc32"]) for name, entry in index["files"].items()})
        PackageCopy(container, digest).watch(quick)
        if index["serial"] < min_serial or SPLIT in index["files"] or not quick.open():
            return None
    finally:
        container.close()
        if collecting:
            gc.enable()
    quick.packs = pack
    return StartedPackage(path, "cpu", quick, index, opens, sha256=digest, min_serial=min_serial)


class StartedPackage:
    """A package on one device. `run` may be called from several threads.

    `quick` is true if it was started from the compile cache alone; `index` is then the package's index as JSON, and
    `interface` has its inputs and its outputs.
    """

    def __init__(
        self,
        path: Path,
        device: str,
        quick: SavedSession | None = None,
        index: Mapping[str, Any] | None = None,
        opens: Callable[..., PackageDevices] | None = None,
        **expected: Any,
    ) -> None:
        self.path = path
        self.device = device
        self.index = index
        self.quick = quick is not None
        self.interface = ((), ()) if quick is None else (quick.start.inputs, quick.start.outputs)
        self._quick = quick
        self._opens = opens
        self._expected = expected  # keyword arguments of `open_package`
        self._lock = threading.Lock()
        self._runner: GraphDevices | None = None
        self._compiled: CompiledGraph | None = None

    def __repr__(self) -> str:
        return f"<StartedPackage {str(self.path)[-80:]!r} on {self.device}>"

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> list[Any]:
        """Run once and return the outputs in order.

        Arrays of the declared dtypes and shapes go straight to the engine. All else is checked, converted or refused
        by the graph's own rules, for which the package is opened in full the first time.

        Raises:
            InputError: an input is missing, unknown, or of another shape or dtype.
            EngineError: the run failed.
        """
        quick = self._quick
        results = None if quick is None else quick.run(inputs)
        return self.compiled.run(inputs) if results is None else results

    @property
    def runner(self) -> GraphDevices:
        """The package opened in full, on every device; opened at the first access.

        Raises:
            IntegrityError: another package is at the path than the one it was started with.
        """
        with self._lock:
            if self._runner is None:
                from rlx_ort.deploy.open import open_package

                self._runner = runner = (self._opens or open_package)(self.path, **self._expected)
                self._expected["sha256"] = runner.package_sha256
            return self._runner

    @property
    def golden_inputs(self) -> list[dict[str, Any]]:
        """The inputs of the package's golden cases, verified as they are read."""
        if self.index is not None and not self.index["golden"]["cases"]:
            return []
        from rlx_ort.deploy.package import Package

        with Package(self.path, sha256=self._expected["sha256"]) as package:
            return [package.arrays(case.inputs) for case in package.cases]

    @property
    def compiled(self) -> CompiledGraph:
        """The graph on the device, with everything a `CompiledGraph` can; opens the package in full."""
        runner = self.runner
        with self._lock:
            self.end_quick()  # its threads go to the session that is opened now
            if self._compiled is None:
                self._compiled = runner.compile(self.device)
            return self._compiled

    def close(self) -> None:
        """Close the sessions; runs in progress finish. Closing twice is harmless."""
        with self._lock:
            self.end_quick()
            runner, self._runner, self._compiled = self._runner, None, None
        if runner is not None:
            runner.close()

    def __enter__(self) -> StartedPackage:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def end_quick(self) -> None:
        """Run on the package that is opened in full from now on; runs in progress finish."""
        quick, self._quick = self._quick, None
        if quick is not None:
            quick.close()
