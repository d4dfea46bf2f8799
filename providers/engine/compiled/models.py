"""Opens sessions through the compile cache: models optimised once, or a folder a provider keeps itself.

Entries are not shared between providers: a model that WebGPU optimised has operators that the CPU does not know, and
one in the CPU's blocked layout stays on the CPU elsewhere. They hold the weights as they were, so the weights are part
of the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlx_ort import kept
from rlx_ort.errors import EngineError, RlxError
from rlx_ort.options.compile_options import CacheUse, CompileOptions, OptimizationLevel, WeightSharing
from rlx_ort.providers.base import SessionRequest
from rlx_ort.providers.engine.compiled.store import (
    MODEL_FILE,
    SCHEMA,
    CacheKey,
    CompileStore,
    Entry,
    cpu_facts,
    default_store,
    use_of,
)
from rlx_ort.providers.engine.injection import external_tensors
from rlx_ort.providers.engine.recipe import Keeps, SessionRecipe
from rlx_ort.providers.plugins import plugin_for
from rlx_ort.storage import read_regular

if TYPE_CHECKING:
    from rlx_ort.ir.tensor import TensorData

_log = logging.getLogger("rlx_ort.cache")

_Opened: TypeAlias = tuple[Any, list[Any]]
"""ONNX Runtime's session, and the memory it borrows."""

_NOT_OF_THE_MODEL = ("session.intra_op", "session.inter_op", "session.use_per_session_threads")

_DIGESTS = "digests"  # folder
_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")
_warned: set[str] = set()
_BLOB = re.compile(r"\|(\d+);\d+;")  # of `kernel+hash|offset;bytes;flags|...`
_ALIGNMENT = 64
_watchers: list[list[Opening]] = []


@dataclass(frozen=True)
class Opening:
    """A session that was opened through the cache, and the entry it came from."""

    recipe: SessionRecipe
    request: SessionRequest
    entry: Entry


def use_for(recipe: SessionRecipe, options: CompileOptions) -> CacheUse:
    """Return how a session with these options uses the cache."""
    if recipe.keeps is Keeps.NOTHING and recipe.cache_options is None:
        return CacheUse.OFF
    if options.sharing is WeightSharing.PREPACKED and recipe.keeps is Keeps.PACKED:
        return CacheUse.ON
    return CacheUse(use_of(None if options.cache is None else options.cache.value))


@contextlib.contextmanager
def watched() -> Iterator[list[Opening]]:
    """Collect the sessions that are opened through the cache in a `with` block, by all threads."""
    openings: list[Opening] = []
    _watchers.append(openings)
    try:
        yield openings
    finally:
        _watchers[:] = [other for other in _watchers if other is not openings]


def open_cached(
    recipe: SessionRecipe, request: SessionRequest, engine: str, open_with: Callable[..., _Opened]
) -> _Opened | None:
    """Return a session that was opened from the cache; None when it is to be opened without.

    A missing entry is added, unless `CacheUse.FOUND` forbids it and the provider does not compile. That opens one more
    session, and writes the weights of the model once or twice. `engine` is name and version of ONNX Runtime.

    `open_with(recipe, request, saved=, prepare=)` opens a session: on the saved model as it is, if one is given, after
    `prepare` has changed the SessionOptions.

    Raises:
        RlxError: the request itself cannot be opened.
    """
    store = default_store()
    try:
        key = session_key(recipe, request, engine, store.root)
        quick = recipe.keeps in (Keeps.OPTIMIZED, Keeps.PACKED)
        if quick and use_for(recipe, request.options) is CacheUse.FOUND and store.find(key.digest) is None:
            return None
        if recipe.keeps is Keeps.NOTHING:
            entry = _found(store, key) or store.make(key, _label(request), lambda _: None, open_ended=True)
            folder = {} if recipe.cache_options is None else recipe.cache_options(str(entry.folder))
            opened = open_with(replace(recipe, options={**recipe.options, **folder}), request)
        else:
            entry, opened = _open_saved(store, key, recipe, request, open_with)
    except (OSError, EngineError) as err:
        # Not necessarily the cache's fault: opening without it, which the caller does next, shows which.
        level = logging.DEBUG if str(store.root) in _warned else logging.WARNING  # a service may open thousands
        _warned.add(str(store.root))
        message = "opened without the compile cache in %s: %s; RLX_CACHE_DIR names another folder"
        _log.log(level, message, store.root, err)
        return None
    for watcher in _watchers:
        watcher.append(Opening(recipe, request, entry))
    return opened


