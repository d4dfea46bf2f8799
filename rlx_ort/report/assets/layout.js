// The layout of a group: dagre chooses layers, order and x; lines run in the channels between the layers.

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
