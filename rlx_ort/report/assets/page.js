// The page: its charts, which Chart.js draws, its tables and its sections.

function chart(label, config) {
  const canvas = el("canvas", { role: "img", label });
  const start = () => new Chart(canvas, { ...config, options: { animation: false, maintainAspectRatio: false, color: css("--text"), ...config.options } });
  return { panel: el("div", { className: "chart" }, canvas), start };
}

const axis = (text, more = {}) => ({ title: { display: true, text, color: css("--dim") }, ticks: { color: css("--dim") }, grid: { color: css("--line") }, ...more });
const steps = (text) => axis(text, { type: "logarithmic", ticks: { color: css("--dim"), maxRotation: 0, callback: (value) => (/^[125]$/.test((value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toFixed(3).replace(/\.?0+$/, "")) ? `${+value.toPrecision(3)}` : null) } });
const series = () => ["--d0", "--d1", "--d2", "--d3", "--d4", "--hot"].map(css);

function partsChart(parts) {
  const set = (label, key, color) => ({ label, data: parts.slice(0, 12).map((part) => part[key] / 1e6), backgroundColor: color });
  return chart("Predicted and measured time of each part of a run, in ms; the table below has the numbers.", {
    type: "bar",
    data: { labels: parts.slice(0, 12).map((part) => part.part), datasets: [set("predicted", "predicted_ns", css("--d0")), set("measured", "measured_ns", css("--d1"))] },
    options: { indexAxis: "y", scales: { x: axis("ms a run"), y: axis("") } },
  });
}

function rooflineChart({ peak, bandwidth, total_ns, kinds, rates }) {
  const points = Object.values(kinds).flat();
  const knee = peak / bandwidth;
  const left = Math.min(knee / 30, ...points.map(([x]) => x)) / 2;
  const right = Math.max(knee * 10, ...points.map(([x]) => x)) * 2;
  const roof = { type: "line", label: `limit: ${peak.toPrecision(3)} GFLOP/s, ${bandwidth.toPrecision(3)} GB/s`, data: [[left, left * bandwidth], [knee, peak], [right, peak]].map(([x, y]) => ({ x, y })), borderColor: css("--text"), borderWidth: 1.5, pointRadius: 0 };
  const dots = Object.entries(kinds).map(([name, found], at) => ({ label: `${name}, ${Math.round((100 * sum(found.map(([, , ns]) => ns))) / total_ns)} %`, backgroundColor: `${series()[at]}bb`, data: found.map(([x, y, ns]) => ({ x, y, r: Math.max(22 * Math.sqrt(ns / total_ns), 3) })) }));
  return chart(`Roofline: ${rates} GFLOP/s of each kind of node by its operations per byte.`, {
    type: "bubble", data: { datasets: [...dots, roof] },
    options: { scales: { x: { ...steps("operations per byte read or written"), min: left, max: right }, y: steps("GFLOP/s") } },
  });
}

function timelineChart(view) {
  return chart("Timeline of the first run; the table beside it has the numbers.", {
    type: "bar",
    data: { labels: view.timeline.map((phase) => phase.name), datasets: [{ label: "first run", data: view.timeline.map((phase) => [phase.start_ns / 1e6, (phase.start_ns + phase.ns) / 1e6]), backgroundColor: css("--d2"), minBarLength: 3 }] },
    options: { indexAxis: "y", plugins: { legend: { display: false } }, scales: { x: axis("ms from the beginning"), y: axis("") } },
  });
}

function distributionChart(rows) { // the share of runs that took no longer than a time: percentiles are read off it
  const sets = rows.map((row, at) => {
    const times = [...row.times_ns].sort((a, b) => a - b);
    const points = times.map((ns, rank) => ({ x: ns / 1e6, y: (100 * (rank + 1)) / times.length }));
    return { label: row.device, data: [{ x: times[0] / 1e6, y: 0 }, ...points], stepped: "after", borderColor: series()[at % 6], backgroundColor: series()[at % 6], borderWidth: 2, pointRadius: 1.5 };
  });
  const times = rows.flatMap((row) => row.times_ns), wide = Math.max(...times) > 20 * Math.min(...times);
  return chart("Distribution: the share of runs that took no longer than a time; the table above has the percentiles.", {
    type: "line", data: { datasets: sets },
    options: { scales: { x: wide ? steps("ms a run") : axis("ms a run", { type: "linear" }), y: axis("% of the runs", { min: 0, max: 100 }) } },
  });
}

// --- the report

const percent = (share) => `${share > 0 && share < 0.005 ? "<1" : Math.round(100 * share)} %`;

// Where it runs, what it costs, and what would make it faster: sentences from the figures of the page.
function glance(report, view) {
  const spent = sum(view.nodes.map((node) => node.measured_ns));
  const elsewhere = view.nodes.filter((node) => node.ep !== view.ep).length;
  const where = [elsewhere ? `${view.nodes.length - elsewhere} of ${view.nodes.length} nodes on ${view.device}, ${elsewhere} on another device` : `all ${view.nodes.length} nodes on ${view.device}`,
    view.crossings.length ? `${view.crossings.length} values are copied between devices in each run` : "nothing is copied between devices"];
  if (view.hardware) where.push(view.hardware);
  const grouped = (key) => {
    const found = new Map();
    view.nodes.forEach((node) => found.set(key(node), (found.get(key(node)) ?? 0) + (node.measured_ns ?? 0)));
    return [...found].sort(([, a], [, b]) => b - a)[0];
  };
  const cost = [`${time(view.measured_ns)} a run${view.predicted_ns === null ? "" : `; ${time(view.predicted_ns)} were predicted`}`];
  if (spent) {
    const [op, ns] = grouped((node) => node.op);
    cost.push(`${op} takes ${percent(ns / spent)} of the time of all nodes`);
    const tops = view.groups.filter((group) => view.nodes[group.first].module.startsWith(group.label) && group.parent === null).map((group) => [group.label, sum(view.nodes.slice(group.first, group.first + group.count).map((node) => node.measured_ns))]).sort(([, a], [, b]) => b - a);
    if (tops.length > 1) cost.push(`${tops[0][0]} is the most expensive module, ${percent(tops[0][1] / spent)}`);
  }
  const faster = [];
  const others = report.devices.map((row) => [row, report.views.find((each) => each.device === row.device)?.measured_ns ?? row.predicted_ns]).filter(([row, ns]) => row.device !== view.device && !row.blocker && ns);
  const [best, bestNs] = others.sort(([, a], [, b]) => a - b)[0] ?? [];
  if (best && bestNs < 0.9 * view.measured_ns) faster.push(`${best.device} takes ${time(bestNs)}${report.views.some((each) => each.device === best.device) ? "" : ", as predicted"}`);
  const copied = sum(view.crossings.map((row) => row.predicted_ns));
  if (copied > 0.05 * view.measured_ns) faster.push(`copies between devices are ${percent(copied / view.measured_ns)} of a run: see what splits the graph`);
  if (report.splits.some((split) => split.device === view.device && split.repairs.length)) faster.push("an option moves more nodes to the device: see what splits the graph");
  const roof = view.roofline;
  if (roof?.total_ns && roof.rates === "measured") {
    const points = Object.values(roof.kinds).flat(), knee = roof.peak / roof.bandwidth;
    const slow = sum(points.filter(([x]) => x < knee).map(([, , ns]) => ns)) / roof.total_ns;
    const idle = sum(points.filter(([x, y]) => y < 0.3 * Math.min(roof.peak, x * roof.bandwidth)).map(([, , ns]) => ns)) / roof.total_ns;
    if (slow > 0.3) faster.push(`${percent(slow)} of the nodes' time is in nodes that memory limits: fewer bytes help, as f16 or int8 weights`);
    if (idle > 0.3) faster.push(`${percent(idle)} of the nodes' time is in nodes below a third of their limit: larger batches, or fused nodes, may help`);
  }
  const other = data.reports.find((each) => each !== report)?.views[0];
  if (other && other.measured_ns < 0.9 * view.measured_ns) faster.push(`the other report takes ${time(other.measured_ns)}, on ${other.device}`);
  if (!faster.length) faster.push(roof?.rates === "measured" ? "the nodes are near the limits of the device, and no other device is faster" : "nothing that the figures of this page show");
  const tile = (title, lines) => el("div", { className: "tile" }, el("h2", {}, title), ...lines.map((line, at) => el("p", at ? {} : { className: "lead" }, line)));
  return el("div", { className: "tiles" }, tile("Where it runs", where), tile("What it costs", cost), tile("What would make it faster", faster));
}

function devicesTable(report) {
  const views = new Map(report.views.map((view) => [view.device, view]));
  const columns = [
    ["device", (row) => row.device + (row.recommended ? " (chosen)" : "")],
    ["p50", (row) => row.p50_ns && time(row.p50_ns)], ["p90", (row) => row.p90_ns && time(row.p90_ns)], ["p99", (row) => row.p99_ns && time(row.p99_ns)],
    ["first run", (row) => row.first_run_ns && time(row.first_run_ns)], ["to open", (row) => row.create_ns && time(row.create_ns)],
    ["host memory", (row) => row.host_memory_bytes && bytes(row.host_memory_bytes)],
    ["measured", (row, view) => !row.p50_ns && view?.measured_ns && time(view.measured_ns)], ["predicted", (row, view) => (view?.predicted_ns ?? row.predicted_ns) && time(view?.predicted_ns ?? row.predicted_ns)],
    ["placed there", (row, view) => { const share = view?.placement_share ?? row.placement_share; return typeof share === "number" && percent(share); }],
    ["predicted from", (row) => row.profile_source], ["failure", (row) => row.open_error || row.failure],
  ];
  const all = report.devices.map((row) => columns.map(([, cell]) => cell(row, views.get(row.device)) || ""));
  const counted = report.devices.map((row, at) => (!row.blocker || views.has(row.device)) && all[at].slice(1).some(Boolean));
  const shown = all.filter((_, at) => counted[at]), used = columns.map((_, at) => shown.some((cells) => cells[at]));
  const blocked = report.devices.filter((row, at) => !counted[at] && row.blocker);
  const others = el("details", {}, el("summary", {}, `${blocked.length} other devices cannot be used`), table("", ["device", "why"], blocked.map((row) => [row.device, row.blocker])));
  return section("Devices", table(report.devices.some((row) => row.p50_ns) ? "many runs on each" : "one run on each", columns.filter((_, at) => used[at]).map(([name]) => name), shown.map((cells) => cells.filter((_, at) => used[at]))), ...(blocked.length ? [others] : []));
}

function splitsSection(report, view) {
  const children = [];
  if (view?.crossings.length) {
    const total = sum(view.crossings.map((row) => row.predicted_ns));
    children.push(table(`${view.crossings.length} values are copied in each run, which is predicted to take ${time(total)}`,
      ["value", "from and to", "size", "predicted"], view.crossings.map((row) => [row.value, row.to_device ? `host → ${view.device}` : `${view.device} → host`, bytes(row.nbytes), time(row.predicted_ns)])));
  }
  if (view?.added.length) {
    children.push(table("nodes that ONNX Runtime added", ["operator", "runs on", "number", "measured in all"], view.added.map((row) => [row.op, shortEp(row.ep), row.count, time(row.measured_ns)])));
  }
  for (const split of report.splits) {
    const named = split.nodes.slice(0, 5).join(", ") + (split.nodes.length > 5 ? ` and ${split.nodes.length - 5} more` : "");
    const repairs = split.repairs.length ? split.repairs.map((repair) => el("li", {}, "Tried, and the device takes them then: ", el("code", {}, repair)))
      : [el("li", {}, "No option that was tried moves them to the device. Let the CPU help, use another op in the model, or run on another device.")];
    children.push(el("div", {}, el("p", {}, el("strong", {}, `${split.device}: `), `${split.nodes.length} ${split.nodes.length === 1 ? "node" : "nodes"}: ${split.reason}`), el("p", { className: "dim" }, named), el("ul", {}, ...repairs)));
  }
  if (view && !view.crossings.length) children.unshift(el("p", {}, `Nothing is copied between devices in a run on ${view.device}.`));
  if (!children.length) children.push(el("p", {}, "No run, and no node that a device is known to refuse."));
  return section("What splits the graph, and how to repair it", ...children);
}

function partsSection(view) {
  const timed = view.parts.filter((part) => part.measured_ns !== null), rest = view.parts.filter((part) => part.measured_ns === null);
  const panel = partsChart(timed);
  const rows = timed.map((part) => [part.part, part.count, time(part.predicted_ns), time(part.measured_ns), part.how.join(", ")]);
  const fused = rest.length ? [el("p", { className: "dim" }, `Without a time of their own, as ONNX Runtime fuses them into others or does not time them: ${rest.map((part) => part.part).join(", ")}; predicted ${time(sum(rest.map((part) => part.predicted_ns)))} in all.`)] : [];
  const text = `A run is predicted to take ${time(view.predicted_ns)}${view.error === null ? "" : `, give or take ${Math.round(100 * view.error)} %`}, and takes ${time(view.measured_ns)}.`;
  return [panel, section("Predicted against measured", el("p", {}, text), panel.panel, el("details", {}, el("summary", {}, "all parts"), table("parts of a run", ["part", "number", "predicted", "measured", "how it is known"], rows)), ...fused)];
}

function article(report) {
  const root = el("article", {});
  const body = el("div", {});
  let started = [];
  const eps = [...new Set(report.views.flatMap((view) => view.nodes.map((node) => node.ep)))].sort();
  const color = (ep) => css(`--d${eps.indexOf(ep) % 5}`);
  function fill(view) {
    started.forEach((part) => part.end?.());
    const graph = graphPanel(view, color);
    const timed = view.nodes.some((node) => node.measured_ns !== null);
    const key = timed ? "measured_ns" : "predicted_ns";
    const most = view.nodes.map((node, at) => [node, at]).filter(([node]) => node[key]).sort(([a], [b]) => b[key] - a[key]).slice(0, 15);
    const charts = [], more = [];
    if (view.parts.some((part) => part.measured_ns !== null)) {
      const [panel, made] = partsSection(view);
      charts.push(panel);
      more.push(made);
    }
    if (view.roofline && Object.keys(view.roofline.kinds).length) {
      const roof = rooflineChart(view.roofline);
      charts.push(roof);
      more.push(section("Roofline", roof.panel, el("p", { className: "dim" }, `Each dot is a kernel with its ${view.roofline.rates} rate${view.roofline.rates === "measured" ? "" : ", as the profile does not time kernels on this device"}. Limits: ${view.roofline.limits}.`)));
    }
    const timeline = timelineChart(view);
    charts.push(timeline);
    const noted = `ONNX Runtime's profile adds a few microseconds to each node, and on a GPU it counts the launch: ${time(sum(view.nodes.map((node) => node.measured_ns)))} in all nodes here, where a run without a profile takes ${time(view.measured_ns)}.`;
    body.replaceChildren(glance(report, view), graph.panel, splitsSection(report, view),
      section("Nodes that cost most", table(timed ? "by measured time" : "by predicted time", ["node", "module", "operator", "runs on", "measured", "predicted", "result"], most.map(([node, at]) => [el("button", { type: "button", onclick: () => graph.reveal(at) }, node.name), node.module, node.op, shortEp(node.ep), time(node.measured_ns), time(node.predicted_ns), node.out])), ...(timed ? [el("p", { className: "dim" }, noted)] : [])),
      ...more, section("Timeline of the first run", timeline.panel, table("phases", ["phase", "begins", "takes"], view.timeline.map((phase) => [phase.name, time(phase.start_ns), time(phase.ns)]))));
    graph.start();
    const shown = charts.map((part) => part.start());
    started = [graph, ...shown.map((made) => ({ end: () => made.destroy() }))];
  }
  const sizes = Object.entries(report.dims).map(([name, size]) => `${name}=${size}`).join(", ");
  const facts = [sizes, report.date?.replace("T", " ").replace("+00:00", " UTC"), report.machine, `rlx_ort ${report.version}`, report.runtime, `Python ${report.python}`];
  const devices = devicesTable(report);
  const timed = report.devices.filter((row) => row.times_ns?.length);
  const spread = timed.length ? distributionChart(timed) : null;
  if (spread) devices.append(el("h3", {}, "Distribution of the runs"), spread.panel);
  root.append(el("h1", {}, report.model), el("p", { className: "dim" }, facts.filter(Boolean).join("; ")),
    ...report.notes.map((note) => el("p", {}, note)), devices);
  if (report.views.length > 1) {
    const choose = el("select", { label: "Device to show" }, ...report.views.map((view, at) => el("option", { value: at }, `show ${view.device}`)));
    choose.addEventListener("change", () => fill(report.views[choose.value]));
    root.append(el("div", { className: "tools" }, choose));
  }
  root.append(body);
  let drawn = null;
  return {
    root, start: () => { drawn = spread?.start(); if (report.views.length) fill(report.views[0]); else body.append(splitsSection(report, null)); },
    end: () => { drawn?.destroy(); started.forEach((part) => part.end?.()); },
  };
}

function comparison({ outputs, tolerance }) {
  const number = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(3)));
  return section("Outputs", table(`how far the outputs are apart; allowed: relative L2 ${tolerance.relative_l2}`, ["output", "shape", "max abs", "relative L2", "cosine", ""],
    outputs.map((row) => [row.name, row.shape.join(" × ") || "scalar", number(row.max_abs), number(row.relative_l2), row.cosine === null || row.cosine === undefined ? "–" : row.cosine.toFixed(7), row.ok ? "ok" : "DIFFERS"])));
}

let articles = [];
function build() {
  colors.clear();
  articles.forEach((part) => part.end());
  const reports = document.getElementById("reports");
  articles = data.reports.map(article);
  reports.replaceChildren(...articles.map((part) => part.root));
  document.getElementById("comparison").replaceChildren(...(data.comparison ? [comparison(data.comparison)] : []));
  articles.forEach((part) => part.start());
  document.documentElement.dataset.ready = Math.round(performance.now());
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
build();