def session_key(recipe: SessionRecipe, request: SessionRequest, engine: str, root: Path) -> CacheKey:
    """Return the key of a session. Reads the weights; see `weights_digest`."""
    options, model = request.options, request.model
    plugin = plugin_for(recipe.ep_name) if recipe.ep_devices else None
    parts = {
        "model": hashlib.sha256(model.model_bytes(request.weights)).hexdigest(),
        "weights": weights_digest(external_tensors(model, request.weights), root),
        "provider": recipe.ep_name,
        "form": "2",  # without misaligned packed weights
        "engine": engine,
        "optimization": options.optimization.value,
        "dims": _text(options.dims),
        "provider_options": _text(recipe.provider_options(options)),
        "helpers": _text({name: dict(given) for name, given in recipe.helpers}),
        "session_config": _text(
            {k: v for k, v in options.session_config.items() if not k.startswith(_NOT_OF_THE_MODEL)}
        ),
        **cpu_facts(),
    }
    if recipe.leaves_out:
        parts["leaves_out"] = " ".join(recipe.leaves_out)
    if plugin is not None:
        parts["plugin"] = f"{plugin.distribution} {plugin.version}"
    if recipe.keeps is not Keeps.PACKED:
        from rlx_ort.providers.registry import default_registry

        availability = default_registry().availability(request.device)  # probed before anything was compiled for it
        hardware = f"{availability.hardware} {availability.identity}".strip()
        parts |= {"device": request.device.label, "hardware": hardware, "driver": availability.driver}
    for number, library in enumerate(options.custom_op_libraries):
        parts[f"custom_ops_{number}"] = hashlib.sha256(read_regular(library)).hexdigest()
    return CacheKey(parts)


def _found(store: CompileStore, key: CacheKey) -> Entry | None:
    begun = time.perf_counter()
    entry = store.find(key.digest)
    if entry is not None:
        took_s = time.perf_counter() - begun
        _log.debug("the compile cache has entry %s of %s, found in %.3g s", key.digest, entry.label, took_s)
    return entry


def _open_saved(
    store: CompileStore,
    key: CacheKey,
    recipe: SessionRecipe,
    request: SessionRequest,
    open_with: Callable[..., _Opened],
) -> tuple[Entry, _Opened]:
    """Open the saved model, made if missing; one that ONNX Runtime refuses is made again, once."""

    def fill(folder: Path) -> None:
        # Profiling is of the session that runs, and the file is packed whether or not this session wants that.
        plain = request.options.with_(profile_prefix=None, sharing=WeightSharing.PREPACKED)
        changed = replace(request, options=plain)
        session, memory = open_with(recipe, changed, prepare=lambda options: _save_to(options, folder, recipe.keeps))
        del session  # before the memory that it borrows
        del memory
        if not (folder / MODEL_FILE).is_file():
            raise EngineError(f"{recipe.ep_name} compiled nothing that can be kept")
        if recipe.keeps is Keeps.PACKED:
            drop_misaligned(folder / MODEL_FILE)

    loads_as = replace(request, options=request.options.with_(optimization=OptimizationLevel.OFF))
    for attempt in (1, 2):
        saved = _found(store, key)
        if saved is not None:
            _vouch(request)
        entry = saved or store.make(key, _label(request), fill)
        try:
            return entry, open_with(recipe, loads_as, saved=entry.folder / MODEL_FILE)
        except RlxError as err:
            store.drop(key.digest)
            if attempt == 2:
                raise EngineError(f"the saved model does not open: {err}") from err
            _log.warning("the compile cache drops entry %s of %s: %s", key.digest, entry.label, err)
    raise AssertionError("unreachable")


def _vouch(request: SessionRequest) -> None:
    """Check the weights that a saved model stands for by their promised digests, where nobody has read them yet.

    Raises:
        IntegrityError: those of a package were changed.
    """
    tensors: Iterable[Any] = external_tensors(request.model, request.weights).values()
    for vouch in {tensor.vouch for tensor in tensors if hasattr(tensor, "vouch") and not tensor.is_verified}:
        vouch()


