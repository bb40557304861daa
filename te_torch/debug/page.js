"use strict";

// Figures are [series, figure, bin]: the upper halves of float32 numbers, high bytes before low ones, deflated.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 2;
  const words = new Uint32Array(count);
  for (let i = 0; i < count; i++) words[i] = (planes[i] << 24) | (planes[count + i] << 16);
  return new Float32Array(words.buffer);
}

const COLOURS = ["#2563eb", "#d97706", "#059669", "#c02d76", "#7c3aed", "#0891b2", "#65780b", "#b4232c", "#475569"];
const RAMP = [[250, 250, 247], [253, 224, 154], [248, 152, 82], [222, 80, 92], [150, 41, 116], [62, 18, 80]];
const METRICS = {
  lost: { name: "dB lost", unit: "dB", worst: "max", top: 30 },
  underflow: { name: "underflow", unit: "%", worst: "max", top: 100 },
  overflow: { name: "overflow", unit: "%", worst: "max", top: 10 },
  snr: { name: "SNR", unit: "dB", worst: "min", top: 0, bottom: 36 },
  amax: { name: "amax", unit: "", worst: "max", log: true },
};
const CHARTS = [
  ["amax", "amax", "largest magnitude", true],
  ["underflow", "underflow, %", "elements that became zero", false],
  ["overflow", "overflow, %", "elements beyond the largest", false],
  ["snr", "SNR, dB", "of the quantization: more is better", false],
  ["scale", "scale", "what values are multiplied by", true],
];

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "g", "rect", "circle"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const shown = (v, digits = 3) => {
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  if (!Number.isFinite(v)) return v > 0 ? "∞" : "−∞";
  const size = Math.abs(v);
  return size !== 0 && (size >= 1e5 || size < 1e-3) ? v.toExponential(1).replace("e+", "e") : String(Number(v.toPrecision(digits)));
};

function colour(part) {
  const at = Math.min(Math.max(part, 0), 1) * (RAMP.length - 1);
  const i = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[i].map((c, k) => Math.round(c + (RAMP[i + 1][k] - c) * (at - i)));
}

class Page {
  constructor(facts, values) {
    this.facts = facts;
    this.values = values;
    this.bins = facts.steps.length;
    this.layers = new Map(); // name -> numbers of its series, the worst first
    facts.series.forEach((s, i) => {
      if (!this.layers.has(s.layer)) this.layers.set(s.layer, []);
      this.layers.get(s.layer).push(i);
    });
    this.metric = "lost";
    this.sort = "trouble";
    this.filter = "";
    this.rows = 40;
    this.layer = facts.series.length ? facts.series[0].layer : null;
    this.hidden = new Set();
    for (const numbers of this.layers.values()) {
      const names = numbers.map((i) => facts.series[i].tensor);
      numbers.forEach((i, k) => { facts.series[i].twice = names.indexOf(names[k]) !== names.lastIndexOf(names[k]); });
    }
    this.tip = document.body.appendChild(make("div", { id: "tip" }));
  }

  of(series, figure) {
    const at = (series * this.facts.figures.length + this.facts.figures.indexOf(figure)) * this.bins;
    return this.values.subarray(at, at + this.bins);
  }

  steps(bin) {
    const [a, b] = [this.facts.steps[bin], this.facts.ends[bin]];
    return a === b ? `step ${a}` : `steps ${a} to ${b}`;
  }

  show(event, ...children) {
    this.tip.replaceChildren(...children);
    this.tip.style.display = "block";
    const box = this.tip.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
    const y = event.clientY + 14 + box.height > innerHeight ? event.clientY - box.height - 14 : event.clientY + 14;
    this.tip.style.left = `${Math.max(x, 4)}px`;
    this.tip.style.top = `${Math.max(y, 4)}px`;
  }

  hide() {
    this.tip.style.display = "none";
  }

  named() {
    const wanted = this.filter.toLowerCase();
    const names = [...this.layers.keys()].filter((name) => name.toLowerCase().includes(wanted));
    const first = (name) => Math.min(...this.layers.get(name).map((i) => this.facts.series[i].order));
    return this.sort === "trouble" ? names : names.sort((a, b) => first(a) - first(b));
  }

  // The worst of a layer's tensors in each bin, and which it is.
  worst(layer) {
    const low = METRICS[this.metric].worst === "min";
    const values = new Float32Array(this.bins).fill(NaN);
    const which = new Array(this.bins).fill(-1);
    for (const i of this.layers.get(layer)) {
      this.of(i, this.metric).forEach((v, bin) => {
        if (Number.isNaN(v)) return;
        if (which[bin] < 0 || (low ? v < values[bin] : v > values[bin])) [values[bin], which[bin]] = [v, i];
      });
    }
    return { values, which };
  }

