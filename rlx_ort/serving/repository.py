"""The models that a server holds by name: finding, opening, loading and unloading them.

A warmed package answers from the compile cache first, on the CPU and one request at a time. Meanwhile it is opened in
full; its imports happen then, since the process has to wait for every import before it is ready.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_ort.deploy.names import required_key
from rlx_ort.deploy.start import StartedPackage, quick_start
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError, RlxError, ServingError
from rlx_ort.resilience.limits import CancelToken
from rlx_ort.serving.budget import Budget
from rlx_ort.serving.history import History, Served
from rlx_ort.serving.models import ServedModel, opened_in_time
from rlx_ort.serving.options import ServeOptions

if TYPE_CHECKING:
    from rlx_ort.deploy.open import PackageDevices
    from rlx_ort.graph_devices import GraphDevices

_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
_MODEL_SUFFIXES = (".onnx", ".ortpackage")  # of models in folders; a graph's JSON is served if it is named itself
_PATIENCE_S = 5.0  # a model that takes longer does not keep the ones behind it waiting
_log = logging.getLogger(__name__)


@dataclass
class Entry:
    """A model of a repository: where its versions are, and those that are loaded.

    Attributes:
        paths: version -> its file or folder.
        loaded: version -> the model that answers.
        reason: why it is not loaded, empty if it is.
        changing: held while it is loaded or unloaded.
        openings: the calls that open its versions now.
    """

    paths: dict[str, Path]
    loaded: dict[str, ServedModel] = field(default_factory=dict)
    reason: str = ""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    openings: set[CancelToken] = field(default_factory=set)

    def end_openings(self) -> None:
        """Give up all calls that open it."""
        for opening in self.openings:
            opening.cancel()


class Repository:
    """The models that an operator named. No name of a request ever becomes a path.

    Args:
        sources: model files, packages, and folders that hold them; a folder may have Triton's layout,
            NAME/VERSION/model.onnx.
        options: how they are served.

    Raises:
        ConversionError: a source is no model, or its name cannot be served; or there is no model.
    """

    def __init__(self, sources: Sequence[Path], options: ServeOptions | None = None) -> None:
        self.options = options or ServeOptions()
        self.budget = Budget(self.options.most_held_bytes)
        self.history = History(lambda: (Served(model.key, model.statistics, model.devices) for model in self.models()))
        self._sources = list(sources)
        self._draining = False
        self._closing: set[asyncio.Future[None]] = set()
        self.entries: dict[str, Entry] = {}
        self._skipped: set[Path] = set()
        for source in self._sources:
            if _is_named_model(source):
                _model_name(source)
            elif not source.is_dir():
                raise ConversionError(f"{source} is neither a model nor a folder of models")
        for name, version, path in self._found():
            self.entries.setdefault(name, Entry({})).paths.setdefault(version, path)
        if not self.entries:
            raise ConversionError(f"there is no model in {', '.join(map(str, sources)) or 'the named sources'}")

    @property
    def ready(self) -> bool:
        """Whether every model that was named is loaded, and the server is not ending."""
        return not self._draining and all(entry.loaded for entry in self.entries.values())

    def drain(self) -> None:
        """Be not ready, and load no further model; those that are loaded answer until `close`."""
        self._draining = True
        for entry in self.entries.values():
            entry.end_openings()

    async def load_all(self, *, complete: bool = True) -> None:
        """Load every model; one that fails keeps its reason, and the others are loaded.

        One that takes longer than some seconds is opened beside those behind it.

        Without `complete`, packages that were started are opened in full once `complete` is called.
        """
        self.history.start()
        loads = []
        for name in list(self.entries):
            loads.append(load := asyncio.ensure_future(self._tried(name, complete)))
            await asyncio.wait((load,), timeout=_PATIENCE_S)
        await asyncio.gather(*loads)

    async def _tried(self, name: str, complete: bool) -> None:
        """Load a model, or log why it is not served."""
        try:
            await self._load(name, complete)
        except RlxError as err:
            _log.error("%s is not served: %s", name, err)
        except Exception as err:  # whatever it is, the others are loaded
            _log.error("%s is not served", name, exc_info=err)

    async def load(self, name: str) -> None:
        """Load the versions of a model that are on disk now; requests go to the old ones until then.

        Raises:
            ServingError: there is no such model (404), or it is refused.
            RlxError: it cannot be opened.
        """
        await asyncio.shield(self._load(name))  # a caller that goes away does not leave it half made

    def complete(self) -> None:
        """Begin to open packages in full that were started from the compile cache."""
        for entry in self.entries.values():
            for model in entry.loaded.values():
                model.complete(functools.partial(self._refused, entry, model))

    async def _load(self, name: str, complete: bool = True) -> None:
        entry = self.entries.get(name)
        if entry is None:
            self._paths_of(name)
            entry = self.entries.setdefault(name, Entry({}))
        made: dict[str, ServedModel] = {}
        async with entry.changing:
            try:
                if self._draining:
                    raise ServingError("the server is shutting down", 503)
                paths = self._paths_of(name)
                entry.paths = entry.paths | paths  # a version that cannot be opened is in the index with its reason
                for version, path in paths.items():
                    made[version] = await self._opened_in_time(entry, name, version, path)
            except Exception as err:  # raised again, once the versions that were opened are closed
                entry.reason = str(err) or type(err).__name__
                for model in made.values():
                    await model.close()
                raise
            old, entry.paths, entry.loaded, entry.reason = entry.loaded, paths, made, ""
        if complete:
            self.complete()
        for model in old.values():
            await model.close()

    def _paths_of(self, name: str) -> dict[str, Path]:
        """Return the versions of a model that are on disk now, at least one."""
        paths: dict[str, Path] = {}
        for each, version, path in self._found():
            if each != name:
                continue
            if version in paths:
                raise ConversionError(f"{path} and {paths[version]} are both version {version} of {name!r}")
            paths[version] = path
        if not paths:
            raise ServingError(f"there is no model {name!r} in the repository", 404)
        return paths

    async def _opened_in_time(self, entry: Entry, name: str, version: str, path: Path) -> ServedModel:
        entry.openings.add(opening := CancelToken())
        call = functools.partial(self._opened, name, version, path)
        try:
            return await opened_in_time(call, self.options.load_limit_s, opening, ServedModel.discard)
        finally:
            entry.openings.discard(opening)

    def _refused(self, entry: Entry, model: ServedModel, error: Exception) -> None:
        """Unload a package that cannot be opened in full."""
        _log.error("%s is not served any more: %s", model.name, error)
        if entry.loaded.get(model.version) is model:
            del entry.loaded[model.version]
            entry.reason = str(error)
            self._closing.add(closing := asyncio.ensure_future(model.close()))
            closing.add_done_callback(self._closing.discard)

    async def unload(self, name: str) -> None:
        """Stop serving a model once the requests that were accepted are answered.

        Raises:
            ServingError: there is no such model (404).
        """
        await asyncio.shield(self._unload(name))

    async def _unload(self, name: str) -> None:
        entry = self.entries.get(name)
        if entry is None:
            raise ServingError(f"there is no model {name!r} in the repository", 404)
        entry.end_openings()
        async with entry.changing:
            old, entry.loaded, entry.reason = entry.loaded, {}, "unloaded"
        for model in old.values():
            await model.close()

    async def close(self) -> None:
        """Drain and close every model."""
        self.drain()
        await self.history.stop()
        await asyncio.gather(*map(self.unload, list(self.entries)))
        await asyncio.gather(*self._closing)

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return a loaded model, its newest version by default.

        Raises:
            ServingError: there is none of that name or version (404), or it is not loaded (503).
        """
        entry = self.entries.get(name)
        if entry is None:
            raise ServingError(f"there is no model {name!r}; known: {', '.join(self.entries) or 'none'}", 404)
        if not entry.loaded:
            raise ServingError(f"model {name!r} is not ready: {entry.reason or 'it is being loaded'}", 503)
        if version and version not in entry.loaded:
            raise ServingError(f"model {name!r} has no version {version!r}; it has {', '.join(entry.loaded)}", 404)
        return entry.loaded[version or max(entry.loaded, key=_version_order)]

    def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        """Return the repository index of Triton's extension."""
        rows = []
        for name, entry in self.entries.items():
            for version in entry.paths:
                loaded = version in entry.loaded
                if loaded or not ready_only:
                    state = {"state": "READY" if loaded else "UNAVAILABLE", "reason": "" if loaded else entry.reason}
                    rows.append({"name": name, "version": version, **state})
        return rows

    def models(self) -> Iterator[ServedModel]:
        """Yield every loaded version of every model."""
        for entry in self.entries.values():
            yield from entry.loaded.values()

    def _found(self) -> Iterator[tuple[str, str, Path]]:
        """Yield name, version and path of every model of the sources; other files are logged once."""
        for source in self._sources:
            named = _is_named_model(source)
            for path in (source,) if named else self._listed(source):
                if named or path.suffix in _MODEL_SUFFIXES:
                    versions = [("1", path)]
                elif path.is_dir():
                    versions = [(version.name, file) for version in self._listed(path) for file in _file_of(version)]
                else:
                    versions = []
                if not versions:
                    continue
                try:
                    name = _model_name(path)
                except ConversionError as err:
                    self._skip(path, err)
                    continue
                for version, file in versions:
                    yield name, version, file

    def _listed(self, folder: Path) -> list[Path]:
        try:
            return sorted(folder.iterdir())
        except OSError as err:  # it went away, or may not be read
            self._skip(folder, err)
            return []

    def _skip(self, path: Path, why: Exception) -> None:
        if path not in self._skipped:
            self._skipped.add(path)
            _log.warning("%r is not served: %s", str(path), ascii(str(why))[1:-1])

    def _opened(self, name: str, version: str, path: Path) -> ServedModel:
        if not path.is_file() and not (path.is_dir() and path.suffix == ".ortpackage"):
            raise ConversionError(f"{path} is not a regular file; a pipe, a device or a folder is not read")
        options = self.options
        opened: GraphDevices | StartedPackage
        if path.suffix == ".ortpackage":
            if options.signed_only and options.require_signature is None:
                raise ServingError(f"{path.name}: only signed packages are served; give the key with --key", 403)
            opened = _started(path, options) or _package(options, path)
        elif options.signed_only:
            raise ServingError(f"{path.name} is not a package; only signed packages are served", 403)
        else:
            opened = _file(options, path)
        try:
            return ServedModel(name, version, opened, options)
        except BaseException:
            opened.close()
            raise