def _save_to(options: Any, folder: Path, keeps: Keeps) -> None:
    """Make a session write the model that it opens, in the provider's form."""
    if keeps is Keeps.CONTEXT:
        path = str(folder / MODEL_FILE)
        entries = {"ep.context_enable": "1", "ep.context_file_path": path, "ep.context_embed_mode": "0"}
    else:
        write_to(options, folder / MODEL_FILE, "weights.bin")
        packed = keeps is Keeps.PACKED
        entries = {"session.save_external_prepacked_constant_initializers": "1"} if packed else {}
    for name, value in entries.items():
        options.add_session_config_entry(name, value)


def drop_misaligned(path: Path) -> None:
    """Remove a saved model's entries of packed weights that begin at no multiple of 64 bytes in their file.

    ONNX Runtime 1.31 puts packed weights under 1 MiB right behind their tensor, maps the file, and reads them with
    instructions that need aligned memory, which ends the process. Without an entry it packs the tensor itself.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    dropped = 0
    for tensor in model.graph.initializer:
        for place in reversed(range(len(tensor.external_data))):
            entry = tensor.external_data[place]
            offsets = [int(offset) for offset in _BLOB.findall(entry.value)]
            if entry.key.startswith("prepacked_") and any(offset % _ALIGNMENT for offset in offsets):
                del tensor.external_data[place]
                dropped += 1
    if dropped:
        path.write_bytes(model.SerializeToString())


def write_to(options: Any, path: Path, weights: str) -> None:
    """Make a session write the model that it optimises, with its weights in a file of this name beside it, if any."""
    options.optimized_model_filepath = str(path)
    if weights:
        key = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{key}_file_name", weights)
        # Smaller tensors stay in the model, where ONNX Runtime's shape logic sees them.
        options.add_session_config_entry(f"{key}_min_size_in_bytes", "1024")


def _label(request: SessionRequest) -> str:
    return f"{request.model.model.graph.name or 'model'} on {request.device.label}"


def _text(values: Mapping[str, object]) -> str:
    return json.dumps({str(name): value for name, value in values.items()}, sort_keys=True, default=str)


def weights_digest(weights: Mapping[str, TensorData], root: Path) -> str:
    """Return the SHA-256 of all tensors: names, dtypes, shapes, and bytes or their digests.

    Tensors of a package have digests that their bytes must match. All others are read, at about 1.5 GB/s; those of
    unchanged files once, since the digest is kept in `root` by the file's device, id, size and time of change.
    """
    whole = hashlib.sha256()
    by_file: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, tensor in sorted(weights.items()):
        whole.update(f"{name}\0{tensor.dtype.value}{list(tensor.shape)}\0".encode())
        promised = getattr(tensor, "sha256", None)  # `_vouch` checks it, or whoever reads the bytes
        if isinstance(promised, str):
            whole.update(promised.encode())
            continue
        source = tensor.source
        if source is None or not source.unchanged:
            whole.update(_bytes_of(tensor))
        else:
            by_file.setdefault((source.path, source.stamp), []).append(name)
    for (_, stamp), names in sorted(by_file.items()):
        whole.update(_remembered(stamp, names, weights, root).encode())
    return whole.hexdigest()


def _remembered(stamp: tuple[int, ...], names: list[str], weights: Mapping[str, TensorData], root: Path) -> str:
    ranges = [(source.offset, weights[name].nbytes) for name in names if (source := weights[name].source) is not None]
    memo = root / _DIGESTS / f"{kept.digest_of((stamp, ranges))}.json"
    known = kept.read(memo, SCHEMA, lambda document: _HEXADECIMAL.fullmatch(document["sha256"]))
    if known is not None:
        return known[0]
    hashed = hashlib.sha256()
    for name in names:
        hashed.update(_bytes_of(weights[name]))
    digest = hashed.hexdigest()
    kept.write(memo, SCHEMA, {"sha256": digest})
    return digest


def _bytes_of(tensor: TensorData) -> bytes | memoryview:
    if tensor.buffer.dtype == object:
        return "\0".join(str(item) for item in tensor.buffer).encode()
    return tensor.buffer.data
