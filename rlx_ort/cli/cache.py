"""`rlx-ort cache list | clear | clean | explain`: the compile cache, and why something was compiled again."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import binary_size, counted, emit, note, print_digests, print_facts, print_json, print_table

if TYPE_CHECKING:
    from rlx_ort.providers.engine.compiled.store import Explanation

_SHOWN_CHARACTERS = 80  # a digest is whole


@click.group("cache")
def command() -> None:
    """Show, clear, clean and explain the compile cache.

    It holds optimised models with their weights and compiled models of providers, for packages that were warmed and for
    sessions that ask. RLX_CACHE_DIR moves it, RLX_CACHE_LIMIT limits it, RLX_CACHE=off keeps packages from it.
    """


@options.command("list", command)
def list_entries(
    check: bool = options.flag("--check", "Read every byte, and drop entries that are damaged."),
    as_json: bool = options.AS_JSON,
) -> None:
    """List the entries, the one used last first."""
    from rlx_ort.providers.engine.compiled.store import default_store

    store = default_store()
    entries = store.entries()
    problems = {}
    if check:
        with counted("reading every entry", sum(entry.nbytes for entry in entries)) as step:
            for entry in entries:
                problems[entry.digest] = entry.problem(whole=True)
                if step is not None:
                    step(entry.nbytes)
        for digest, problem in problems.items():
            if problem and store.drop(digest):
                note(f"dropped {digest}: {problem}")
        entries = [entry for entry in entries if not problems[entry.digest]]
    total = sum(entry.nbytes for entry in entries)
    if as_json:
        dropped = [{"key": digest, "problem": problem} for digest, problem in problems.items() if problem]
        document = {"folder": str(store.root), "limit_bytes": store.limit, "total_bytes": total, "dropped": dropped}
        named = {"key": "digest", "model": "label", "bytes": "nbytes"}
        fields = named | {name: name for name in ("created_s", "used_s", "parts")}
        rows = [{key: getattr(entry, name) for key, name in fields.items()} for entry in entries]
        print_json(document | {"entries": rows})
        return
    print_facts([("folder", str(store.root)), ("size", f"{binary_size(total)} of {binary_size(store.limit)}")])
    if not entries:
        note("the cache is empty; `rlx-ort package warm` fills it")
        return
    table = []
    for entry in entries:
        facts = (entry.label, entry.parts.get("provider", ""), binary_size(entry.nbytes))
        table.append((*facts, _moment(entry.created_s), _moment(entry.used_s)))
    print_table(("model", "provider", "size", "made", "used"), table)
    print_digests([(entry.digest, entry.label) for entry in entries])


@options.command("clear", command)
def clear(as_json: bool = options.AS_JSON) -> None:
    """Delete every entry; those that a running program maps stay where the system keeps them open (Windows)."""
    from rlx_ort.providers.engine.compiled.store import default_store
    from rlx_ort.storage import cache_root, clear_unfinished

    store = default_store()
    freed, kept = store.clear()
    clear_unfinished(cache_root(), below=True)
    document = {"folder": str(store.root), "freed_bytes": freed, "kept": kept}
    emit(document, as_json, lambda _: print_facts([("freed", binary_size(freed)), ("in use, kept", len(kept))]))


@options.command("clean", command)
def clean(
    folders: tuple[Path, ...] = options.argument(nargs=-1, metavar="[FOLDER]...", type=options.FOLDER),
    as_json: bool = options.AS_JSON,
) -> None:
    """Delete the half-written files of killed processes: in the cache, and in each FOLDER and those below it.

    Such files are hidden and end in .partial or .converting. Those that a running process writes stay; those of another
    machine or container stay for a day. The next write into a folder deletes them as well.
    """
    from rlx_ort.storage import cache_root, clear_unfinished

    gone = [str(path) for folder in (cache_root(), *folders) for path in clear_unfinished(folder, below=True)]
    emit({"deleted": gone}, as_json, lambda _: print_facts([("deleted", len(gone))]))


@options.command("explain", command)
def explain_entry(
    subject: str = options.argument(metavar="MODEL|PACKAGE|KEY"),
    device: str = options.device("The device, of a model or package.", default="cpu"),
    dims: dict[str, int] = options.DIMS,
    key: Path | None = options.KEY,
    as_json: bool = options.AS_JSON,
) -> None:
    """Show whether a model is in the cache, and the changes since it was last compiled.

    A KEY of `cache list`, or its first digits, shows the same for an entry that is there.
    """
    from rlx_ort.providers.engine.compiled.store import CacheKey, default_store, explain

    entries = default_store().entries()
    path = Path(subject)
    if path.exists():
        from rlx_ort.execution.session import key_of_graph

        place = rlx_ort.parse_device(device)
        graph, settings = options.read_model(path, rlx_ort.CompileOptions(dims=dims), key)
        report = explain(key_of_graph(graph, place, settings), entries)
    else:
        matching = [entry for entry in entries if entry.digest.startswith(subject.lower())]
        if len(matching) != 1:
            what = "neither a file nor a key of the cache" if not matching else f"the prefix of {len(matching)} keys"
            raise click.BadParameter(
                f"{subject!r} is {what}; `rlx-ort cache list` shows them", param_hint="MODEL|PACKAGE|KEY"
            )
        report = explain(CacheKey(matching[0].parts), entries)
    document = {
        "key": report.digest,
        "cached": report.entry is not None,
        "nearest": None if report.nearest is None else report.nearest.digest,
        "changed": [change._asdict() for change in report.changed],
    }
    emit(document, as_json, lambda _: _print(report))


def _print(report: Explanation) -> None:
    state = "not in the cache" if report.entry is None else f"in the cache since {_moment(report.entry.created_s)}"
    print_facts([("key", report.digest), ("state", state)])
    if report.nearest is None:
        note("no earlier entry is of the same model or weights")
        return
    note(f"compared with {report.nearest.digest}, made {_moment(report.nearest.created_s)}")
    print_table(("what changed", "before", "now"), [(part, _cut(old), _cut(new)) for part, old, new in report.changed])


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
