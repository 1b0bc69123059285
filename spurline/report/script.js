"use strict";
// Draws the charts of the page from the data in it. Colours and type are the style sheet's.

let page, smooth, logarithmic;  // the data, and the two boxes that change how it is drawn
const hidden = new Set();       // runs that are not shown
let draws = [];                 // one function a chart, to draw it again

function make(parent, name, attributes = {}, text = "") {
  const svg = parent instanceof SVGElement || name === "svg";
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return parent.appendChild(element);
}

// 1234567 -> "1.23M", 0.00031 -> "3.1e-4": short enough for an axis or a tooltip.
function short(value, digits = 4) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(digits - 2).replace(/\.?0+e/, "e");
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return Number((value / (unit === "k" ? 1e3 : limit)).toPrecision(digits)) + unit;
  }
  return String(Number(value.toPrecision(digits)));
}

// Round numbers from one at or below `low` to one at or above `high`.
function ticksOf(low, high, count, whole = false) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i < high / step + 1 - 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function logTicksOf(low, high, count) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of [1, 2, 3, 5]) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  if (inside.length < 2) return ticksOf(low, high, count);
  return inside.length > 2 * count ? inside.filter((tick) => /^1/.test(tick.toExponential())) : inside;
}

// The mean of the values around each, over about a thirtieth of the curve; what is unknown stays unknown.
function smoothed(values) {
  const reach = Math.ceil(values.length / 60);
  return values.map((value, i) => {
    if (value === null) return null;
    // As far to the left as to the right, or the ends of a slope would bend.
    const near = Math.min(reach, i, values.length - 1 - i);
    const around = values.slice(i - near, i + near + 1).filter((other) => other !== null);
    return around.reduce((sum, other) => sum + other, 0) / around.length;
  });
}

