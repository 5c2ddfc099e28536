"use strict";
/* The charts of the report, drawn from the data in the page. */

/* Colours of runs, formats of numbers, and ticks of axes. */

/* Eight colours per theme that colour-blind readers can distinguish on its background (tests/tools/test_report.py). */
const PALETTES = {
  light: ["#3b7dd8", "#b38000", "#801a00", "#663366", "#e66680", "#8033ff", "#1a0080", "#1a0000"],
  dark: ["#5b9bf0", "#ffe600", "#ff3300", "#00ffe6", "#cc1a80", "#ccff99", "#991aff", "#cc8066"],
};
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

function colourOf(run) {
  const palette = PALETTES[document.documentElement.dataset.theme] || PALETTES.light;
  return palette[run % palette.length];
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function withUnit(value, units, digits) {
  for (const [size, unit] of units) {
    if (Math.abs(value) >= size) return trimmed(value / size, digits) + " " + unit;
  }
  return trimmed(value, digits);
}

const SI = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function written(value, unit, digits = 4) {
  if (value === null || value === undefined) return "";
  if (unit === "percent") return trimmed(100 * value, digits) + " %";
  if (unit === "bytes") return withUnit(value, BYTES, digits);
  if (unit === "si") return withUnit(value, SI, digits);
  if (unit === "s") return Math.abs(value) < 1 ? trimmed(1e3 * value, digits) + " ms" : trimmed(value, digits) + " s";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(digits - 2);
  return trimmed(value, digits + 1);
}

/* Return about `number` ticks from `low` to `high`, spaced by 1, 2, 5 or 10 times a power of ten. */
function ticks(low, high, number) {
  const raw = (high - low) / Math.max(number, 1);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  const factors = high / low > 1e4 ? [1] : high / low > 30 ? [1, 3] : [1, 2, 3, 5, 7];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found.length > 1 ? found : [low, high];
}

/* Return the exponential moving average with bias correction; missing values stay missing. */
function smoothed(values, weight) {
  if (weight <= 0) return values;
  let mean = 0, known = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    known = weight * known + (1 - weight);
    return mean / known;
  });
}

/* A chart: a canvas that is redrawn after every change. */

const EDGE = { left: 62, right: 12, top: 10, bottom: 26 };

class Chart {
  /* chart: fields of the Python class Chart; runs: columns, points and marks of each; view: settings of the reader. */
  constructor(chart, runs, view) {
    Object.assign(this, { chart, runs, view, zoom: null, drag: null, isLog: chart.log });
    this.figure = document.createElement("figure");
    this.figure.className = "card chart";
    const caption = document.createElement("figcaption");
    const title = document.createElement("b"), about = document.createElement("span");
    title.textContent = word(chart.title);
    about.textContent = word(chart.about);
    this.button = document.createElement("button");
    this.button.type = "button";
    this.button.textContent = word("log");
    this.button.onclick = () => { this.isLog = !this.isLog; this.draw(); };
    caption.append(title, about, this.button);
    this.canvas = document.createElement("canvas");
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.figure.append(caption, this.canvas, this.tip);
    this.canvas.onpointermove = (event) => this.point(event);
    this.canvas.onpointerleave = () => { this.tip.hidden = true; this.drag = null; this.draw(); };
    this.canvas.onpointerdown = (event) => { this.drag = { from: event.offsetX, to: event.offsetX }; };
    this.canvas.onpointerup = () => this.endDrag();
    this.canvas.ondblclick = () => { this.zoom = null; this.draw(); };
  }

  axis() {
    return this.chart.x || this.view.axis;
  }

  /* Return the lines to draw, of training or evaluations: {run, label, x, y, raw, dash}. */
  lines() {
    const found = [];
    this.runs.forEach((run, index) => {
      if (this.view.hidden.has(index)) return;
      const columns = run[this.chart.source], x = columns[this.axis()];
      if (!x) return;
      this.chart.keys.forEach((key, number) => {
        const raw = columns[key];
        if (!raw || !raw.some((value) => value !== null)) return;
        const inner = key.includes("/") ? key.slice(key.indexOf("/") + 1) : key.endsWith("_predicted") ? word("predicted") : "";
        const dash = DASHES[(number + Math.floor(index / PALETTES.light.length)) % DASHES.length];
        const label = inner ? run.name + ", " + inner : run.name;
        found.push({ run: index, label, x, raw, dash, y: smoothed(raw, this.view.smoothing) });
      });
    });
    return found;
  }

