"""The limits of the versions of ONNX Runtime's core: session config keys, the newest ai.onnx opset and IR version.

ONNX Runtime ignores a config key that it does not read, without a word, so every key is looked up here. The facts are
data, one file of `providers/cores/` a minor version, which `scripts/core_facts.py` reads from the released packages. A
file has the keys that the version before lacks, and those that this version has no more.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_FILE_NAME = re.compile(r"(\d+)\.(\d+)\.toml")


class Core(NamedTuple):
    """The limits of a minor version of ONNX Runtime's core.

    Attributes:
        opset: the newest opset of ai.onnx.
        ir_version: the newest IR version.
        config_keys: the keys of session config entries that the core, or a plugin, reads.
    """

    version: tuple[int, int]
    opset: int
    ir_version: int
    config_keys: frozenset[str]

    @property
    def name(self) -> str:
        """The version as text, such as `1.32`."""
        return f"{self.version[0]}.{self.version[1]}"


def core_of(version: tuple[int, ...] | None) -> Core:
    """Return the facts of the newest known version that is not newer than this one, else of the oldest.

    Without a version, as where no ONNX Runtime is installed, the newest counts.
    """
    known = _versions()
    return _read(next((minor for minor in reversed(known) if version is None or minor <= version[:2]), known[0]))


def unknown_core_note(version: tuple[int, ...] | None) -> str:
    """Return an addition to messages about a core if the core is newer than all that are known here, else nothing."""
    if version is None or version[:2] <= _versions()[-1]:
        return ""
    return f" (the newest that this rlx_ort knows; {'.'.join(map(str, version))} is installed)"


def known_cores() -> tuple[Core, ...]:
    """Return the facts of all known versions, oldest first; reading them takes about 0.1 s, once."""
    return tuple(map(_read, _versions()))


@functools.cache
def _versions() -> tuple[tuple[int, int], ...]:
    matches = [match for entry in _folder().iterdir() if (match := _FILE_NAME.fullmatch(entry.name))]
    return tuple(sorted((int(match[1]), int(match[2])) for match in matches))


@functools.cache
def _read(version: tuple[int, int]) -> Core:
    facts = _table(f"{version[0]}.{version[1]}.toml")
    older = [known for known in _versions() if known < version]
    before = _read(older[-1]).config_keys if older else frozenset(_table("plugins.toml")["config_keys"])
    keys = before.difference(facts.get("removed_keys", ())).union(facts["config_keys"])
    return Core(version, facts["opset"], facts["ir_version"], keys)


def _table(name: str) -> dict[str, Any]:
    import tomllib  # sessions without config entries need no table

    return tomllib.loads((_folder() / name).read_text(encoding="utf-8"))


def _folder() -> Traversable:
    import importlib.resources

    return importlib.resources.files("rlx_ort.providers") / "cores"