  choose(layer) {
    this.layer = layer;
    this.hidden.clear();
    this.overview();
    this.detail();
  }

  choice(options, current, act) {
    return make("span", { class: "choice", role: "group" }, ...options.map(([key, name]) =>
      make("button", { type: "button", "aria-pressed": String(key === current), onclick: () => act(key) }, name)));
  }

  overview() {
    const node = document.getElementById("overview");
    const old = node.querySelector(".map");
    const scrolled = old ? old.scrollTop : 0;
    const names = this.named();
    const row = names.length > 60 ? 15 : 20;
    const search = make("input", { type: "search", placeholder: "filter layers", "aria-label": "filter layers", value: this.filter });
    search.addEventListener("input", () => { this.filter = search.value; this.refresh(); });
    const metrics = Object.entries(METRICS).map(([key, m]) => [key, m.name]);
    const bar = make("div", { class: "bar" }, make("h2", {}, "Layers over steps"),
      this.choice(metrics, this.metric, (key) => { this.metric = key; this.overview(); }),
      this.choice([["trouble", "worst first"], ["order", "as they run"]], this.sort, (key) => { this.sort = key; this.overview(); }),
      search, make("span", { class: "grow" }));
    const labels = make("div", { class: "names" }, ...names.map((name) =>
      make("div", { class: name === this.layer ? "name chosen" : "name", title: name, onclick: () => this.choose(name) }, `\u200e${name}`)));
    const canvas = make("canvas", { role: "img", "aria-label": "heat map of layers and steps" });
    const cells = make("div", { class: "cells" }, canvas);
    const at = names.indexOf(this.layer);
    if (at >= 0) cells.append(make("div", { class: "frame", style: `top:${at * row}px` }));
    const map = make("div", { class: "map", style: `--row:${row}px` }, labels, cells);
    const key = this.paint(canvas, names, row);
    bar.append(key);
    const axis = make("div", { class: "axis" }, make("span", {}, `step ${this.facts.steps[0]}`),
      make("span", {}, "each cell: the worst tensor of the layer, in the worst of its steps; a click shows the layer"),
      make("span", {}, `step ${this.facts.ends[this.bins - 1]}`));
    node.replaceChildren(bar, map, axis);
    axis.style.marginLeft = `${labels.getBoundingClientRect().width}px`;
    map.scrollTop = scrolled;
  }

  // One pixel a cell, stretched; returns the key of colours.
  paint(canvas, names, row) {
    const m = METRICS[this.metric];
    const found = names.map((name) => this.worst(name));
    const seen = found.flatMap(({ values }) => [...values]).filter((v) => Number.isFinite(v));
    let [low, high] = [m.bottom ?? 0, m.top];
    if (m.log) [low, high] = [Math.log2(Math.max(seen.reduce((a, b) => (b > 0 ? Math.min(a, b) : a), Infinity), 1e-30)), Math.log2(Math.max(seen.reduce((a, b) => Math.max(a, b), 1e-30), 1e-30))];
    if (low === high || !Number.isFinite(low)) [low, high] = [high - 1, high];
    canvas.width = Math.max(this.bins, 1);
    canvas.height = Math.max(names.length, 1);
    canvas.style.height = `${names.length * row}px`;
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    found.forEach(({ values }, y) => values.forEach((v, x) => {
      const known = !Number.isNaN(v);
      const part = ((m.log ? Math.log2(Math.max(v, 1e-30)) : v) - low) / (high - low);
      image.data.set(known ? [...colour(part), 255] : [228, 232, 239, 255], 4 * (y * canvas.width + x));
    }));
    context.putImageData(image, 0, 0);
    const cell = (event) => {
      const box = canvas.getBoundingClientRect();
      const x = Math.floor(((event.clientX - box.left) / box.width) * this.bins);
      const y = Math.floor(((event.clientY - box.top) / box.height) * names.length);
      return [Math.min(Math.max(x, 0), this.bins - 1), Math.min(Math.max(y, 0), names.length - 1)];
    };
    canvas.addEventListener("mousemove", (event) => {
      const [x, y] = cell(event);
      const { values, which } = found[y];
      const s = this.facts.series[which[x]];
      this.show(event, make("div", {}, names[y]), make("div", {}, this.steps(x)),
        make("div", {}, s ? `${s.tensor} (${s.gemm}): ${shown(values[x])} ${m.unit}` : "not seen"));
    });
    canvas.addEventListener("mouseleave", () => this.hide());
    canvas.addEventListener("click", (event) => this.choose(names[cell(event)[1]]));
    const stops = RAMP.map((_, i) => `rgb(${colour(i / (RAMP.length - 1)).join(" ")})`).join(", ");
    const ends = m.log ? [shown(2 ** low, 2), shown(2 ** high, 2)] : [low, `${high} ${m.unit}`];
    return make("span", { class: "key" }, String(ends[0]), make("i", { style: `background:linear-gradient(90deg, ${stops})` }), String(ends[1]));
  }