// Axes of a chart in a box as wide as the page allows; returns the scales.
function axes(plot, xs, low, high, log, whole) {
  plot.querySelector("svg")?.remove();
  const width = plot.clientWidth, height = plot.clientHeight;
  const svg = make(plot, "svg", { width, height, "aria-hidden": "true" });
  const count = Math.max(2, Math.round(height / 55));
  const yTicks = log ? logTicksOf(low, high, count) : ticksOf(low, high, count, whole);
  low = Math.min(low, yTicks[0]);
  high = Math.max(high, yTicks[yTicks.length - 1]);
  const labels = yTicks.map((tick) => short(tick));
  const left = 12 + 6.6 * Math.max(...labels.map((label) => label.length)), right = width - 10, top = 8, bottom = height - 22;
  let first = Math.min(...xs), last = Math.max(...xs);
  if (first === last) [first, last] = [first - 1, last + 1];
  const warp = log ? Math.log : (value) => value;
  const x = (step) => left + (right - left) * (step - first) / (last - first);
  const y = (value) => bottom - (bottom - top) * (warp(value) - warp(low)) / (warp(high) - warp(low));
  yTicks.forEach((tick, i) => {
    make(svg, "line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) });
    make(svg, "text", { class: "y", x: left - 6, y: y(tick) + 4 }, labels[i]);
  });
  const xTicks = ticksOf(first, last, Math.max(2, (right - left) / 90), true).filter((tick) => tick >= first && tick <= last);
  for (const tick of xTicks) {
    // The name of the axis stands at its first number.
    const text = tick === xTicks[0] ? `step ${short(tick)}` : short(tick);
    const room = 3.3 * text.length;
    make(svg, "text", { class: "x", x: Math.max(left + room - 6, Math.min(x(tick), width - room)), y: height - 5 }, text);
  }
  const step = (pixel) => first + (last - first) * (pixel - left) / (right - left);
  return { svg, x, y, step, left, right, top, bottom };
}

function pathOf(xs, ys, x, y) {
  let path = "", gap = true;
  ys.forEach((value, i) => {
    if (value === null) { gap = true; return; }
    path += `${gap ? "M" : "L"}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    gap = false;
  });
  return path;
}

function nearest(xs, step) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < step) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - step) <= Math.abs(xs[high] - step) ? low : high;
}

// Pointer and arrow keys choose a column, and a row where there are several. `placeAt(x, y)` says which of them lie at a
// point; `show(column, row, tip)` fills the tooltip and returns where it belongs; show(null) takes all marks away.
function followed(plot, columns, rows, placeAt, show) {
  plot.querySelector(".tip")?.remove();
  const tip = make(plot, "div", { class: "tip", role: "status", hidden: "" });
  let column = columns - 1, row = 0;
  const hide = () => { tip.hidden = true; show(null); };
  const go = (toColumn, toRow) => {
    column = Math.max(0, Math.min(columns - 1, toColumn));
    row = Math.max(0, Math.min(rows - 1, toRow));
    tip.replaceChildren();
    tip.hidden = false;
    const at = show(column, row, tip);
    const beside = at > plot.clientWidth / 2 ? at - tip.offsetWidth - 12 : at + 12;
    tip.style.left = `${Math.max(0, Math.min(plot.clientWidth - tip.offsetWidth, beside))}px`;
  };
  plot.onpointermove = plot.onpointerdown = (event) => {
    const box = plot.getBoundingClientRect();
    go(...placeAt(event.clientX - box.left, event.clientY - box.top));
  };
  plot.onpointerleave = plot.onblur = hide;
  plot.onkeydown = (event) => {
    const far = Math.max(1, Math.round(columns / 20));
    const moves = {
      ArrowLeft: [-1, 0], ArrowRight: [1, 0], PageUp: [-far, 0], PageDown: [far, 0],
      Home: [-columns, 0], End: [columns, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
    };
    if (event.key === "Escape") hide();
    const move = moves[event.key];
    if (!move || (move[1] && rows === 1)) return;
    event.preventDefault();
    if (tip.hidden) go(column, row); else go(column + move[0], row + move[1]);
  };
}

function row(tip, colour, name, value) {
  const line = make(tip, "div");
  make(line, "i", { class: colour });
  make(line, "span", {}, name);
  make(line, "b", {}, value);
}

function drawCurves(plot, chart) {
  const series = chart.series.filter((one) => !hidden.has(one.run));
  if (!series.length) { plot.replaceChildren(); return; }
  const known = series.flatMap((one) => one.y.filter((value) => value !== null));
  let low = Math.min(...known), high = Math.max(...known);
  const log = chart.key === "loss" && logarithmic.checked && low > 0;
  if (chart.from_zero) { low = Math.min(0, low); high = Math.max(high, low + 1e-12); }
  if (high - low < 1e-9 * Math.max(1e-9, Math.abs(high))) [low, high] = [low - Math.abs(low || 1) / 10, high + Math.abs(high || 1) / 10];
  const steps = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const box = axes(plot, steps, low, high, log, known.every(Number.isInteger));
  for (const one of series) {
    const soft = smooth.checked && chart.noisy && !one.dots && one.y.length > 30;
    const kind = `run${one.run % 8}`;
    one.shown = soft ? smoothed(one.y) : one.y;
    if (soft) make(box.svg, "path", { class: `curve raw ${kind}`, d: pathOf(one.x, one.y, box.x, box.y) });
    make(box.svg, "path", { class: `curve ${kind}${one.dashed ? " dashed" : ""}`, d: pathOf(one.x, one.shown, box.x, box.y) });
    if (one.dots || one.x.length === 1) {
      const radius = one.x.length > 60 ? 1.5 : 3;
      one.x.forEach((step, i) => {
        if (one.y[i] !== null) make(box.svg, "circle", { class: kind, cx: box.x(step), cy: box.y(one.y[i]), r: radius });
      });
    }
  }
  const cross = make(box.svg, "line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  followed(plot, steps.length, 1, (x) => [nearest(steps, box.step(x)), 0], (place, _, tip) => {
    cross.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place === null) return 0;
    const step = steps[place], at = box.x(step);
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    make(tip, "div", { class: "head" }, `step ${step.toLocaleString("en")}`);
    for (const one of series) {
      const i = nearest(one.x, step);
      const name = [page.runs.length > 1 ? page.runs[one.run] : "", one.label].filter(Boolean).join(", ");
      const value = one.y[i] === null ? "not a number" : short(one.y[i], 5);
      row(tip, `run${one.run % 8}`, name, one.dots && one.x[i] !== step ? `${value} (step ${one.x[i]})` : value);
    }
    return at;
  });
}

function drawStack(plot, time) {
  const sums = time.x.map(() => 0);
  const bands = time.parts.map((part) => {
    const under = [...sums];
    part.y.forEach((value, i) => { sums[i] += value; });
    return { under, over: [...sums] };
  });
  // One slow step (the first, or a compile) would flatten all others: the axis follows all but the slowest.
  const sorted = [...sums].sort((a, b) => a - b);
  const high = Math.min(sorted[sorted.length - 1], 1.5 * sorted[Math.floor(0.95 * (sorted.length - 1))]) || 1;
  const box = axes(plot, time.x, 0, high, false, false);
  const y = (value) => Math.max(box.top, box.y(value));
  // A single step is drawn as a bar.
  const single = time.x.length === 1;
  const xs = single ? [box.left, box.right] : time.x.map(box.x);
  const twice = (values) => single ? [values[0], values[0]] : values;
  bands.forEach(({ under, over }, i) => {
    const upper = twice(over).map((value, j) => `${xs[j].toFixed(1)} ${y(value).toFixed(1)}`);
    const lower = twice(under).map((value, j) => `${xs[j].toFixed(1)} ${y(value).toFixed(1)}`).reverse();
    make(box.svg, "path", { class: `band part-${time.parts[i].name.replace(".", "-")}`, d: `M${[...upper, ...lower].join("L")}Z` });
  });
  const cross = make(box.svg, "line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  followed(plot, time.x.length, 1, (x) => [nearest(time.x, box.step(x)), 0], (place, _, tip) => {
    cross.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place === null) return 0;
    const at = box.x(time.x[place]);
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    make(tip, "div", { class: "head" }, `step ${time.x[place].toLocaleString("en")}: ${short(sums[place])} ms`);
    for (const part of [...time.parts].reverse()) {
      const share = (100 * part.y[place] / sums[place]).toFixed(0);
      row(tip, `part-${part.name.replace(".", "-")}`, part.label, `${short(part.y[place], 3)} ms, ${share}%`);
    }
    return at;
  });
}

function colourOf(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function drawHeat(plot, map) {
  const cells = Uint8Array.from(atob(map.cells), (letter) => letter.charCodeAt(0));
  const columns = map.x.length;
  const [dead, cold, even, hot] = ["--dead", "--cold", "--even", "--hot"].map(colourOf);
  plot.replaceChildren();
  const canvas = make(plot, "canvas", { width: columns, height: map.experts });
  const paint = canvas.getContext("2d");
  const image = paint.createImageData(columns, map.experts);
  cells.forEach((cell, i) => {
    const column = Math.floor(i / map.experts), expert = i % map.experts;
    const doublings = Math.max(-2, Math.min(2, 2 * Math.log2(cell / 32))) / 2;  // from a quarter to four times the mean
    const end = doublings < 0 ? cold : hot, share = Math.abs(doublings);
    const colour = cell === 0 ? dead : even.map((value, c) => value + share * (end[c] - value));
    image.data.set([...colour, 255], 4 * (expert * columns + column));
  });
  paint.putImageData(image, 0, 0);
  canvas.dataset.cells = cells.length;
  canvas.dataset.colours = new Set(new Uint32Array(paint.getImageData(0, 0, columns, map.experts).data.buffer)).size;
  const mark = make(plot, "div", { class: "cell", hidden: "" });
  const placeAt = (x, y) => [Math.floor(x / plot.clientWidth * columns), Math.floor(y / plot.clientHeight * map.experts)];
  followed(plot, columns, map.experts, placeAt, (place, expert, tip) => {
    mark.hidden = place === null;
    if (place === null) return 0;
    const cell = cells[place * map.experts + expert];
    const until = (place + 1 < columns ? map.x[place + 1] : map.last + 1) - 1;
    const when = until > map.x[place] ? `steps ${map.x[place]} to ${until}` : `step ${map.x[place]}`;
    make(tip, "div", { class: "head" }, `expert ${expert}, ${when}`);
    make(tip, "div", {}, cell ? `${short((cell / 32) ** 2, 2)} times the mean` : "no token");
    const wide = plot.clientWidth / columns, high = plot.clientHeight / map.experts;
    Object.assign(mark.style, { left: `${place * wide}px`, top: `${expert * high}px`, width: `${wide}px`, height: `${high}px` });
    return (place + 0.5) * wide;
  });
}

function connect(selector, data, draw) {
  document.querySelectorAll(selector).forEach((plot, i) => draws.push(() => draw(plot, data[i])));
}
const redraw = () => draws.forEach((draw) => draw());

// Draws what is in the page, at first and whenever it has been replaced.
function start() {
  page = JSON.parse(document.getElementById("data").textContent);
  smooth = document.getElementById("smooth");
  logarithmic = document.getElementById("log");
  draws = [];
  connect(".plot.curves", page.charts, drawCurves);
  connect(".plot.stack", page.times, drawStack);
  connect(".plot.heat", page.heat, drawHeat);
  smooth.onchange = logarithmic.onchange = redraw;
  document.querySelectorAll("input[data-run]").forEach((box) => {
    box.onchange = () => {
      if (box.checked) hidden.delete(Number(box.dataset.run)); else hidden.add(Number(box.dataset.run));
      redraw();
    };
  });
  redraw();
}
start();

let width = document.body.clientWidth;
addEventListener("resize", () => {
  if (document.body.clientWidth !== width) { width = document.body.clientWidth; redraw(); }
});
matchMedia("(prefers-color-scheme: dark)").onchange = redraw;
addEventListener("beforeprint", redraw);
