"use strict";
// The page of a report. dagre chooses the layers of the graph, Chart.js draws the charts. Names from models are put into
// the page as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const colors = new Map(); // of the theme, read once: reading a style is slow
function css(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
}
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

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
  return el("div", { className: "scroll", tabIndex: 0, role: "region", label: caption || columns.join(", ") }, el("table", {}, el("caption", {}, caption),
    el("thead", {}, line("th", columns)), el("tbody", {}, ...rows.map((row) => line("td", row)))));
}

const section = (title, ...children) => el("section", {}, el("h2", {}, title), ...children);
const shortEp = (ep) => ep.replace("ExecutionProvider", "");

function mixed(from, to, share) {
  const parts = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((value, at) => Math.round(value + (b[at] - value) * share)).join(",")})`;
}

// --- the layout: dagre chooses layers, order and x; lines run in the channels between the layers

const GAP = 14, TRACK = 7, HEADER = 26; // px between layers, between lines, and of a group's title
const MANY_LINKS = 300; // then crossings are not reduced further, which takes half of the time

// Places units, given by their sizes, and the links between them: `from` and `to` are units, or the place of a port of the
// group around them as -1 - place; `out` and `into` are where a link leaves and enters a unit, from its left.
function layered(units, links, ins, outs) {
  if (!units.length) return { width: 0, height: 0, lines: [], at: [], ins: [], outs: [] };
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ nodesep: 26, edgesep: 14, ranksep: 2 }).setDefaultEdgeLabel(() => ({}));
  units.forEach(({ w, h }, at) => graph.setNode(`u${at}`, { width: w, height: h }));
  const name = (at, port) => (at >= 0 ? `u${at}` : `${port}${-1 - at}`);
  const pin = (port, count, root, ends, edge) => { // ports are in the first or the last layer
    if (!count) return;
    graph.setNode(root, { width: 1, height: 1 });
    for (let at = 0; at < count; at += 1) {
      graph.setNode(`${port}${at}`, { width: 8, height: 1 });
      graph.setEdge(...edge(root, `${port}${at}`), { weight: 50 });
    }
    units.forEach((_, at) => { if (!ends.has(at)) graph.setEdge(...edge(root, `u${at}`), { weight: 0 }); });
  };
  pin("i", ins, "top", new Set(links.map(({ to }) => to)), (root, port) => [root, port]);
  pin("o", outs, "end", new Set(links.map(({ from }) => from)), (root, port) => [port, root]);
  links.forEach(({ from, to }) => graph.setEdge(name(from, "i"), name(to, "o"), { weight: 2 }));
  dagre.layout(graph, { disableOptimalOrderHeuristic: links.length > MANY_LINKS });
  const node = (id) => graph.node(id);
  const left = Math.min(...units.map((_, at) => node(`u${at}`).x - units[at].w / 2), ...graph.nodes().map((id) => node(id).x)) - 12;
  const ranks = [];
  const band = (rank) => (ranks[rank] ??= { h: 0, runs: [] });
  units.forEach(({ h }, at) => { const row = band(node(`u${at}`).rank / 2); row.h = Math.max(row.h, h); });
  for (let at = 0; at < ins; at += 1) band(node(`i${at}`).rank / 2);
  for (let at = 0; at < outs; at += 1) band(node(`o${at}`).rank / 2);
  // where each link is in each layer
  const into = new Map();
  const paths = links.map((link) => {
    const [a, b] = [name(link.from, "i"), name(link.to, "o")];
    const start = node(a), end = node(b);
    const inner = graph.edge(a, b).points.slice(1, -1).filter((_, at) => at % 2).map(({ x }) => x);
    const first = link.from >= 0 ? start.x - start.width / 2 + (link.out ?? start.width / 2) : start.x;
    const path = { link, source: `${a} ${first}`, rank: start.rank / 2, xs: [first, ...inner], end };
    if (link.to >= 0 && link.into === undefined) into.set(b, [...(into.get(b) ?? []), path]);
    else path.xs.push(link.to >= 0 ? end.x - end.width / 2 + link.into : end.x);
    return path;
  });
  for (const [, each] of into) { // lines enter a node beside each other, a single one straight where it can
    each.sort((p, q) => p.xs.at(-1) - q.xs.at(-1));
    each.forEach((path, at) => {
      const { x, width } = path.end, offset = path.xs.at(-1) - x;
      path.xs.push(each.length > 1 ? x - width / 2 + (width * (at + 1)) / (each.length + 1) : x + (Math.abs(offset) < 1 ? 0 : 9 * Math.sign(offset)));
    });
  }
  for (const { xs } of paths) xs.forEach((x, at) => { if (at && Math.abs(x - xs[at - 1]) < 0.5) xs[at] = xs[at - 1]; });
  // a track in the channel below each layer for each stretch that lines of one source share
  const tracks = new Map();
  for (const { source, rank, xs } of paths) {
    for (let at = 0; at + 1 < xs.length; at += 1) {
      if (xs[at] === xs[at + 1]) continue;
      const key = `${source} ${rank + at} ${xs[at]}`;
      const run = tracks.get(key) ?? { low: Infinity, high: -Infinity };
      if (!tracks.has(key)) { tracks.set(key, run); band(rank + at).runs.push(run); }
      run.low = Math.min(run.low, xs[at], xs[at + 1]);
      run.high = Math.max(run.high, xs[at], xs[at + 1]);
    }
  }
  let y = 0;
  for (const row of ranks) {
    if (!row) continue;
    row.y = y;
    const ends = [];
    for (const run of row.runs.sort((p, q) => p.low - q.low)) {
      const free = ends.findIndex((high) => high + 6 < run.low);
      run.track = free < 0 ? ends.length : free;
      ends[run.track] = run.high;
    }
    row.bottom = y + row.h;
    y = row.bottom + 2 * GAP + TRACK * Math.max(ends.length - 1, 0);
  }
  const height = Math.max(y - 2 * GAP, 0);
  const lines = paths.map(({ link, source, rank, xs }) => {
    const points = [[xs[0], link.from >= 0 ? ranks[rank].y + units[link.from].h : 0]];
    xs.slice(1).forEach((x, at) => {
      const run = tracks.get(`${source} ${rank + at} ${xs[at]}`);
      if (xs[at] === x) return;
      const level = ranks[rank + at].bottom + GAP + TRACK * run.track;
      points.push([xs[at], level], [x, level]);
    });
    points.push([xs.at(-1), link.to >= 0 ? ranks[rank + xs.length - 1].y : height]);
    return points.map(([x, level]) => [x - left, level]);
  });
  const right = Math.max(...units.map((_, at) => node(`u${at}`).x + units[at].w / 2), ...lines.flat().map(([x]) => x + left)) + 12;
  return {
    width: right - left, height, lines,
    at: units.map((unit, at) => ({ x: node(`u${at}`).x - unit.w / 2 - left, y: ranks[node(`u${at}`).rank / 2].y })),
    ins: Array.from({ length: ins }, (_, at) => node(`i${at}`).x - left), outs: Array.from({ length: outs }, (_, at) => node(`o${at}`).x - left),
  };
}

// --- the graph

const CARD = { w: 208, h: 58 };
const FIRST_UNITS = 90; // groups are opened, the most expensive first, as long as no more than these are shown
const FAMILIES = [
  ["products", /Conv|MatMul|Gemm|Einsum|LSTM|GRU|RNN/], ["attention", /Attention|RotaryEmbedding/], ["normalisation", /Norm|LRN/],
  ["reductions", /Reduce|Pool|Softmax|ArgM|TopK|CumSum/], ["elementwise", /^(Add|Sub|Mul|Div|Pow|Sqrt|Erf|Exp|Log|Neg|Abs|Where|Not|And|Or|Equal|Greater|Less|Clip|Min|Max|Mod|Sum|.*[Rr]elu|.*Gelu|Sigmoid|Tanh|Swish|Softplus|Hard.*|Mish|Cast|Round|Sign|Sin|Cos|Floor|Ceil)/],
];
const family = (op) => FAMILIES.find(([, ops]) => ops.test(op))?.[0] ?? "shapes and data";
const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const ruler = document.createElement("canvas").getContext("2d");
function fitted(text, width, font, keep = "end") { // the end of a name tells nodes apart
  ruler.font = font;
  if (ruler.measureText(text).width <= width) return text;
  for (let length = Math.min(text.length - 1, Math.floor(width / 4)); length > 1; length -= 1) {
    const part = keep === "end" ? `…${text.slice(-length)}` : `${text.slice(0, length)}…`;
    if (ruler.measureText(part).width <= width) return part;
  }
  return "…";
}

let panels = 0;
const wide = (text) => { ruler.font = "600 12px sans-serif"; return ruler.measureText(text).width; };
function graphPanel(view, color) {
  const serial = (panels += 1);
  const { nodes, groups, edges, crossings } = view;
  const total = { measured_ns: sum(nodes.map((node) => node.measured_ns)), predicted_ns: sum(nodes.map((node) => node.predicted_ns)) };
  const opened = new Set();
  const chains = nodes.map(({ group }) => { // the groups around a node, the outermost first
    const chain = [];
    for (let at = group; at !== null; at = groups[at].parent) chain.unshift(at);
    return chain;
  });
  const number = (id) => Number(id.slice(1));
  const isGroup = (id) => id[0] === "g";
  const shownAs = (at) => { const closed = chains[at].find((group) => !opened.has(group)); return closed === undefined ? `n${at}` : `g${closed}`; };
  const span = (id) => (isGroup(id) ? groups[number(id)] : { first: number(id), count: 1 });
  const members = (id) => { const { first, count } = span(id); return nodes.slice(first, first + count); };
  const spent = (id, key) => sum(members(id).map((node) => node[key]));
  function inside(group) { // the units right inside a group, or in the whole graph
    const depth = group === null ? 0 : chains[groups[group].first].indexOf(group) + 1;
    const { first, count } = group === null ? { first: 0, count: nodes.length } : groups[group];
    const units = [];
    for (let at = first; at < first + count; at += 1) {
      const inner = chains[at][depth];
      units.push(inner === undefined ? `n${at}` : `g${inner}`);
      if (inner !== undefined) at = groups[inner].first + groups[inner].count - 1;
    }
    return { units, depth };
  }

  // --- placing: each group for itself, those that are alike once
  const known = new Map();
  let items = [], lines = [], extent = { width: 0, height: 0 };
  function place(group) {
    const { units, depth } = inside(group);
    const unitOf = new Map(units.map((id, at) => [id, at]));
    const contents = units.map((id) => (isGroup(id) && opened.has(number(id)) ? place(number(id)) : null));
    const { first, count } = group === null ? { first: 0, count: nodes.length } : groups[group];
    const within = (at) => at >= first && at < first + count;
    const mine = (at) => unitOf.get(chains[at][depth] === undefined ? `n${at}` : `g${chains[at][depth]}`);
    const ins = new Map(), outs = new Map(), links = new Map();
    const port = (ports, key) => { if (!ports.has(key)) ports.set(key, ports.size); return -1 - ports.get(key); };
    for (const edge of touching(group)) {
      const [a, b, crossing] = edges[edge];
      const [from, to] = [within(a) ? mine(a) : port(ins, shownAs(a)), within(b) ? mine(b) : port(outs, shownAs(a))];
      if (from === to) continue;
      const out = from >= 0 ? contents[from]?.outs.get(shownAs(a)) : undefined;
      const into = to >= 0 ? contents[to]?.ins.get(shownAs(a)) : undefined;
      const key = `${from} ${to} ${out} ${into}`;
      const link = links.get(key) ?? { from, to, out, into, edges: [] };
      links.set(key, link);
      link.edges.push(edge);
    }
    const all = [...links.values()];
    const sizes = contents.map((content, at) => (content ? { w: content.width, h: content.height } : { w: CARD.w, h: CARD.h }));
    const key = JSON.stringify([sizes, all.map(({ from, to, out, into }) => [from, to, out, into]), ins.size, outs.size]);
    if (!known.has(key)) known.set(key, layered(sizes, all, ins.size, outs.size));
    const found = known.get(key);
    const head = group === null ? 0 : HEADER;
    return {
      group, units, contents, all, found, width: Math.max(found.width, group === null ? 0 : CARD.w), height: found.height + head + (group === null ? 0 : GAP),
      ins: new Map([...ins].map(([id, at]) => [id, found.ins[at]])), outs: new Map([...outs].map(([id, at]) => [id, found.outs[at]])),
    };
  }
  const touched = groups.map(() => []), everything = edges.map((_, at) => at);
  edges.forEach(([a, b], edge) => { for (const group of new Set([...chains[a], ...chains[b]])) touched[group].push(edge); });
  const touching = (group) => (group === null ? everything : touched[group]);
  function flatten(content, x, y) {
    const inset = content.group === null ? 0 : HEADER;
    const bottom = y + content.height;
    content.all.forEach((link, at) => {
      const points = content.found.lines[at].map(([px, py]) => [x + px, y + inset + py]);
      if (link.from < 0) points[0][1] = y;
      if (link.to < 0) points.at(-1)[1] = bottom;
      const crossing = link.edges.map((edge) => edges[edge][2]).find((value) => value >= 0) ?? -1;
      lines.push({ points, crossing, ends: link.to >= 0 && !content.contents[link.to], priced: link.from >= 0,
        left: Math.min(...points.map(([px]) => px)), right: Math.max(...points.map(([px]) => px)), top: points[0][1], bottom: points.at(-1)[1] });
    });
    content.units.forEach((id, at) => {
      const spot = content.found.at[at], inner = content.contents[at];
      const box = { id, x: x + spot.x, y: y + inset + spot.y, w: inner?.width ?? CARD.w, h: inner?.height ?? CARD.h, open: Boolean(inner) };
      items.push(box);
      if (inner) flatten(inner, box.x, box.y);
    });
  }

  // --- what is on the page
  const world = svg("g"), edgeLayer = svg("g", { class: "lines" }), nodeLayer = svg("g");
  world.append(edgeLayer, nodeLayer);
  const picture = svg("svg", { "aria-hidden": "true" }, world);
  const box = el("div", { className: "graph", tabIndex: 0, role: "application",
    label: "The graph. Arrows move along it, Enter opens and closes a group, plus and minus zoom, 0 shows all of it." }, picture);
  const map = el("canvas", { className: "map", role: "img", label: "Overview of the whole graph" });
  const details = el("div", { className: "details", role: "status" }, "Select a node for its details.");
  const hasTimes = total.measured_ns > 0;
  const mode = el("select", { label: "Colour by" }, ...[["measured_ns", "colour by measured time"], ["predicted_ns", "colour by predicted time"], ["category", "colour by category"], ["device", "colour by device"]].slice(hasTimes ? 0 : 1).map(([value, text]) => el("option", { value }, text)));
  const search = el("input", { type: "search", placeholder: "find a node or a module", label: "Find nodes by name, module or operator" });
  const hits = el("ul", { className: "hits" });
  const legend = el("div", { className: "legend" });
  const button = (text, act, props = {}) => el("button", { type: "button", onclick: act, ...props }, text);
  const key = () => (mode.value === "predicted_ns" ? "predicted_ns" : hasTimes ? "measured_ns" : "predicted_ns");
  let zoom = 1, pan = { x: 0, y: 0 }, selected = null, matches = new Set(), drawn = new Map(), most = 1;

  function fill(id) {
    const each = members(id);
    if (mode.value === "device") return color(each.some((node) => node.ep === view.ep) ? view.ep : each[0].ep);
    if (mode.value === "category") return css(`--c${[...FAMILIES.map(([name]) => name), "shapes and data"].indexOf(family(heaviest(each).op))}`);
    return mixed(css("--cold"), css("--hot"), Math.sqrt(spent(id, mode.value) / most));
  }
  const heaviest = (each) => each.reduce((a, b) => ((b[key()] ?? 0) > (a[key()] ?? 0) ? b : a));
  const share = (ns) => (total[key()] ? percent(ns / total[key()]) : "");
  const title = (id) => {
    if (isGroup(id)) return groups[number(id)].label;
    const { name, module } = nodes[number(id)];
    return module && !name.includes(module.split(".").at(-1)) ? `${module.split(".").slice(-2).join(".")} · ${name}` : name;
  };
  function cost(id) {
    const ns = spent(id, key());
    if (!isGroup(id) && nodes[number(id)][key()] === null) return key() === "measured_ns" && hasTimes ? "fused" : "";
    return time(ns);
  }
  function card(item) {
    const { id, x, y, w, h, open } = item;
    const made = svg("g", { class: `unit${isGroup(id) ? " group" : ""}${open ? " open" : ""}`, transform: `translate(${x} ${y})`, "data-id": id });
    const back = svg("rect", { class: "box", width: w, height: h, rx: 6 });
    if (isGroup(id) && !open) made.append(svg("rect", { class: "behind", x: 4, y: 4, width: w, height: h, rx: 6 }));
    if (!open) back.style.fill = fill(id);
    made.append(back);
    const text = (px, py, content, name, anchor = "start") => made.append(svg("text", { x: px, y: py, class: name, "text-anchor": anchor }, content));
    if (open) {
      text(10, 17, `− ${fitted(title(id), w - 100, "600 12px sans-serif")}`, "strong");
      text(w - 10, 17, cost(id), "", "end");
      return made;
    }
    const price = cost(id), each = members(id);
    text(w - 8, 17, price, "strong", "end");
    if (isGroup(id)) {
      text(8, 17, `+ ${fitted(title(id).split(".").slice(-2).join("."), w - 36 - wide(price), "600 12px sans-serif")}`, "strong");
      text(8, 34, fitted(`${each.length} nodes, most in ${heaviest(each).op}`, w - 16, "11px sans-serif", "start"), "");
      text(8, 50, fitted(`${share(spent(id, key()))}${spent(id, key()) ? " of the time" : ""}`, w - 16, "11px sans-serif"), "");
    } else {
      text(8, 17, fitted(each[0].op, w - 24 - wide(price), "600 12px sans-serif", "start"), "strong");
      text(8, 34, fitted(title(id), w - 16, "11px sans-serif"), "");
      text(8, 50, fitted(each[0].out, w - 16, "11px sans-serif"), "");
    }
    return made;
  }
  function path(line) {
    const made = svg("g", { class: line.crossing >= 0 ? "crosses" : "" });
    made.append(svg("path", { d: `M${line.points.map((point) => point.join(" ")).join("L")}`, "marker-end": line.ends ? `url(#${line.crossing >= 0 ? "cross" : "arrow"}${serial})` : "" }));
    if (line.crossing >= 0 && line.priced) {
      const [px, py] = line.points[0];
      made.append(svg("text", { x: px + 6, y: py + 12 }, time(crossings[line.crossing].predicted_ns)));
    }
    return made;
  }
  let waiting = false;
  const refresh = () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; render(); }); } };
  function render() { // what is in sight; the rest is not on the page
    world.setAttribute("transform", `translate(${pan.x} ${pan.y}) scale(${zoom})`);
    const { clientWidth, clientHeight } = box;
    const low = { x: -pan.x / zoom - 50, y: -pan.y / zoom - 50 }, high = { x: (clientWidth - pan.x) / zoom + 50, y: (clientHeight - pan.y) / zoom + 50 };
    picture.classList.toggle("far", zoom < 0.45);
    const seen = new Set();
    const show = (part, layer, make, inSight) => {
      if (!inSight) return;
      seen.add(part);
      if (!drawn.has(part)) { drawn.set(part, make(part)); layer.append(drawn.get(part)); }
    };
    for (const line of lines) show(line, edgeLayer, path, line.left <= high.x && line.right >= low.x && line.top <= high.y && line.bottom >= low.y);
    for (const item of items) show(item, nodeLayer, card, item.x <= high.x && item.x + item.w >= low.x && item.y <= high.y && item.y + item.h >= low.y);
    for (const [part, made] of drawn) {
      if (!seen.has(part)) { made.remove(); drawn.delete(part); continue; }
      if (part.open) { // its title stays in sight
        made.querySelector("text").setAttribute("x", Math.max(10, Math.min(10 - pan.x / zoom - part.x, part.w - CARD.w)));
      }
      if (part.id) {
        made.classList.toggle("selected", part.id === selected);
        made.classList.toggle("match", !part.open && matches.size > 0 && matches.has(part.id));
      }
    }
    drawMap();
    box.dataset.zoom = zoom;
  }
  function repaint() { for (const made of drawn.values()) made.remove(); drawn.clear(); render(); explain(); }
  function drawMap() {
    map.hidden = extent.width <= box.clientWidth && extent.height <= box.clientHeight;
    if (map.hidden) return;
    const scale = mapScale();
    map.width = Math.max(extent.width * scale, 24);
    map.height = Math.max(extent.height * scale, 24);
    const pen = map.getContext("2d");
    for (const item of items) {
      if (item.open) continue;
      pen.fillStyle = item.shade ??= fill(item.id);
      pen.fillRect(item.x * scale, item.y * scale, Math.max(item.w * scale, 1.5), Math.max(item.h * scale, 1.5));
    }
    pen.strokeStyle = css("--link");
    pen.lineWidth = 2;
    pen.strokeRect((-pan.x / zoom) * scale, (-pan.y / zoom) * scale, (box.clientWidth / zoom) * scale, (box.clientHeight / zoom) * scale);
  }
  const mapScale = () => Math.min((box.clientWidth * 0.17) / extent.width, (box.clientHeight - 18) / extent.height);
  function explain() {
    let keys;
    if (mode.value === "device") keys = [...new Set(nodes.map((node) => node.ep))].map((ep) => [color(ep), shortEp(ep)]);
    else if (mode.value === "category") keys = [...FAMILIES.map(([name]) => name), "shapes and data"].map((name, at) => [css(`--c${at}`), name]).filter(([, name]) => nodes.some((node) => family(node.op) === name));
    else keys = [[css("--cold"), "no time"], [css("--hot"), time(most)]];
    if (crossings.length) keys.push([css("--cross"), "copied between devices"]);
    legend.replaceChildren(...keys.map(([shade, text]) => {
      const swatch = el("span", { className: "swatch" });
      swatch.style.background = shade;
      return el("span", {}, swatch, text);
    }));
  }
  function arrange() {
    items = []; lines = [];
    const whole = place(null);
    extent = { width: whole.width, height: whole.height };
    flatten(whole, 0, 0);
    const closed = items.filter((item) => !item.open);
    most = mode.value.endsWith("_ns") ? closed.reduce((best, item) => Math.max(best, spent(item.id, mode.value)), 1) : 1;
    after.clear(); before.clear();
    for (const [a, b] of edges) {
      const [from, to] = [shownAs(a), shownAs(b)];
      if (from === to) continue;
      if (!after.has(from)) after.set(from, to);
      if (!before.has(to)) before.set(to, from);
    }
    repaint();
    box.dataset.drawn = items.length;
  }
  const before = new Map(), after = new Map();
  const itemOf = (id) => items.find((item) => item.id === id);

  // --- moving
  function centre(x, y, scale) {
    zoom = scale;
    pan = { x: box.clientWidth / 2 - x * zoom, y: box.clientHeight / 2 - y * zoom };
    render();
  }
  function zoomed(factor, cx = box.clientWidth / 2, cy = box.clientHeight / 2) {
    const next = Math.min(Math.max(zoom * factor, 0.02), 3);
    pan = { x: cx - ((cx - pan.x) * next) / zoom, y: cy - ((cy - pan.y) * next) / zoom };
    zoom = next;
    refresh();
  }
  function all() { zoom = Math.min((box.clientWidth - 20) / extent.width, (box.clientHeight - 20) / extent.height, 1.5); pan = { x: (box.clientWidth - extent.width * zoom) / 2, y: 10 }; render(); }
  function begin() { // readable, at the first node
    const first = itemOf(shownAs(0)) ?? { x: 0, w: extent.width }, free = 0.8 * box.clientWidth; // beside the overview
    zoom = 1;
    pan = { x: free / 2 - (extent.width <= free ? extent.width / 2 : first.x + first.w / 2), y: 16 };
    render();
  }
  function show(id) {
    const item = itemOf(id);
    if (!item) return;
    selected = id;
    centre(item.x + item.w / 2, item.y + (item.open ? Math.min(item.h, box.clientHeight / 2) : item.h) / 2, zoom < 0.8 ? 1 : zoom);
    describe(id);
  }
  function reveal(at) {
    const closed = chains[at].filter((group) => !opened.has(group));
    closed.forEach((group) => opened.add(group));
    if (closed.length) arrange();
    show(`n${at}`);
    box.scrollIntoView({ block: "nearest" });
  }
  function toggle(id) {
    const group = isGroup(id) ? number(id) : nodes[number(id)].group;
    if (group === null) return;
    if (!opened.delete(group)) opened.add(group);
    arrange();
    show(opened.has(group) ? (itemOf(`n${groups[group].first}`) ? `n${groups[group].first}` : `g${group}`) : `g${group}`);
  }
  function describe(id) {
    const rows = (pairs) => el("dl", {}, ...pairs.filter(([, value]) => value !== null && value !== "").flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
    const link = (at) => el("li", {}, button(title(`n${at}`), () => reveal(at)));
    const priced = (ns, which) => (ns === null ? null : `${time(ns)}${which === key() && total[which] ? `, ${share(ns)} of all nodes` : ""}`);
    if (isGroup(id)) {
      const group = number(id), { label, first, count } = groups[group], each = members(id);
      const eps = [...new Set(each.map((node) => shortEp(node.ep)))].join(", ");
      const top = each.map((node, at) => [node[key()] ?? 0, first + at]).sort(([a], [b]) => b - a).slice(0, 5).filter(([ns]) => ns > 0);
      details.replaceChildren(el("strong", {}, label), rows([["nodes", String(count)], ["runs on", eps], ["measured", priced(spent(id, "measured_ns"), "measured_ns")], ["predicted", priced(spent(id, "predicted_ns"), "predicted_ns")]]),
        button(opened.has(group) ? "close the group" : "open the group", () => toggle(id)), el("h3", {}, "most expensive in it"),
        el("ul", {}, ...top.map(([ns, at]) => el("li", {}, button(title(`n${at}`), () => reveal(at)), ` ${nodes[at].op}, ${time(ns)}`))));
      return;
    }
    const at = number(id), node = nodes[at];
    const reads = edges.filter(([, to]) => to === at).map(([from]) => from), readers = edges.filter(([from]) => from === at).map(([, to]) => to);
    const fused = node.measured_ns === null && hasTimes ? "none of its own: ONNX Runtime fused it into another node, or it is too small" : priced(node.measured_ns, "measured_ns");
    details.replaceChildren(el("strong", {}, node.name), rows([["operator", node.op], ["module", node.module], ["result", node.out], ["runs on", shortEp(node.ep)], ["measured", fused], ["predicted", priced(node.predicted_ns, "predicted_ns")]]),
      ...(reads.length ? [el("h3", {}, "reads"), el("ul", {}, ...[...new Set(reads)].map(link))] : []), ...(readers.length ? [el("h3", {}, "is read by"), el("ul", {}, ...[...new Set(readers)].map(link))] : []));
  }

  // --- pointer, keys, search
  let dragged = null;
  const idAt = (event) => event.target.closest?.(".unit")?.dataset.id;
  box.addEventListener("pointerdown", (event) => { box.focus({ preventScroll: true }); if (event.target !== map) dragged = { x: event.clientX, y: event.clientY, moved: false }; });
  box.addEventListener("pointermove", (event) => {
    if (!dragged || !event.buttons) return;
    const [dx, dy] = [event.clientX - dragged.x, event.clientY - dragged.y];
    if (!dragged.moved && Math.hypot(dx, dy) < 4) return;
    if (!dragged.moved) box.setPointerCapture(event.pointerId);
    pan = { x: pan.x + dx, y: pan.y + dy };
    dragged = { x: event.clientX, y: event.clientY, moved: true };
    refresh();
  });
  box.addEventListener("click", (event) => {
    const moved = dragged?.moved, id = idAt(event);
    dragged = null;
    if (moved || !id) return;
    if (/^[+−] /.test(event.target.textContent)) return toggle(id); // the title of a group
    selected = id;
    render();
    describe(id);
  });
  box.addEventListener("dblclick", (event) => { const id = idAt(event); if (id) toggle(id); });
  box.addEventListener("wheel", (event) => {
    if (document.activeElement !== box && !event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    const { left, top } = box.getBoundingClientRect();
    zoomed(event.deltaY < 0 ? 1.15 : 1 / 1.15, event.clientX - left, event.clientY - top);
  }, { passive: false });
  const jump = (event) => {
    const scale = mapScale(), { left, top } = map.getBoundingClientRect();
    centre((event.clientX - left) / scale, (event.clientY - top) / scale, zoom);
  };
  map.addEventListener("pointerdown", jump);
  map.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });
  function beside(id, sign) {
    const { x, y } = itemOf(id);
    return items.filter((item) => !item.open && Math.abs(item.y - y) < CARD.h && sign * (item.x - x) > 1).sort((a, b) => sign * (a.x - b.x))[0]?.id;
  }
  const keys = {
    ArrowDown: (id) => after.get(id), ArrowUp: (id) => before.get(id), ArrowRight: (id) => beside(id, 1), ArrowLeft: (id) => beside(id, -1),
    Enter: (id) => toggle(id), " ": (id) => toggle(id), "+": () => zoomed(1.3), "-": () => zoomed(1 / 1.3), 0: () => all(),
  };
  box.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (!itemOf(selected) && /Arrow|Enter| /.test(event.key)) return show(shownAs(0));
    const next = keys[event.key](selected);
    if (event.key.startsWith("Arrow") && next) show(next);
  });
  mode.addEventListener("change", arrange);
  function find() {
    const text = search.value.trim().toLowerCase();
    const found = text ? [...nodes.keys()].filter((at) => `${nodes[at].name} ${nodes[at].module} ${nodes[at].op}`.toLowerCase().includes(text)) : [];
    matches = new Set(found.map(shownAs));
    const count = found.length > 8 ? [el("li", { className: "dim" }, `and ${found.length - 8} more`)] : [];
    const none = text && !found.length ? [el("li", {}, `no node has ${search.value} in its name, module or operator`)] : [];
    hits.replaceChildren(...found.slice(0, 8).map((at) => el("li", {}, button(title(`n${at}`), () => reveal(at)), ` ${nodes[at].op}, ${time(nodes[at][key()])}`)), ...count, ...none);
    render();
    return found;
  }
  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") { const found = find(); if (found.length) reveal(found[0]); } });

  const marker = (id) => svg("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z" }));
  picture.prepend(svg("defs", {}, marker(`arrow${serial}`), marker(`cross${serial}`)));
  box.append(map);
  const tools = el("div", { className: "tools" }, mode, search,
    button("open all groups", () => { groups.forEach((_, at) => opened.add(at)); arrange(); begin(); }),
    button("close all groups", () => { opened.clear(); arrange(); begin(); }), button("show all", all),
    button("+", () => zoomed(1.3), { label: "Zoom in" }), button("−", () => zoomed(1 / 1.3), { label: "Zoom out" }));
  const hidden = view.folded ? [el("p", { className: "dim" }, `${view.folded} nodes are not shown: ONNX Runtime folded them into constants when it opened the session.`)] : [];
  function start() {
    for (let count = inside(null).units.length; ;) { // opened as far as it is a picture
      const closed = groups.map((_, at) => at).filter((at) => !opened.has(at) && (groups[at].parent === null || opened.has(groups[at].parent)));
      const next = closed.map((at) => [inside(at).units.length, spent(`g${at}`, key()), at]).filter(([size]) => count + size - 1 <= FIRST_UNITS).sort(([, a], [, b]) => b - a)[0];
      if (!next) break;
      opened.add(next[2]);
      count += next[0] - 1;
    }
    arrange();
    begin();
  }
  const resized = new ResizeObserver(refresh);
  resized.observe(box);
  return { panel: section(`Graph on ${view.device}`, tools, hits, legend, el("div", { className: "beside" }, box, details), ...hidden), reveal, start, end: () => resized.disconnect() };
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
  return section("Devices", table("one run on each", columns.filter((_, at) => used[at]).map(([name]) => name), shown.map((cells) => cells.filter((_, at) => used[at]))), ...(blocked.length ? [others] : []));
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
