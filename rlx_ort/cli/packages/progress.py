"""Progress of the subcommands that read or write every byte of a package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlx_ort.cli.show import binary_size

__all__ = ["counted"]


@contextmanager
def counted(text: str) -> Iterator[Callable[[int], object] | None]:
    """Give a function that takes bytes done and shows their sum behind a text, or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    done = 0
    with Console(stderr=True, markup=False, highlight=False).status(text) as status:

        def add(count: int) -> None:
            nonlocal done
            done += count
            status.update(f"{text}: {binary_size(done)}")

        yield add
