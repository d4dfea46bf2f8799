"""The status page: one self-contained document that reads the server's own statistics every two seconds."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rlx_ort</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left }
.off { color: #c33 } .note { opacity: .7 }
</style></head><body>
<h1>rlx_ort <span id="version" class="note"></span></h1>
<p id="state" role="status">Reading...</p>
<table><thead><tr><th>model</th><th>version</th><th>state</th><th>requests</th><th>per second</th><th>failed</th>
<th>mean latency, ms</th><th>in queue, ms</th><th>rows a batch</th></tr></thead><tbody id="models"></tbody></table>
<script>
const before = new Map();
const cell = (row, text, name = "") => Object.assign(row.insertCell(), {textContent: text, className: name});
async function read() {
  try {
    const [server, index, stats] = await Promise.all([
      fetch("v2").then(r => r.json()),
      fetch("v2/repository/index", {method: "POST", body: "{}"}).then(r => r.json()),
      fetch("v2/models/stats").then(r => r.json())]);
    document.getElementById("version").textContent = server.version;
    const found = new Map(stats.model_stats.map(s => [s.name + "/" + s.version, s]));
    const body = document.getElementById("models"), now = performance.now();
    body.replaceChildren();
    for (const entry of index) {
      const row = body.insertRow(), key = entry.name + "/" + entry.version, s = found.get(key);
      cell(row, entry.name); cell(row, entry.version);
      cell(row, entry.state === "READY" ? "ready" : entry.reason || "loading", entry.state === "READY" ? "" : "off");
      if (!s) continue;
      const done = s.inference_stats.success, last = before.get(key) || {count: done.count, at: now - 1e9};
      const rows = s.batch_stats.reduce((sum, b) => sum + b.batch_size * b.compute_infer.count, 0);
      const mean = ns => done.count ? (ns / done.count / 1e6).toFixed(2) : "-";
      cell(row, done.count); cell(row, ((done.count - last.count) / (now - last.at) * 1e3).toFixed(1));
      cell(row, s.inference_stats.fail.count); cell(row, mean(done.ns)); cell(row, mean(s.inference_stats.queue.ns));
      cell(row, s.execution_count ? (rows / s.execution_count).toFixed(1) : "-");
      before.set(key, {count: done.count, at: now});
    }
    document.getElementById("state").textContent = index.length + " models";
  } catch (error) { document.getElementById("state").textContent = "No answer from the server: " + error }
}
read(); setInterval(read, 2000);
</script></body></html>
"""
"""The document; it needs no other file."""
