"""Files that take their place together: made in a hidden folder beside it, and moved when all is well."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlx_ort.errors import ConversionError

__all__ = ["Staging", "refuse_existing", "staging"]

_NAME = re.compile(r"\.(?P<process>\d+)-[0-9a-f]{16}\.converting")


class Staging:
    """A folder to write in, and the way from there to the final place.

    Attributes:
        path: where to write the main file, under its final name; files beside it come along.
    """

    def __init__(self, folder: Path, target: Path) -> None:
        self.path = folder / target.name
        self._folder = folder
        self._target = target

    def publish(self, files: Sequence[Path], *, overwrite: bool) -> list[Path]:
        """Move files to the target's folder, the main one last; what was there is put back when a move fails.

        A reader sees the main file of before or of now, whole in both cases; the files it refers to are there first.

        Raises:
            ConversionError: a file is there already and may not be replaced, or cannot be moved.
        """
        order = sorted(files, key=lambda file: file == self.path)
        places = [self._target.parent / file.relative_to(self._folder) for file in order]
        refuse_existing(places, overwrite=overwrite)
        saved = self._folder / ".replaced"
        saved.mkdir()
        with contextlib.ExitStack() as undo:
            try:
                for file, place in zip(order, places, strict=True):
                    place.parent.mkdir(parents=True, exist_ok=True)
                    if file != self.path:  # the last one needs no way back
                        self._prepare_undo(place, saved, undo)
                    file.replace(place)
            except OSError as err:
                hint = "on Windows no process may have the old file open" if os.name == "nt" else "check its rights"
                raise ConversionError(f"{self._target} cannot be put in place: {err}; {hint}") from err
            undo.pop_all()
        return [self._target, *(place for place in places if place != self._target)]

    @staticmethod
    def _prepare_undo(place: Path, saved: Path, undo: contextlib.ExitStack) -> None:
        if place.exists():
            backup = saved / place.name
            place.replace(backup)
            undo.callback(backup.replace, place)
        else:
            undo.callback(place.unlink, missing_ok=True)


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Staging]:
    """Give a hidden folder beside a target, on the same file system; it is gone afterwards, whatever happens.

    Folders that a killed process left for this target are removed.

    Raises:
        ConversionError: the folder cannot be made.
    """
    _remove_abandoned(target)
    folder = target.parent / f".{target.name}.{os.getpid()}-{os.urandom(8).hex()}.converting"
    try:
        folder.mkdir()
    except OSError as err:
        raise ConversionError(f"{target} cannot be written: {err}; give a target in a folder that exists") from err
    try:
        yield Staging(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_existing(places: Sequence[Path], *, overwrite: bool) -> None:
    """Return if no file is in the way.

    Raises:
        ConversionError: one is, and may not be replaced; or a folder is.
    """
    for place in places:
        if place.is_dir():
            raise ConversionError(f"{place} is a folder; give the name of a file")
        if place.exists() and not overwrite:
            raise ConversionError(f"{place} exists and was left as it is; give --force (overwrite=True) to replace it")


def _remove_abandoned(target: Path) -> None:
    import psutil

    prefix = f".{target.name}"
    with contextlib.suppress(OSError):
        for folder in target.parent.iterdir():
            match = _NAME.fullmatch(folder.name.removeprefix(prefix)) if folder.name.startswith(prefix) else None
            if match is not None and not psutil.pid_exists(int(match["process"])):
                shutil.rmtree(folder, ignore_errors=True)
