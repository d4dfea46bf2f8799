"""`rlx-ort genai FOLDER`: rank the devices for a language model, and let it write a text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import rlx_ort
from rlx_ort.cli import options, show
from rlx_ort.cli.show import binary_size, duration, emit, note, print_piece, progress

if TYPE_CHECKING:
    from rlx_ort.genai import Choice, GenaiCandidate, LanguageModel

_COLUMNS = (
    *("variant", "device", "available", "blocker", "prefill_ns", "step_ns", "total_ns", "nodes", "cpu_nodes"),
    *("cpu_compute", "engines", "not_genai", "profile_source"),
)
_BY = {"genai": "onnxruntime-genai", "rlx_ort": "the decode loop of rlx_ort"}


def _ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of tokens such as 12,7,430") from None


@options.command("genai")
def command(
    folder: Path = options.argument(type=options.FOLDER),
    device: str | None = options.device("Use this device, or fail."),
    policy: rlx_ort.DevicePolicy = options.policy(),
    engine: str = options.choice(
        "--engine",
        "The engine: onnxruntime-genai, the decode loop of this package, or whichever of the two works first.",
        "auto genai rlx_ort",
        default="auto",
    ),
    prompt_tokens: int | None = options.whole(
        "--prompt-tokens", "Length of the prompt, in tokens, to rank for. Default: 256.", least=1
    ),
    new_tokens: int | None = options.whole(
        "--new-tokens", "Number of new tokens to rank for and to generate. Default: 128.", least=1
    ),
    max_length: int = options.whole("--max-length", "Capacity of the cache, in tokens.", least=2, default=2048),
    strict: bool | None = options.option(
        "--strict/--assisted",
        "Whether every node must be on the device, or the CPU may run any. Default: the CPU may run nodes that compute "
        "masks and positions, and any node if the device is chosen automatically.",
        default=None,
    ),
    prompt: str | None = options.option("--prompt", "The prompt, as text."),
    ids: list[int] | None = options.option(
        "--ids", "The prompt, as token ids such as 12,7,430.", read=_ids, metavar="TOKENS"
    ),
    trusted: tuple[Path, ...] = options.TRUST_LINKS,
    all_rows: bool = options.ALL_ROWS,
    as_json: bool = options.AS_JSON,
) -> None:
    """Rank the devices for a language model, and let it write a text.

    FOLDER has a genai_config.json, or folders that do: the variants of one model. Without --prompt or --ids nothing is
    opened. Text is written as it is made; Ctrl-C ends it.
    """
    if prompt is not None and ids is not None:
        raise click.UsageError("--prompt and --ids exclude each other")
    from rlx_ort import genai

    with progress("asking each device"):
        choice = genai.rank(
            folder,
            policy,
            rlx_ort.CompileOptions(placement=options.placement_of(strict)),
            device=None if device is None else rlx_ort.parse_device(device),
            engine=engine,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            trusted_links=trusted,
        )
    best = choice.best()  # an error if there is none
    document = _document(folder, choice, max_length)
    if prompt is None and not ids:
        emit(document, as_json, lambda _: _print(choice, max_length, engine, all_rows))
        return
    if not as_json:
        _print(choice, max_length, engine, all_rows)
    if prompt is not None:  # before a large model is opened for nothing
        genai.tokenizer_of(choice.variants[best.variant].config.folder, trusted)
    with progress("opening the model"):
        model = genai.LanguageModel(choice, max_length, trusted)
    with model:
        for row, name, reason in model.refused:
            note(f"{_BY[name]} refused {_named(row)}: {reason}")
        note(f"on {model.chosen.device.label}, by {_BY[model.engine]}; {_placed(model)}")
        tokens = model.tokenizer.encode(prompt) if prompt is not None else ids or []
        written: list[int] = []
        began = time.perf_counter()
        try:
            _write(model, tokens, choice.sizes.new, written, as_text=ids is None, quiet=as_json)
        finally:
            seconds = time.perf_counter() - began
            speed = f"{len(written)} tokens in {seconds:.3g} s after a prompt of {len(tokens)}"
            note(f"{speed}: {len(written) / seconds:.3g} tokens per second")
    if as_json:
        text = "".join(map(model.tokenizer.pieces(), written)) if ids is None else None
        run = {"device": model.chosen.device.label, "engine": model.engine, "placement": _placed(model)}
        document |= {"run": {**run, "prompt": tokens, "tokens": written, "text": text, "seconds": seconds}}
        emit(document, as_json)


def _write(
    model: LanguageModel, tokens: list[int], count: int, written: list[int], *, as_text: bool, quiet: bool
) -> None:
    """Let the model go on from tokens: add its tokens to a list and, unless quiet, print them one by one."""
    piece = model.tokenizer.pieces() if as_text else lambda token: f"{token} "
    try:
        for token in model.generate(tokens, count):
            written.append(token)
            if not quiet:
                print_piece(piece(token))
    finally:
        if not quiet:
            print_piece("\n")


def _placed(model: LanguageModel) -> str:
    """Return where the nodes are: as read from the session, else as the device was asked before."""
    placement = model.placement
    if placement is None:
        return f"judged placement, as onnxruntime-genai reports none: {_judged(model.chosen)}"
    nodes = ", ".join(f"{len(nodes)} on {provider}" for provider, nodes in placement.nodes_by_ep.items())
    return f"nodes: {nodes}"


def _named(row: GenaiCandidate) -> str:
    return f"{row.variant} on {row.device.label}" if row.variant else row.device.label


def _judged(row: GenaiCandidate) -> str:
    if not row.cpu_nodes:
        return f"all {row.nodes} nodes on {row.device.label}"
    what = f"{len(row.cpu_compute)} of them with floats" if row.cpu_compute else "masks and positions"
    return f"{row.nodes - row.cpu_nodes} nodes on {row.device.label}, {row.cpu_nodes} on the CPU ({what})"


def _document(folder: Path, choice: Choice, max_length: int) -> dict[str, Any]:
    best = choice.ranked[0] if choice.ranked else None
    rows = [{name: getattr(row, name) for name in _COLUMNS} | {"device": row.device.label} for row in choice.candidates]
    return {
        "folder": str(folder),
        "prompt_tokens": choice.sizes.prompt,
        "new_tokens": choice.sizes.new,
        "chosen": None if best is None else {"variant": best.variant, "device": best.device.label},
        "cache_bytes": None if best is None else best.cache_bytes * min(max_length, _context(choice, best)),
        "candidates": rows,
        "unreadable": [{"variant": name, "reason": reason} for name, reason in choice.unreadable],
        "notes": choice.notes,
    }


def _context(choice: Choice, row: GenaiCandidate) -> int:
    return choice.variants[row.variant].config.context_length


def _print(choice: Choice, max_length: int, engine: str, all_rows: bool) -> None:
    from rlx_ort.providers.registry import availability, same_hardware

    best = choice.best()
    length = min(max_length, _context(choice, best))
    config = choice.variants[best.variant].config
    show.print_facts(
        [
            ("model", f"{config.kind}, {config.layers} layers, {config.context_length} tokens of context"),
            ("ranked for", f"{choice.sizes.prompt} tokens of prompt, {choice.sizes.new} new tokens"),
            ("chosen", f"{_named(best)}, by {_BY[best.engines[0]]}: {_judged(best)}"),
            ("cache", f"{binary_size(best.cache_bytes * length)} for {length} tokens"),
        ]
    )
    ranked = choice.ranked
    columns = ("variant", "device", "prompt", "tokens/s", "text", "on CPU", "by")
    table = [
        (
            *(row.variant, row.device.label, duration(row.prefill_ns)),
            *("-" if row.tokens_per_s is None else f"{row.tokens_per_s:.3g}", duration(row.total_ns)),
            *(f"{row.cpu_nodes} of {row.nodes}" if row.cpu_nodes else "", ", ".join(row.engines)),
        )
        for row in ranked
    ]
    # Without variants the device comes first, as the first column is repeated where a table is broken.
    first = 0 if any(row.variant for row in ranked) else 1
    show.print_table(columns[first:], [row[first:] for row in table])
    blocked = [row for row in choice.candidates if row.blocker is not None]
    seen = {(row.variant, device) for row in ranked for device in same_hardware(row.device)}
    for row in blocked:
        if row.available and (all_rows or (row.variant, row.device) not in seen):
            show.print_wrapped(f"{_named(row)} refused: {row.blocker}")
            seen.update((row.variant, device) for device in same_hardware(row.device))
    away = [row.device for row in blocked if not row.available and row.variant == best.variant]
    show.print_rest("not here", [(d.label, availability(d).reason, availability(d).remedy) for d in away], all_rows)
    for name, reason in choice.unreadable:
        note(f"{name} cannot be read: {reason}")
    if engine == "auto":
        for reason in dict.fromkeys(row.not_genai for row in ranked if row.not_genai):
            note(f"by the decode loop alone: {reason}")
    for text in choice.notes:
        note(text)
    options.note_shipped(row.device.label for row in ranked if row.profile_source.startswith("default"))
