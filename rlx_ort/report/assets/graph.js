// The graph of a view: groups, what is in sight of them, the details, and how one moves in it.

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