  points() {
    const kind = this.chart.points, found = [];
    if (!kind) return found;
    this.runs.forEach((run, index) => {
      if (this.view.hidden.has(index)) return;
      for (const point of run.points[kind]) {
        const x = point[this.axis()];
        if (x !== null && x !== undefined && point.loss !== null) found.push({ run: index, x, y: point.loss });
      }
    });
    return found;
  }

  /* Return the ranges of both axes over all drawn values; null if there are none. */
  ranges(lines, points) {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    const take = (x, y) => {
      if (x === null || y === null || (this.isLog && y <= 0)) return;
      if (this.zoom && (x < this.zoom[0] || x > this.zoom[1])) return;
      x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
    };
    for (const line of lines) {
      const shown = this.view.smoothing > 0 ? line.y : line.raw;
      shown.forEach((y, i) => take(line.x[i], y));
    }
    points.forEach((point) => take(point.x, point.y));
    if (x0 === Infinity) return null;
    if (this.zoom) [x0, x1] = this.zoom;
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    if (y1 - y0 < 1e-9 * Math.abs(y1)) y0 = y1; /* constant up to rounding, for which ticks would be too fine */
    const pad = this.isLog ? 1.08 : 0.06 * (y1 - y0) || Math.abs(y1) * 0.1 || 1;
    if (this.isLog) { y0 /= pad; y1 *= pad; } else { y0 = y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad; y1 += pad; }
    return { x0, x1, y0, y1 };
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    pen.scale(ratio, ratio);
    pen.font = "11px " + getComputedStyle(document.body).fontFamily;
    this.button.setAttribute("aria-pressed", String(this.isLog));
    const lines = this.lines(), points = this.points();
    this.shown = this.ranges(lines, points);
    if (!this.shown) {
      pen.fillStyle = style.getPropertyValue("--soft");
      pen.fillText(word("no data"), width / 2 - 24, height / 2);
      return;
    }
    this.place(width, height);
    this.drawAxes(pen, style, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(EDGE.left - 5, 0, width - EDGE.left - EDGE.right + 10, height - EDGE.bottom);
    pen.clip();
    if (this.view.marks) this.drawMarks(pen, height);
    for (const line of lines) {
      const isSmooth = this.view.smoothing > 0;
      if (isSmooth) this.drawLine(pen, line, line.raw, 0.22);
      this.drawLine(pen, line, line.y, 1);
    }
    for (const point of points) this.drawPoint(pen, point, style);
    if (this.drag) {
      pen.fillStyle = "rgb(120 150 220 / 22%)";
      pen.fillRect(Math.min(this.drag.from, this.drag.to), 0, Math.abs(this.drag.to - this.drag.from), height);
    }
    pen.restore();
  }

  place(width, height) {
    const { x0, x1, y0, y1 } = this.shown, along = width - EDGE.left - EDGE.right, up = height - EDGE.top - EDGE.bottom;
    const low = this.isLog ? Math.log(y0) : y0, high = this.isLog ? Math.log(y1) : y1;
    this.toX = (x) => EDGE.left + ((x - x0) / (x1 - x0)) * along;
    this.toY = (y) => EDGE.top + (1 - ((this.isLog ? Math.log(y) : y) - low) / (high - low)) * up;
    this.fromX = (at) => x0 + ((at - EDGE.left) / along) * (x1 - x0);
  }

  drawAxes(pen, style, width, height) {
    const { x0, x1, y0, y1 } = this.shown;
    pen.strokeStyle = style.getPropertyValue("--grid");
    pen.fillStyle = style.getPropertyValue("--soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const y of this.isLog ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
      pen.beginPath();
      pen.moveTo(EDGE.left, this.toY(y));
      pen.lineTo(width - EDGE.right, this.toY(y));
      pen.stroke();
      pen.fillText(written(y, this.chart.unit, 3), EDGE.left - 7, this.toY(y));
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const x of ticks(x0, x1, Math.max(width / 75, 2))) {
      pen.fillText(withUnit(x, SI, 3), this.toX(x), height - EDGE.bottom + 6);
    }
    const axis = this.axis();
    pen.textAlign = "right";
    pen.fillText(word(axis === "step" ? "steps" : axis), EDGE.left - 7, height - EDGE.bottom + 6);
  }

  drawLine(pen, line, values, alpha) {
    pen.strokeStyle = colourOf(line.run);
    pen.globalAlpha = alpha;
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    pen.setLineDash(line.dash);
    pen.beginPath();
    let isOpen = false, drawn = 0, last = null;
    values.forEach((y, i) => {
      const x = line.x[i];
      if (y === null || x === null || (this.isLog && y <= 0)) { isOpen = false; return; }
      if (isOpen) pen.lineTo(this.toX(x), this.toY(y)); else pen.moveTo(this.toX(x), this.toY(y));
      isOpen = true;
      drawn += 1;
      last = [x, y];
    });
    pen.stroke();
    if (drawn === 1) { pen.beginPath(); pen.arc(this.toX(last[0]), this.toY(last[1]), 2.5, 0, 7); pen.stroke(); }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  drawPoint(pen, point, style) {
    if (this.isLog && point.y <= 0) return;
    pen.fillStyle = style.getPropertyValue("--card");
    pen.strokeStyle = colourOf(point.run);
    pen.lineWidth = 1.8;
    pen.beginPath();
    pen.arc(this.toX(point.x), this.toY(point.y), 3.6, 0, 7);
    pen.fill();
    pen.stroke();
  }

  /* Draw checkpoints as ticks at the bottom, restarts as dashed lines, failed saves and guard events in red. */
  drawMarks(pen, height) {
    this.runs.forEach((run, index) => {
      if (this.view.hidden.has(index)) return;
      for (const mark of run.marks) {
        const x = mark[this.axis()];
        if (x === null || x === undefined) continue;
        const at = this.toX(x), isBad = mark.kind === "failed" || mark.kind === "guard";
        pen.strokeStyle = isBad ? "#d3455b" : colourOf(index);
        pen.lineWidth = mark.kind === "save" ? 2 : 1;
        pen.setLineDash(mark.kind === "start" ? [4, 3] : []);
        pen.beginPath();
        pen.moveTo(at, height - EDGE.bottom);
        pen.lineTo(at, mark.kind === "start" ? EDGE.top : height - EDGE.bottom - 7);
        pen.stroke();
      }
    });
    pen.setLineDash([]);
  }

  point(event) {
    if (this.drag) this.drag.to = event.offsetX;
    if (!this.shown) return;
    this.draw();
    const x = this.fromX(event.offsetX), rows = [];
    let near = null;
    for (const line of this.lines()) {
      const i = nearest(line.x, line.y, x);
      if (i === null) continue;
      rows.push({ run: line.run, label: line.label, value: line.y[i], dash: line.dash, at: line.x[i] });
      if (near === null || Math.abs(line.x[i] - x) < Math.abs(near - x)) near = line.x[i];
    }
    if (!rows.length) { this.tip.hidden = true; return; }
    this.mark(near, rows);
    this.tell(near, rows, event);
  }

  mark(near, rows) {
    const pen = this.canvas.getContext("2d"), height = this.canvas.clientHeight;
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--soft");
    pen.lineWidth = 0.6;
    pen.beginPath();
    pen.moveTo(this.toX(near), EDGE.top);
    pen.lineTo(this.toX(near), height - EDGE.bottom);
    pen.stroke();
    for (const row of rows) {
      if (this.isLog && row.value <= 0) continue;
      pen.fillStyle = colourOf(row.run);
      pen.beginPath();
      pen.arc(this.toX(row.at), this.toY(row.value), 3, 0, 7);
      pen.fill();
    }
  }

  tell(near, rows, event) {
    const head = document.createElement("div"), axis = this.axis();
    head.textContent = axis === "step" ? word("step") + " " + withUnit(near, [], 7) : withUnit(near, SI, 7) + " " + word(axis);
    rows.sort((a, b) => b.value - a.value);
    this.tip.replaceChildren(head, ...rows.slice(0, 24).map((row) => {
      const line = document.createElement("div"), swatch = document.createElement("i"), value = document.createElement("b");
      swatch.className = "swatch";
      swatch.style.background = colourOf(row.run);
      value.textContent = written(row.value, this.chart.unit, 5);
      line.append(swatch, row.label, value);
      return line;
    }));
    this.tip.hidden = false;
    const isRight = event.offsetX > this.canvas.clientWidth / 2, at = this.canvas.offsetLeft + event.offsetX;
    this.tip.style.left = isRight ? "" : at + 16 + "px";
    this.tip.style.right = isRight ? this.figure.clientWidth - at + 16 + "px" : "";
    this.tip.style.top = this.canvas.offsetTop + 8 + "px";
  }

  endDrag() {
    const drag = this.drag;
    this.drag = null;
    if (drag && this.shown && Math.abs(drag.to - drag.from) > 5) {
      this.zoom = [this.fromX(Math.min(drag.from, drag.to)), this.fromX(Math.max(drag.from, drag.to))];
    }
    this.draw();
  }
}

/* Return the index in `column` of the number nearest to x, among the rows in which `values` has a value. */
function nearest(column, values, x) {
  let found = null;
  for (let i = 0; i < column.length; i++) {
    if (column[i] === null || values[i] === null) continue;
    if (found === null || Math.abs(column[i] - x) < Math.abs(column[found] - x)) found = i;
  }
  return found;
}

/* Build the charts from the data in the page, and connect the controls. */

const page = JSON.parse(document.getElementById("data").textContent);
const view = { smoothing: 0, axis: "step", marks: true, hidden: new Set() };
const isChinese = /^zh/i.test(navigator.language);
document.documentElement.lang = isChinese ? "zh" : "en";

/* Return a label in the reader's language; text without a translation, such as a run's name, is unchanged. */
function word(text) {
  return isChinese && Object.hasOwn(page.zh, text) ? page.zh[text] : text;
}

const charts = page.charts.map((chart) => new Chart(chart, page.runs, view));

function drawAll() {
  document.querySelectorAll("i.swatch[data-run]").forEach((swatch) => {
    swatch.style.background = colourOf(Number(swatch.dataset.run));
  });
  for (const chart of charts) chart.draw();
  document.documentElement.dataset.drawn = String(charts.filter((chart) => chart.shown).length);
}

function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  drawAll();
}

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
document.getElementById("charts").append(...charts.map((chart) => chart.figure));
document.querySelectorAll("input[data-run]").forEach((box) => {
  box.onchange = () => {
    const run = Number(box.dataset.run);
    if (box.checked) view.hidden.delete(run); else view.hidden.add(run);
    box.closest("tr").classList.toggle("off", !box.checked);
    drawAll();
  };
});
document.getElementById("smoothing").oninput = (event) => {
  view.smoothing = Number(event.target.value);
  event.target.nextElementSibling.textContent = event.target.value;
  drawAll();
};
document.getElementById("axis").onchange = (event) => {
  view.axis = event.target.value;
  for (const chart of charts) if (!chart.chart.x) chart.zoom = null;
  drawAll();
};
for (const choice of document.getElementById("axis").options) choice.textContent = word(choice.textContent);
document.getElementById("marks").onchange = (event) => { view.marks = event.target.checked; drawAll(); };
document.getElementById("theme").onclick = () => {
  useTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
};
document.querySelectorAll("button.all-settings").forEach((button) => {
  button.onclick = () => {
    const isShort = document.querySelector("table.settings").classList.toggle("only-differences");
    button.textContent = word(isShort ? "show all" : "show differences only");
  };
});
if (page.runs.length === 1) document.querySelector("table.settings").classList.remove("only-differences");
prefersDark.onchange = (event) => useTheme(event.matches ? "dark" : "light");
window.onresize = drawAll;
useTheme(location.hash === "#dark" || (location.hash !== "#light" && prefersDark.matches) ? "dark" : "light");
