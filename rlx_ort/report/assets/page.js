"use strict";
// The page of a report. Libraries draw: cytoscape the graph, dagre places it, Chart.js the charts. Names from models are
// put into the page as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const colors = new Map(); // of the theme, read once: reading a style is slow
function css(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
}
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
const ALL_AT_ONCE = 40; // nodes; groups of larger models begin closed
const READABLE = 0.6; // the least zoom to begin with
const ASPECT = 2.4; // of the box of the graph
const NODE = { width: 150, height: 34 };

function el(tag, props = {}, ...children) {
  const { role, label, ...rest } = props;
  const made = Object.assign(document.createElement(tag), rest);
  if (role) made.setAttribute("role", role);
  if (label) made.setAttribute("aria-label", label);
  made.append(...children);
  return made;
}

function time(ns) {
  if (ns === null || ns === undefined) return "–";
  const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(([size]) => ns >= size) ?? [1, "ns"];
  return `${Number((ns / size).toPrecision(3))} ${unit}`;
}

function bytes(count) {
  const [size, unit] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([size]) => count >= size) ?? [1, "bytes"];
  return `${Number((count / size).toPrecision(3))} ${unit}`;
}

function table(caption, columns, rows) {
  const line = (tag, cells) => el("tr", {}, ...cells.map((cell) => el(tag, tag === "th" ? { scope: "col" } : {}, cell ?? "–")));
  return el("div", { className: "scroll" }, el("table", {}, el("caption", {}, caption),
    el("thead", {}, line("th", columns)), el("tbody", {}, ...rows.map((row) => line("td", row)))));
}

const short = (name) => (name.length > 24 ? `…${name.slice(-23)}` : name); // the end of a name tells nodes apart
const section = (title, ...children) => el("section", {}, el("h2", {}, title), ...children);
const shortEp = (ep) => ep.replace("ExecutionProvider", "");