  detail() {
    const node = document.getElementById("detail");
    if (this.layer === null) return;
    const all = [...this.layers.get(this.layer)].sort((a, b) => this.facts.series[a].order - this.facts.series[b].order);
    const tint = new Map(all.map((i, k) => [i, COLOURS[k % COLOURS.length]]));
    const legend = make("div", { class: "legend" }, ...all.map((i) => {
      const s = this.facts.series[i];
      const toggle = () => { this.hidden.has(i) ? this.hidden.delete(i) : this.hidden.add(i); this.detail(); };
      return make("button", { type: "button", "aria-pressed": String(!this.hidden.has(i)), title: s.format || "not quantized", onclick: toggle },
        make("i", { style: `background:${tint.get(i)}` }), `${s.tensor}${s.twice ? ` (${s.gemm})` : ""}`);
    }));
    const said = all.map((i) => this.facts.series[i]).filter((s) => s.why).map((s) =>
      make("p", { class: "why" }, make("b", {}, `${s.tensor} (${s.gemm}): `), s.why));
    const drawn = all.filter((i) => !this.hidden.has(i));
    const charts = CHARTS.map(([figure, name, note, log]) =>
      make("div", { class: "chart" }, make("h3", {}, name, make("span", {}, `  ${note}`)), this.chart(drawn, tint, figure, log)));
    node.replaceChildren(make("div", { class: "bar" }, make("h2", {}, this.layer)), ...said, legend, make("div", { class: "charts" }, ...charts));
  }

