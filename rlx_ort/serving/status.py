"""The status page: one self-contained document that reads the server's own statistics every two seconds."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rlx_ort</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; background: Canvas; color: CanvasText }
body { margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
.table { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .2rem .5rem; border-bottom: 1px solid #8884; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
button, input { font: inherit }
.why { max-width: 30rem; white-space: normal; text-align: left; opacity: .75 }
.off { color: light-dark(#b00, #f77) } .note { opacity: .75; font-weight: normal }
svg { vertical-align: middle; stroke: light-dark(#05a, #7bf); fill: none }
</style></head><body>
<h1>rlx_ort <span id="version" class="note"></span></h1>
<form id="ask" hidden><label>Token <input id="token" type="password" autocomplete="off" required></label>
<button>Show</button></form>
<p><span id="state" role="status">Reading...</span> <button id="pause" aria-pressed="false">Pause</button></p>
<div class="table" tabindex="0" role="region" aria-label="Models"><table><thead><tr><th scope="col">model</th>
<th scope="col">version</th><th scope="col">state</th><th scope="col">devices</th><th scope="col">requests</th>
<th scope="col">failed</th><th scope="col">waiting</th><th scope="col">per second</th><th scope="col">latency, ms</th>
<th scope="col">in queue, ms</th><th scope="col">rows a batch</th><th scope="col">last minute</th></tr></thead>
<tbody id="models"></tbody></table></div>
<script>
const get = id => document.getElementById(id), asksToken = ASKS_TOKEN, kept = "rlx_ort token";
const before = new Map(), configs = new Map(), unfolded = new Set(), shown = 30;
const cell = (row, text, name = "") => Object.assign(row.insertCell(), {textContent: text, className: name});
async function ask(path, method = "GET") {
  const headers = asksToken ? {Authorization: "Bearer " + sessionStorage.getItem(kept)} : {};
  const answer = await fetch(path, {method, headers, body: method === "POST" ? "{}" : undefined});
  if (answer.status === 401) {
    sessionStorage.removeItem(kept);
    throw "the token is wrong";
  }
  if (!answer.ok) throw path + ": " + answer.status;
  return answer;
}
function configOf(entry, key) {
  if (!configs.has(key)) {
    configs.set(key, null);  // it comes once all devices of the model are open
    ask("v2/models/" + [entry.name, "versions", entry.version].map(encodeURIComponent).join("/") + "/config")
      .then(r => r.json()).then(found => configs.set(key, found)).catch(() => configs.delete(key));
  }
  return configs.get(key);
}
function devices(cell, config, used) {
  const running = config ? config.instance_group.map(group => group.name) : used;
  const reasons = Object.entries((config && config.parameters) || {}).filter(([key]) => key.startsWith("not_used."));
  if (!reasons.length) return cell.textContent = running.join(", ") || "-";
  const details = cell.appendChild(document.createElement("details"));
  details.open = unfolded.has(cell.parentNode.cells[0].textContent);
  details.ontoggle = () => unfolded[details.open ? "add" : "delete"](cell.parentNode.cells[0].textContent);
  details.appendChild(document.createElement("summary")).textContent = running.join(", ") || "-";
  for (const [key, reason] of reasons) {
    const line = details.appendChild(document.createElement("div"));
    line.className = "why";
    line.textContent = "not " + key.slice("not_used.".length) + ": " + reason.string_value;
  }
}
function metrics(text) {
  const found = {waiting: {}, devices: {}};
  const line = /^rlx_inference_(pending_request_count|device_total){(.*)} (.*)$/gm;
  for (const [, name, labels, value] of text.matchAll(line)) {
    const label = Object.fromEntries([...labels.matchAll(/(\\w+)="([^"]*)"/g)].map(([, key, each]) => [key, each]));
    const key = label.model + "/" + label.version;
    if (name === "device_total") (found.devices[key] ||= []).push(label.device);
    else found.waiting[key] = value;
  }
  return found;
}
function line(values) {
  const most = Math.max(...values, 1e-9), step = 90 / (shown - 1), from = 90 - step * (values.length - 1);
  const points = values.map((value, at) => (from + at * step).toFixed(1) + "," + (19 - 18 * value / most).toFixed(1));
  return '<svg width="90" height="20" aria-hidden="true"><polyline points="' + points.join(" ") + '"/></svg>';
}
async function read() {
  get("ask").hidden = !asksToken || sessionStorage.getItem(kept) !== null;
  if (!get("ask").hidden) {
    get("state").textContent = "This server asks for a token.";
    get("models").replaceChildren();
    return;
  }
  try {
    const [server, index, stats, text] = await Promise.all([ask("v2").then(r => r.json()),
      ask("v2/repository/index", "POST").then(r => r.json()), ask("v2/models/stats").then(r => r.json()),
      ask("metrics").then(r => r.text())]);
    get("version").textContent = server.version;
    const found = new Map(stats.model_stats.map(s => [s.name + "/" + s.version, s])), more = metrics(text);
    const body = get("models"), now = performance.now();
    body.replaceChildren();
    for (const entry of index) {
      const row = body.insertRow(), key = entry.name + "/" + entry.version, s = found.get(key);
      cell(row, entry.name); cell(row, entry.version);
      cell(row, entry.state === "READY" ? "ready" : entry.reason || "loading", entry.state === "READY" ? "" : "off");
      if (!s) { configs.delete(key); continue; }
      const rows = s.batch_stats.reduce((sum, b) => sum + b.batch_size * b.compute_infer.count, 0);
      const done = s.inference_stats.success, count = done.count, queue = s.inference_stats.queue.ns;
      const is = {count, ns: done.ns, queue, rows, runs: s.execution_count, at: now, past: []};
      let last = before.get(key);
      if (last && count < last.count) configs.delete(key);  // it was loaded again
      if (!last || count < last.count) last = {...is, at: now - 1, past: []};
      const ratio = (part, whole, digits) => is[whole] > last[whole]
        ? ((is[part] - last[part]) / (is[whole] - last[whole])).toFixed(digits) : "-";
      const ms = part => count > last.count ? ((is[part] - last[part]) / (count - last.count) / 1e6).toFixed(2) : "-";
      is.past = [...last.past, Number(ms("ns")) || 0].slice(-shown);
      devices(row.insertCell(), configOf(entry, key), more.devices[key] || []); cell(row, count);
      cell(row, s.inference_stats.fail.count); cell(row, Number(more.waiting[key] || 0));
      cell(row, ((count - last.count) / (now - last.at) * 1e3).toFixed(1)); cell(row, ms("ns"));
      cell(row, ms("queue")); cell(row, ratio("rows", "runs", 1)); cell(row, "").innerHTML = line(is.past);
      before.set(key, is);
    }
    const ready = index.filter(entry => entry.state === "READY").length;
    get("state").textContent = ready + " of " + index.length + " models are ready.";
  } catch (error) {
    get("state").textContent = "No answer: " + error;
    if (asksToken && sessionStorage.getItem(kept) === null) get("ask").hidden = false;
  }
}
get("ask").onsubmit = event => {
  event.preventDefault();
  sessionStorage.setItem(kept, get("token").value);
  get("token").value = "";
  read();
};
const paused = () => get("pause").getAttribute("aria-pressed") === "true";
get("pause").onclick = () => get("pause").setAttribute("aria-pressed", !paused());
read(); setInterval(() => paused() || document.hidden || get("ask").hidden && read(), 2000);
</script></body></html>
"""
"""The document; it needs no other file. `ASKS_TOKEN` is `true` or `false`."""