function mixed(from, to, share) {
  const parts = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((value, at) => Math.round(value + (b[at] - value) * share)).join(",")})`;
}

// --- the graph

function layout(sizes, links) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ nodesep: 24, ranksep: 36, marginx: 14, marginy: 14 }).setDefaultEdgeLabel(() => ({}));
  sizes.forEach((size, id) => graph.setNode(id, { width: size.w, height: size.h }));
  for (const [from, to] of links) graph.setEdge(from, to);
  dagre.layout(graph);
  const { width, height } = graph.graph();
  return { width, height, at: new Map([...sizes.keys()].map((id) => [id, graph.node(id)])) };
}

// Cuts a long chain into columns, so that it fills the width.
function folded(whole) {
  const columns = Math.max(1, Math.floor(Math.sqrt((ASPECT * whole.height) / whole.width)));
  const tall = whole.height / columns;
  let left = 0;
  for (let column = 0; column < columns; column += 1) {
    const spots = [...whole.at.values()].filter(({ y, done }) => !done && (y < (column + 1) * tall || column === columns - 1));
    const shift = left - spots.reduce((least, { x, width }) => Math.min(least, x - width / 2), Infinity);
    for (const spot of spots) {
      Object.assign(spot, { x: spot.x + shift, y: spot.y - column * tall, done: true });
      left = Math.max(left, spot.x + spot.width / 2 + 80);
    }
  }
  return whole;
}

function graphPanel(view, color) {
  const { nodes, groups, edges, crossings } = view;
  const opened = new Set(nodes.length <= ALL_AT_ONCE ? groups.keys() : []);
  const inside = groups.map(() => []);
  for (const [from, to] of edges) {
    if (nodes[from].group !== null && nodes[from].group === nodes[to].group) inside[nodes[from].group].push([from, to]);
  }
  const layouts = new Map(); // groups that are alike are placed once
  const placed = (number) => {
    const { like, first, count } = groups[number];
    const key = `${like} ${count}`;
    if (!layouts.has(key)) {
      const sizes = new Map(Array.from({ length: count }, (_, at) => [String(at), { w: NODE.width, h: NODE.height }]));
      layouts.set(key, layout(sizes, inside[number].map(([a, b]) => [String(a - first), String(b - first)])));
    }
    return layouts.get(key);
  };
  const unit = (at) => (nodes[at].group === null ? `n${at}` : `g${nodes[at].group}`);
  const end = (at) => (nodes[at].group === null || opened.has(nodes[at].group) ? `n${at}` : `g${nodes[at].group}`);
  const members = (id) => {
    if (id[0] === "n") return [nodes[id.slice(1)]];
    const { first, count } = groups[id.slice(1)];
    return nodes.slice(first, first + count);
  };

  const box = el("div", { className: "graph", tabIndex: 0, role: "application",
    label: "The graph. Arrows move along it, Enter opens and closes a group, plus and minus zoom, 0 shows all of it." });
  const details = el("div", { className: "details", role: "status" });
  const mode = el("select", { label: "Colour by" }, el("option", { value: "device" }, "colour by device"),
    el("option", { value: "measured_ns" }, "colour by measured time"), el("option", { value: "predicted_ns" }, "colour by predicted time"));
  const search = el("input", { type: "search", placeholder: "find a node", label: "Find a node by its name or operator" });
  const legend = el("span", {});
  const button = (text, act) => el("button", { type: "button", onclick: act }, text);

  // Edges take cytoscape most of its time, so those of a large graph that cost nothing are lines on a canvas under it.
  const large = nodes.length > 1000;
  const canvas = el("canvas", { className: "lines" });
  let lines = [];
  const before = new Map(), after = new Map(); // node -> the first one that it reads from, and that reads it
  function drawLines() {
    const scale = devicePixelRatio, zoom = cy.zoom() * scale, pan = cy.pan();
    canvas.width = cy.width() * scale;
    canvas.height = cy.height() * scale;
    const pen = canvas.getContext("2d");
    pen.setTransform(zoom, 0, 0, zoom, pan.x * scale, pan.y * scale);
    pen.strokeStyle = css("--dim");
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const [from, to] of lines) {
      pen.moveTo(from.x, from.y);
      pen.lineTo(to.x, to.y);
    }
    pen.stroke();
  }

  const cy = cytoscape({
    container: box, elements: [], layout: { name: "preset" }, minZoom: 0.01, maxZoom: 3, boxSelectionEnabled: false,
    autoungrabify: true, selectionType: "single", userZoomingEnabled: false, textureOnViewport: large,
    style: [
      { selector: "node", style: { shape: "round-rectangle", ...NODE, label: "data(label)", "background-color": "data(color)", color: css("--text"), "text-valign": "center", "font-size": 11, "min-zoomed-font-size": 6, "border-width": 1, "border-color": css("--line"), "z-index-compare": "manual", "z-index": 2 } },
      { selector: "node[w]", style: { width: "data(w)", height: "data(h)" } },
      { selector: "node[kind = 'group']", style: { "border-width": 3, "border-style": "double", "text-wrap": "wrap" } },
      { selector: "node[kind = 'box']", style: { "background-opacity": 0.25, "text-valign": "top", "text-margin-y": 14, "z-index": 0, "border-style": "dashed" } },
      { selector: "node:selected", style: { "border-width": 4, "border-color": css("--link") } },
      { selector: "edge", style: { width: 1.5, "line-color": css("--dim"), "curve-style": "straight", "target-arrow-shape": "triangle", "target-arrow-color": css("--dim"), "arrow-scale": 0.7, "z-index-compare": "manual", "z-index": 1 } },
      { selector: "edge[crosses]", style: { width: 3, "line-color": css("--cross"), "target-arrow-color": css("--cross") } },
      { selector: "edge[price]", style: { label: "data(price)", color: css("--cross"), "font-size": 11, "text-background-color": css("--panel"), "text-background-opacity": 0.85, "min-zoomed-font-size": 6 } },
    ],
  });

  if (large) {
    box.prepend(canvas);
    cy.on("render", drawLines);
  }
  const worth = (id) => sum(members(id).map((node) => node[mode.value]));
  function shades(ids) {
    if (mode.value === "device") {
      legend.most = 0;
      return ids.map((id) => {
        const eps = members(id).map((node) => node.ep);
        return color(eps.includes(view.ep) ? view.ep : eps[0]);
      });
    }
    const times = ids.map(worth);
    legend.most = times.reduce((a, b) => Math.max(a, b), 1);
    return times.map((ns) => mixed(css("--cold"), css("--hot"), Math.sqrt(ns / legend.most)));
  }
  function paint() {
    const shown = cy.nodes("[kind != 'box']").toArray();
    const made = shades(shown.map((node) => node.id()));
    cy.batch(() => shown.forEach((node, at) => node.data("color", made[at])));
    explain();
  }
  function explain() {
    const keys = mode.value === "device" ? [...new Set(nodes.map((node) => node.ep))].map((ep) => [color(ep), shortEp(ep)])
      : [[css("--cold"), "no time"], [css("--hot"), time(legend.most)]];
    if (crossings.length) keys.push([css("--cross"), "copied between devices"]);
    legend.replaceChildren(...keys.flatMap(([shade, text]) => {
      const swatch = el("span", { className: "swatch" });
      swatch.style.background = shade;
      return [swatch, text];
    }));
  }

  function draw(keep) {
    const sizes = new Map();
    nodes.forEach((node, at) => {
      const id = unit(at);
      if (sizes.has(id)) return;
      const inner = id[0] === "g" && opened.has(node.group) ? placed(node.group) : null;
      sizes.set(id, inner ? { w: inner.width, h: inner.height + 20 } : id[0] === "g" ? { w: 190, h: 52 } : { w: NODE.width, h: NODE.height });
    });
    const links = edges.map(([a, b]) => [unit(a), unit(b)]).filter(([a, b]) => a !== b);
    const whole = folded(layout(sizes, new Map(links.map((link) => [link.join(), link])).values()));
    const made = [];
    const add = (id, kind, label, { x, y }, size) =>
      made.push({ group: "nodes", data: { id, kind, label, color: css("--none"), ...size }, position: { x, y } });
    sizes.forEach((size, id) => {
      const at = whole.at.get(id);
      const number = Number(id.slice(1));
      if (id[0] === "n") return add(id, "node", short(nodes[number].name), at);
      const { label, first, count } = groups[number];
      if (!opened.has(number)) return add(id, "group", `${label}\n${count} nodes, ${time(sum(members(id).map((node) => node.measured_ns)))}`, at, size);
      add(`b${number}`, "box", label, at, size);
      const inner = placed(number);
      inner.at.forEach((spot, offset) => {
        const place = { x: at.x - size.w / 2 + spot.x, y: at.y - size.h / 2 + 20 + spot.y };
        add(`n${first + Number(offset)}`, "node", short(nodes[first + Number(offset)].name), place);
      });
    });
    const real = made.filter((each) => each.data.kind !== "box");
    shades(real.map((each) => each.data.id)).forEach((shade, at) => { real[at].data.color = shade; });
    const drawn = new Map();
    for (const [from, to, crossing] of edges) {
      const [source, target] = [end(from), end(to)];
      if (source === target) continue;
      const key = `${source}>${target}`;
      if (!drawn.has(key)) drawn.set(key, { source, target, over: new Set() });
      if (crossing >= 0) drawn.get(key).over.add(crossing);
    }
    const priced = new Set(); // a value is copied once, however many nodes read it
    const places = new Map(made.map(({ data, position }) => [data.id, position]));
    before.clear();
    after.clear();
    lines = [];
    drawn.forEach(({ source, target, over }) => {
      if (!after.has(source)) after.set(source, target);
      if (!before.has(target)) before.set(target, source);
      if (large && !over.size) return lines.push([places.get(source), places.get(target)]);
      const fresh = [...over].filter((at) => !priced.has(at));
      fresh.forEach((at) => priced.add(at));
      const cost = over.size ? { crosses: 1 } : {};
      if (fresh.length) cost.price = time(sum(fresh.map((at) => crossings[at].predicted_ns)));
      made.push({ group: "edges", data: { source, target, ...cost } });
    });
    const picked = cy.$("node:selected").id();
    cy.elements().remove();
    cy.add(made);
    explain();
    if (keep && picked) show(cy.$id(picked).length ? picked : unit(Number(picked.slice(1))));
    else {
      cy.fit(undefined, 20);
      if (cy.zoom() < READABLE && !keep) { // begin where the graph begins, with names that can be read
        const { x1, x2, y1 } = cy.elements().boundingBox();
        const middle = cy.width() / 2, first = middle - READABLE * cy.$id(end(0)).position("x");
        const narrow = READABLE * (x2 - x1) <= cy.width();
        const left = narrow ? middle - (READABLE * (x1 + x2)) / 2 : Math.min(20 - READABLE * x1, first);
        cy.viewport({ zoom: READABLE, pan: { x: left, y: 20 - READABLE * y1 } });
      }
    }
    box.dataset.drawn = cy.nodes().length;
  }

  function show(id) {
    const target = cy.$id(id);
    if (!target.length) return;
    cy.$(":selected").unselect();
    target.select();
    if (cy.zoom() < 0.5) cy.zoom(0.8);
    cy.center(target);
  }
  function reveal(at) {
    if (nodes[at].group !== null && !opened.has(nodes[at].group)) { opened.add(nodes[at].group); draw(); }
    show(`n${at}`);
    box.scrollIntoView({ block: "nearest" });
  }
  function toggle(id) {
    const number = id[0] === "n" ? nodes[id.slice(1)].group : Number(id.slice(1));
    if (number === null) return;
    if (!opened.delete(number)) opened.add(number);
    draw(false);
    show(opened.has(number) ? `n${groups[number].first}` : `g${number}`);
  }
  function describe(id) {
    if (id[0] === "n") {
      const node = nodes[id.slice(1)];
      return details.replaceChildren(el("strong", {}, node.name), ` ${node.op} → ${node.out}; on ${shortEp(node.ep)}; measured ${time(node.measured_ns)}, predicted ${time(node.predicted_ns)}`);
    }
    const { label, first, count } = groups[id.slice(1)];
    const each = nodes.slice(first, first + count);
    details.replaceChildren(el("strong", {}, label), ` ${count} nodes from ${each[0].name} to ${each[count - 1].name}; measured ${time(sum(each.map((node) => node.measured_ns)))}, predicted ${time(sum(each.map((node) => node.predicted_ns)))} `,
      button(opened.has(Number(id.slice(1))) ? "close" : "open", () => toggle(id)));
  }
  cy.on("select", "node", (event) => describe(event.target.id()));
  cy.on("dbltap", "node", (event) => toggle(event.target.id()));
  box.addEventListener("focus", () => cy.userZoomingEnabled(true));
  box.addEventListener("blur", () => cy.userZoomingEnabled(false));
  box.addEventListener("pointerdown", () => box.focus({ preventScroll: true }));
  function beside(node, sign) {
    const { x, y } = node.position();
    const row = cy.nodes("[kind != 'box']").filter((other) => Math.abs(other.position("y") - y) < 20 && sign * (other.position("x") - x) > 1);
    return row.sort((a, b) => sign * (a.position("x") - b.position("x")))[0];
  }
  const keys = {
    ArrowDown: (node) => cy.$id(after.get(node.id())), ArrowUp: (node) => cy.$id(before.get(node.id())),
    ArrowRight: (node) => beside(node, 1), ArrowLeft: (node) => beside(node, -1),
    Enter: (node) => toggle(node.id()), " ": (node) => toggle(node.id()),
    "+": () => cy.zoom({ level: cy.zoom() * 1.3, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } }),
    "-": () => cy.zoom({ level: cy.zoom() / 1.3, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } }),
    0: () => cy.fit(undefined, 20),
  };
  box.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const now = cy.$("node:selected");
    if (!now.length && /Arrow|Enter| /.test(event.key)) return show(cy.nodes("[kind != 'box']")[0].id());
    const next = keys[event.key](now);
    if (event.key.startsWith("Arrow") && next) show(next.id());
  });
  mode.addEventListener("change", paint);
  search.addEventListener("change", () => {
    const text = search.value.toLowerCase();
    const at = text ? nodes.findIndex((node) => `${node.name} ${node.op}`.toLowerCase().includes(text)) : -1;
    if (at >= 0) reveal(at);
    else details.replaceChildren(text ? `no node has ${search.value} in its name or operator` : "");
  });

  const tools = el("div", { className: "tools" }, mode, search,
    button("open all groups", () => { groups.forEach((_, number) => opened.add(number)); draw(true); }),
    button("close all groups", () => { opened.clear(); draw(true); }), button("show all", () => cy.fit(undefined, 20)), legend);
  const hidden = view.folded ? [el("p", { className: "dim" }, `${view.folded} nodes are not shown: ONNX Runtime folded them into constants when it opened the session.`)] : [];
  return { panel: section(`Graph on ${view.device}`, tools, box, details, ...hidden), reveal, start: () => { cy.resize(); draw(); }, end: () => cy.destroy() };
}

// --- charts

function chart(label, config) {
  const canvas = el("canvas", { role: "img", label });
  const start = () => new Chart(canvas, { ...config, options: { animation: false, maintainAspectRatio: false, color: css("--text"), ...config.options } });
  return { panel: el("div", { className: "chart" }, canvas), start };
}

const axis = (text, more = {}) => ({ title: { display: true, text, color: css("--dim") }, ticks: { color: css("--dim") }, grid: { color: css("--line") }, ...more });
const steps = (text) => axis(text, { type: "logarithmic", ticks: { color: css("--dim"), maxRotation: 0, callback: (value) => (/^[125]$/.test((value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toFixed(3).replace(/\.?0+$/, "")) ? `${+value.toPrecision(3)}` : null) } });
const series = () => ["--d0", "--d1", "--d2", "--d3", "--d4", "--hot"].map(css);

function partsChart(view) {
  const shown = view.parts.slice(0, 12);
  const set = (label, key, color) => ({ label, data: shown.map((part) => (part[key] === null ? null : part[key] / 1e6)), backgroundColor: color });
  return chart("Predicted and measured time of each part of a run, in ms; the table below has the numbers.", {
    type: "bar",
    data: { labels: shown.map((part) => part.part), datasets: [set("predicted", "predicted_ns", css("--d0")), set("measured", "measured_ns", css("--d1"))] },
    options: { indexAxis: "y", scales: { x: axis("ms a run"), y: axis("") } },
  });
}

function rooflineChart({ peak, bandwidth, total_ns, kinds }) {
  const points = Object.values(kinds).flat();
  const knee = peak / bandwidth;
  const left = Math.min(knee / 30, ...points.map(([x]) => x)) / 2;
  const right = Math.max(knee * 10, ...points.map(([x]) => x)) * 2;
  const roof = { type: "line", label: `limit: ${peak.toPrecision(3)} GFLOP/s, ${bandwidth.toPrecision(3)} GB/s`, data: [[left, left * bandwidth], [knee, peak], [right, peak]].map(([x, y]) => ({ x, y })), borderColor: css("--text"), borderWidth: 1.5, pointRadius: 0 };
  const dots = Object.entries(kinds).map(([name, found], at) => ({ label: `${name}, ${Math.round((100 * sum(found.map(([, , ns]) => ns))) / total_ns)} %`, backgroundColor: `${series()[at]}bb`, data: found.map(([x, y, ns]) => ({ x, y, r: Math.max(22 * Math.sqrt(ns / total_ns), 3) })) }));
  return chart("Roofline: predicted GFLOP/s of each kind of node by its operations per byte.", {
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

// --- the report

function devicesTable(report) {
  const views = new Map(report.views.map((view) => [view.device, view]));
  const usable = report.devices.filter((row) => !row.blocker || views.has(row.device));
  const rows = usable.map((row) => {
    const view = views.get(row.device);
    const share = view?.placement_share ?? row.placement_share;
    return [row.device + (row.recommended ? " (chosen)" : ""), time(view?.predicted_ns ?? row.predicted_ns), time(view?.measured_ns ?? row.p50_ns),
      share === undefined || share === null ? "–" : `${Math.round(100 * share)} %`, row.profile_source, row.open_error || row.failure || ""];
  });
  const failed = rows.some((row) => row.at(-1));
  const columns = ["device", "predicted", "measured", "placed there", "predicted from", ...(failed ? ["failure"] : [])];
  const blocked = report.devices.filter((row) => !usable.includes(row));
  const others = el("details", {}, el("summary", {}, `${blocked.length} other devices cannot be used`), table("", ["device", "why"], blocked.map((row) => [row.device, row.blocker])));
  return section("Devices", table("one run on each", columns, rows.map((row) => row.slice(0, columns.length))), ...(blocked.length ? [others] : []));
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

function article(report) {
  const root = el("article", {});
  const body = el("div", {});
  let started = [];
  const eps = [...new Set(report.views.flatMap((view) => view.nodes.map((node) => node.ep)))].sort();
  const color = (ep) => css(`--d${eps.indexOf(ep) % 5}`);
  function fill(view) {
    started.forEach((part) => part.end?.());
    const graph = graphPanel(view, color);
    const key = view.nodes.some((node) => node.measured_ns !== null) ? "measured_ns" : "predicted_ns";
    const most = view.nodes.map((node, at) => [node, at]).sort(([a], [b]) => (b[key] ?? 0) - (a[key] ?? 0)).slice(0, 15);
    const parts = partsChart(view);
    const timeline = timelineChart(view);
    const roof = view.roofline && rooflineChart(view.roofline);
    const noted = `ONNX Runtime's profile adds a few microseconds to each node, and on a GPU it counts the launch: ${time(sum(view.nodes.map((node) => node.measured_ns)))} in all nodes here, where a run without a profile takes ${time(view.measured_ns)}.`;
    body.replaceChildren(graph.panel, splitsSection(report, view),
      section("Nodes that cost most", table("by measured time", ["node", "operator", "runs on", "measured", "predicted", "result"], most.map(([node, at]) => [el("button", { type: "button", onclick: () => graph.reveal(at) }, node.name), node.op, shortEp(node.ep), time(node.measured_ns), time(node.predicted_ns), node.out])), el("p", { className: "dim" }, noted)),
      section("Predicted against measured", el("p", {}, `A run is predicted to take ${time(view.predicted_ns)}${view.error === null ? "" : `, give or take ${Math.round(100 * view.error)} %`}, and takes ${time(view.measured_ns)}.`), parts.panel,
        el("details", {}, el("summary", {}, "all parts"), table("parts of a run", ["part", "number", "predicted", "measured", "how it is known"], view.parts.map((part) => [part.part, part.count, time(part.predicted_ns), time(part.measured_ns), part.how.join(", ")])))),
      ...(roof ? [section("Roofline", roof.panel)] : []),
      section("Timeline of the first run", timeline.panel, table("phases", ["phase", "begins", "takes"], view.timeline.map((phase) => [phase.name, time(phase.start_ns), time(phase.ns)]))));
    const charts = [parts, timeline, ...(roof ? [roof] : [])];
    graph.start();
    const shown = charts.map((part) => part.start());
    started = [graph, ...shown.map((made) => ({ end: () => made.destroy() }))];
  }
  const sizes = Object.entries(report.dims).map(([name, size]) => `${name}=${size}`).join(", ");
  root.append(el("h1", {}, report.model), el("p", { className: "dim" }, [report.runtime, sizes].filter(Boolean).join("; ")),
    ...report.notes.map((note) => el("p", {}, note)), devicesTable(report));
  if (report.views.length > 1) {
    const choose = el("select", { label: "Device to show" }, ...report.views.map((view, at) => el("option", { value: at }, `show ${view.device}`)));
    choose.addEventListener("change", () => fill(report.views[choose.value]));
    root.append(el("div", { className: "tools" }, choose));
  }
  root.append(body);
  return { root, start: () => (report.views.length ? fill(report.views[0]) : body.append(splitsSection(report, null))), end: () => started.forEach((part) => part.end?.()) };
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