  chart(drawn, tint, figure, log) {
    const [W, H, left, right, top, bottom] = [380, 190, 50, 8, 8, 22];
    const value = (v) => (log ? (v > 0 ? Math.log2(v) : NaN) : v);
    const lines = drawn.map((i) => [i, [...this.of(i, figure)].map(value)]);
    const seen = lines.flatMap(([, vs]) => vs).filter((v) => Number.isFinite(v));
    let low = seen.reduce((a, b) => Math.min(a, b), Infinity);
    let high = seen.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!seen.length) [low, high] = [0, 1];
    if (!log) [low, high] = [Math.min(low, 0), Math.max(high, 1)]; // less than 1 % is drawn as little
    if (high - low < 1e-9) [low, high] = [low - (log ? 1 : 0), low + 1];
    const marks = ticks(low, high, log);
    [low, high] = [Math.min(low, marks[0]), Math.max(high, marks[marks.length - 1])];
    const x = (bin) => left + (W - left - right) * (this.bins > 1 ? bin / (this.bins - 1) : 0.5);
    const y = (v) => top + (H - top - bottom) * (1 - (v - low) / (high - low));
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": figure });
    for (const mark of marks) {
      svg.append(make("line", { class: "grid", x1: left, x2: W - right, y1: y(mark), y2: y(mark) }),
        make("text", { x: left - 6, y: y(mark) + 3.5, "text-anchor": "end" }, log ? power(mark) : shown(mark)));
    }
    const last = this.bins - 1;
    for (const bin of new Set([0, Math.round(last / 2), last])) {
      const anchor = last === 0 || (bin !== 0 && bin !== last) ? "middle" : bin ? "end" : "start";
      svg.append(make("text", { x: x(bin), y: H - 6, "text-anchor": anchor }, String(this.facts.steps[bin])));
    }
    if (!seen.length) svg.append(make("text", { x: (W + left) / 2, y: H / 2, "text-anchor": "middle" }, "nothing quantized"));
    for (const [i, vs] of lines) {
      svg.append(make("path", { class: "curve", stroke: tint.get(i), d: path(vs, x, y) }));
      if (this.bins <= 60) vs.forEach((v, bin) => Number.isFinite(v) && svg.append(make("circle", { cx: x(bin), cy: y(v), r: this.bins > 12 ? 1.6 : 2.6, fill: tint.get(i) })));
    }
    const cross = make("line", { class: "cross", y1: top, y2: H - bottom, visibility: "hidden" });
    svg.append(cross);
    svg.addEventListener("mousemove", (event) => {
      const box = svg.getBoundingClientRect();
      const part = (((event.clientX - box.left) / box.width) * W - left) / (W - left - right);
      const bin = Math.min(Math.max(Math.round(part * last), 0), last);
      cross.setAttribute("x1", x(bin));
      cross.setAttribute("x2", x(bin));
      cross.setAttribute("visibility", "visible");
      this.show(event, make("div", {}, this.steps(bin)), ...lines.map(([i]) => {
        const s = this.facts.series[i];
        return make("div", {}, make("i", { style: `background:${tint.get(i)}` }), `${s.tensor}${s.twice ? ` (${s.gemm})` : ""}`, make("b", {}, shown(this.of(i, figure)[bin])));
      }));
    });
    svg.addEventListener("mouseleave", () => { cross.setAttribute("visibility", "hidden"); this.hide(); });
    return svg;
  }

  spark(i) {
    const values = [...this.of(i, "lost")];
    const svg = make("svg", { class: "spark", width: 96, height: 18, viewBox: "0 0 96 18", "aria-hidden": "true" });
    const x = (bin) => 1 + (94 * bin) / Math.max(this.bins - 1, 1);
    const top = Math.max(10, ...values.filter((v) => Number.isFinite(v)));
    svg.append(make("path", { class: "curve", stroke: "#b4232c", d: path(values, x, (v) => 17 - (16 * v) / top) }));
    return svg;
  }

  tensors() {
    const node = document.getElementById("tensors");
    const wanted = this.filter.toLowerCase();
    const all = this.facts.series.map((s, i) => [s, i]).filter(([s]) => s.layer.toLowerCase().includes(wanted));
    const heads = [["layer"], ["tensor"], ["GEMMs"], ["format"], ["dB lost", 1], ["over steps"], ["SNR dB", 1], ["underflow %", 1], ["overflow %", 1], ["amax", 1], ["why"]];
    const body = all.slice(0, this.rows).map(([s, i]) => {
      const pick = () => { this.choose(s.layer); document.getElementById("detail").scrollIntoView({ behavior: "smooth", block: "nearest" }); };
      const number = (v) => make("td", { class: "number" }, shown(v));
      return make("tr", { tabindex: 0, onclick: pick, onkeydown: (event) => event.key === "Enter" && pick() },
        make("td", {}, s.layer), make("td", {}, s.tensor), make("td", {}, s.gemm), make("td", {}, s.format || "–"),
        make("td", { class: "number" }, s.trouble === null ? "–" : s.trouble.toFixed(1)), make("td", {}, this.spark(i)), number(s.snr), number(s.underflow), number(s.overflow), number(s.amax),
        make("td", { class: "said" }, s.why));
    });
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads.map(([name, right]) => make("th", right ? { class: "number" } : {}, name)))), make("tbody", {}, ...body));
    const parts = [make("div", { class: "bar" }, make("h2", {}, "Tensors, the worst first"), make("span", { class: "note" }, `${Math.min(all.length, this.rows)} of ${all.length}`)), make("div", { class: "scroll" }, table)];
    if (all.length > this.rows) {
      parts.push(make("button", { class: "more", type: "button", onclick: () => { this.rows *= 4; this.tensors(); } }, "show more"));
    }
    if (this.facts.unseen.length) parts.push(make("p", { class: "note" }, `Not seen: ${this.facts.unseen.join(", ")}`));
    node.replaceChildren(...parts);
  }

  refresh() {
    const before = document.activeElement;
    this.overview();
    this.tensors();
    if (before && before.type === "search") {
      const search = document.querySelector("input[type=search]");
      search.focus();
      search.setSelectionRange(search.value.length, search.value.length);
    }
  }
}

function path(values, x, y) {
  let d = "";
  let pen = false;
  values.forEach((v, bin) => {
    if (Number.isFinite(v)) d += `${pen ? "L" : "M"}${x(bin).toFixed(1)} ${y(v).toFixed(1)}`;
    pen = Number.isFinite(v);
  });
  return d;
}

function ticks(low, high, log) {
  const rough = (high - low) / 4;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = log ? Math.max(1, Math.ceil(rough)) : [1, 2, 5, 10].map((f) => f * base).find((s) => s >= rough);
  const found = [];
  for (let k = Math.floor(low / step); k <= Math.ceil(high / step - 1e-9); k++) found.push(Number((k * step).toPrecision(12)));
  return found.length > 1 ? found : [found[0], found[0] + step];
}

const power = (k) => (k >= 0 && k <= 10 ? String(2 ** k) : `2${[...String(k)].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻").join("")}`);

(async () => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  document.getElementById("verdict").textContent = facts.verdict;
  if (facts.series.length) {
    const page = new Page(facts, await unpacked(document.getElementById("figures").textContent.trim()));
    page.overview();
    page.detail();
    page.tensors();
  }
  document.documentElement.dataset.drawn = "yes";
})();
