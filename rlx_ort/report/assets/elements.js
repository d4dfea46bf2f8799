"use strict";
// What the parts of the page share. Names from models are put into the page as text, never as markup.

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