def _started(path: Path, options: ServeOptions) -> StartedPackage | None:
    """Return a package started from the compile cache; None if it was not warmed or must be opened in full first."""
    if required_key(options.require_signature) is not None or options.resilience is not None:
        return None
    if options.policy is not None and not options.policy.allows(Device.CPU):
        return None
    return quick_start(path, pack=False, opens=functools.partial(_package, options))


def _package(options: ServeOptions, path: Path, **expected: Any) -> PackageDevices:
    from rlx_ort.deploy.open import open_package
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.resilience.options import Resilience

    compiled = CompileOptions(spinning=False)
    resilience = options.resilience or Resilience()
    key = options.require_signature
    return open_package(path, options.policy, compiled, require_signature=key, resilience=resilience, **expected)


def _file(options: ServeOptions, path: Path) -> GraphDevices:
    from rlx_ort.deploy.open import load
    from rlx_ort.options.compile_options import CompileOptions, PlacementRule, Precision
    from rlx_ort.resilience.options import Resilience

    precision = Precision(options.precision)
    compiled = CompileOptions(precision=precision, placement=PlacementRule.ASSISTED, spinning=False)
    return load(path, options.policy, compiled, resilience=options.resilience or Resilience())


def _is_named_model(source: Path) -> bool:
    """Return whether a source is a model; of files any is, since it was named."""
    return source.suffix == ".ortpackage" or source.is_file()


def _file_of(version: Path) -> Iterator[Path]:
    """Yield the model of a folder that is a version."""
    if re.fullmatch(r"[0-9]{1,18}", version.name):
        files = [file for end in _MODEL_SUFFIXES if (file := version / f"model{end}").exists()]
        yield from files[:1]


def _model_name(path: Path) -> str:
    name = path.stem if path.is_file() or path.suffix in _MODEL_SUFFIXES else path.name
    if not _NAME.fullmatch(name):
        raise ConversionError(f"{path}: a served model is named by letters, digits, '.', '_' and '-'; rename it")
    return name


def _version_order(version: str) -> tuple[int, str]:
    return int(version), version
