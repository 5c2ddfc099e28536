"use strict";
/* Draws the report's charts from the data in the page. */

/* Run colours, number formats and axis ticks. */

/* Eight colours per theme; colour-blind readers can distinguish them on its background (tests/tools/test_report.py). */
const PALETTES = {
  light: ["#3b7dd8", "#b38000", "#801a00", "#663366", "#e66680", "#8033ff", "#1a0080", "#1a0000"],
  dark: ["#5b9bf0", "#ffe600", "#ff3300", "#00ffe6", "#cc1a80", "#ccff99", "#991aff", "#cc8066"],
};
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

function colourOf(runIdx) {
  const palette = PALETTES[document.documentElement.dataset.theme] || PALETTES.light;
  return palette[runIdx % palette.length];
}

function roundDigits(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function withUnit(value, units, digits) {
  for (const [size, unit] of units) {
    if (Math.abs(value) >= size) return roundDigits(value / size, digits) + " " + unit;
  }
  return roundDigits(value, digits);
}

const SI = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function formatValue(value, unit, digits = 4) {
  if (value === null || value === undefined) return "";
  if (unit === "percent") return roundDigits(100 * value, digits) + " %";
  if (unit === "bytes") return withUnit(value, BYTES, digits);
  if (unit === "si") return withUnit(value, SI, digits);
  if (unit === "s" && Math.abs(value) < 1) return roundDigits(1e3 * value, digits) + " ms";
  if (unit === "s") return roundDigits(value, digits) + " s";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(digits - 2);
  return roundDigits(value, digits + 1);
}

/* Return about `numTicks` ticks from `low` to `high`, spaced by 1, 2, 5 or 10 times a power of ten. */
function ticks(low, high, numTicks) {
  const minStep = (high - low) / Math.max(numTicks, 1);
  if (!(minStep > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(minStep));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= minStep);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) values.push(i * step);
  return values;
}

function logTicks(low, high) {
  const values = [];
  const factors = high / low > 1e4 ? [1] : high / low > 30 ? [1, 3] : [1, 2, 3, 5, 7];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) values.push(value);
    }
  }
  return values.length > 1 ? values : ticks(low, high, 4);
}

/* Return the exponential moving average with bias correction; missing values stay missing. */
function smoothed(values, weight) {
  if (weight <= 0) return values;
  let mean = 0, weightSum = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    weightSum = weight * weightSum + (1 - weight);
    return mean / weightSum;
  });
}

/* A chart: a canvas that is redrawn after every change. */

const EDGE = { left: 62, right: 12, top: 10, bottom: 26 };

class Chart {
  /* spec: fields of the Python class Chart; runs: columns, points and marks per run; view: settings of the controls. */
  constructor(spec, runs, view) {
    Object.assign(this, { spec, runs, view, zoom: null, drag: null, isLog: spec.log });
    this.figure = document.createElement("figure");
    this.figure.className = "card chart";
    const caption = document.createElement("figcaption");
    const title = document.createElement("b"), about = document.createElement("span");
    title.textContent = word(spec.title);
    about.textContent = word(spec.about);
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
    return this.spec.x || this.view.axis;
  }

  /* Return the lines to draw: {runIdx, label, x, raw, dash, y}, where y are the smoothed raw values. */
  lines() {
    const lines = [];
    this.runs.forEach((run, runIdx) => {
      if (this.view.hidden.has(runIdx)) return;
      const columns = run[this.spec.source], x = columns[this.axis()];
      if (!x) return;
      this.spec.keys.forEach((key, keyIdx) => {
        const raw = columns[key];
        if (!raw || !raw.some((value) => value !== null)) return;
        const slash = key.indexOf("/");
        const suffix = slash >= 0 ? key.slice(slash + 1) : key.endsWith("_predicted") ? word("predicted") : "";
        const dash = DASHES[(keyIdx + Math.floor(runIdx / PALETTES.light.length)) % DASHES.length];
        const label = suffix ? run.name + ", " + suffix : run.name;
        lines.push({ runIdx, label, x, raw, dash, y: smoothed(raw, this.view.smoothing) });
      });
    });
    return lines;
  }

  points() {
    const recordType = this.spec.points, points = [];
    if (!recordType) return points;
    this.runs.forEach((run, runIdx) => {
      if (this.view.hidden.has(runIdx)) return;
      for (const point of run.points[recordType]) {
        const x = point[this.axis()];
        if (x !== null && x !== undefined && point.loss !== null) points.push({ runIdx, x, y: point.loss });
      }
    });
    return points;
  }

  /* Return the ranges of both axes over all drawn values; null without values. */
  ranges(lines, points) {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    const include = (x, y) => {
      if (x === null || y === null || (this.isLog && y <= 0)) return;
      if (this.zoom && (x < this.zoom[0] || x > this.zoom[1])) return;
      x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
    };
    for (const line of lines) {
      const values = this.view.smoothing > 0 ? line.y : line.raw;
      values.forEach((y, i) => include(line.x[i], y));
    }
    points.forEach((point) => include(point.x, point.y));
    if (x0 === Infinity) return null;
    if (this.zoom) [x0, x1] = this.zoom;
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    if (y1 - y0 < 1e-9 * Math.abs(y1)) y0 = y1; /* do not magnify rounding errors */
    const padding = this.isLog ? 1.08 : 0.06 * (y1 - y0) || Math.abs(y1) * 0.1 || 1;
    if (this.isLog) return { x0, x1, y0: y0 / padding, y1: y1 * padding };
    y0 = y0 >= 0 && y0 - padding < 0 ? 0 : y0 - padding;
    y1 += padding;
    return { x0, x1, y0, y1 };
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const ctx = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    ctx.scale(ratio, ratio);
    ctx.font = "11px " + getComputedStyle(document.body).fontFamily;
    this.button.setAttribute("aria-pressed", String(this.isLog));
    const lines = this.lines(), points = this.points();
    this.drawnRanges = this.ranges(lines, points);
    if (!this.drawnRanges) {
      ctx.fillStyle = style.getPropertyValue("--soft");
      ctx.fillText(word("no data"), width / 2 - 24, height / 2);
      return;
    }
    this.setScales(width, height);
    this.drawAxes(ctx, style, width, height);
    ctx.save();
    ctx.beginPath();
    ctx.rect(EDGE.left - 5, 0, width - EDGE.left - EDGE.right + 10, height - EDGE.bottom);
    ctx.clip();
    if (this.view.marks) this.drawMarks(ctx, height);
    for (const line of lines) {
      if (this.view.smoothing > 0) this.drawLine(ctx, line, line.raw, 0.22);
      this.drawLine(ctx, line, line.y, 1);
    }
    for (const point of points) this.drawPoint(ctx, point, style);
    if (this.drag) {
      ctx.fillStyle = "rgb(120 150 220 / 22%)";
      ctx.fillRect(Math.min(this.drag.from, this.drag.to), 0, Math.abs(this.drag.to - this.drag.from), height);
    }
    ctx.restore();
  }

  /* Set the functions that convert between values and pixels. */
  setScales(width, height) {
    const { x0, x1, y0, y1 } = this.drawnRanges;
    const plotWidth = width - EDGE.left - EDGE.right, plotHeight = height - EDGE.top - EDGE.bottom;
    const low = this.isLog ? Math.log(y0) : y0, high = this.isLog ? Math.log(y1) : y1;
    this.toX = (x) => EDGE.left + ((x - x0) / (x1 - x0)) * plotWidth;
    this.toY = (y) => EDGE.top + (1 - ((this.isLog ? Math.log(y) : y) - low) / (high - low)) * plotHeight;
    this.fromX = (pixel) => x0 + ((pixel - EDGE.left) / plotWidth) * (x1 - x0);
  }

  drawAxes(ctx, style, width, height) {
    const { x0, x1, y0, y1 } = this.drawnRanges;
    ctx.strokeStyle = style.getPropertyValue("--grid");
    ctx.fillStyle = style.getPropertyValue("--soft");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    for (const y of this.isLog ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
      ctx.beginPath();
      ctx.moveTo(EDGE.left, this.toY(y));
      ctx.lineTo(width - EDGE.right, this.toY(y));
      ctx.stroke();
      ctx.fillText(formatValue(y, this.spec.unit, 3), EDGE.left - 7, this.toY(y));
    }
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    for (const x of ticks(x0, x1, Math.max(width / 75, 2))) {
      const label = withUnit(x, SI, 3), half = ctx.measureText(label).width / 2;
      const left = Math.max(this.toX(x), EDGE.left + half - 3);  // the first label must not touch the axis' name
      ctx.fillText(label, Math.min(left, width - half), height - EDGE.bottom + 6);
    }
    const axis = this.axis();
    ctx.textAlign = "right";
    ctx.fillText(word(axis === "step" ? "steps" : axis), EDGE.left - 7, height - EDGE.bottom + 6);
  }

  drawLine(ctx, line, values, alpha) {
    ctx.strokeStyle = colourOf(line.runIdx);
    ctx.globalAlpha = alpha;
    ctx.lineWidth = 1.6;
    ctx.lineJoin = "round";
    ctx.setLineDash(line.dash);
    ctx.beginPath();
    let isConnected = false, numDrawn = 0, last = null;
    values.forEach((y, i) => {
      const x = line.x[i];
      if (y === null || x === null || (this.isLog && y <= 0)) { isConnected = false; return; }
      if (isConnected) ctx.lineTo(this.toX(x), this.toY(y)); else ctx.moveTo(this.toX(x), this.toY(y));
      isConnected = true;
      numDrawn += 1;
      last = [x, y];
    });
    ctx.stroke();
    if (numDrawn === 1) { ctx.beginPath(); ctx.arc(this.toX(last[0]), this.toY(last[1]), 2.5, 0, 7); ctx.stroke(); }
    ctx.setLineDash([]);
    ctx.globalAlpha = 1;
  }

  drawPoint(ctx, point, style) {
    if (this.isLog && point.y <= 0) return;
    ctx.fillStyle = style.getPropertyValue("--card");
    ctx.strokeStyle = colourOf(point.runIdx);
    ctx.lineWidth = 1.8;
    ctx.beginPath();
    ctx.arc(this.toX(point.x), this.toY(point.y), 3.6, 0, 7);
    ctx.fill();
    ctx.stroke();
  }

  /* Draw checkpoints as ticks at the bottom and restarts as dashed lines; failed saves and guard events are red. */
  drawMarks(ctx, height) {
    this.runs.forEach((run, runIdx) => {
      if (this.view.hidden.has(runIdx)) return;
      for (const mark of run.marks) {
        const position = mark[this.axis()];
        if (position === null || position === undefined) continue;
        const x = this.toX(position), isFailure = mark.kind === "failed" || mark.kind === "guard";
        ctx.strokeStyle = isFailure ? "#d3455b" : colourOf(runIdx);
        ctx.lineWidth = mark.kind === "save" ? 2 : 1;
        ctx.setLineDash(mark.kind === "start" ? [4, 3] : []);
        ctx.beginPath();
        ctx.moveTo(x, height - EDGE.bottom);
        ctx.lineTo(x, mark.kind === "start" ? EDGE.top : height - EDGE.bottom - 7);
        ctx.stroke();
      }
    });
    ctx.setLineDash([]);
  }

  /* Show the cursor and the values nearest to the pointer. */
  point(event) {
    if (this.drag) this.drag.to = event.offsetX;
    if (!this.drawnRanges) return;
    this.draw();
    const x = this.fromX(event.offsetX), rows = [];
    let nearestX = null;
    for (const line of this.lines()) {
      const i = nearest(line.x, line.y, x);
      if (i === null) continue;
      rows.push({ runIdx: line.runIdx, label: line.label, value: line.y[i], dash: line.dash, x: line.x[i] });
      if (nearestX === null || Math.abs(line.x[i] - x) < Math.abs(nearestX - x)) nearestX = line.x[i];
    }
    if (!rows.length) { this.tip.hidden = true; return; }
    this.drawCursor(nearestX, rows);
    this.showTip(nearestX, rows, event);
  }

  drawCursor(x, rows) {
    const ctx = this.canvas.getContext("2d"), height = this.canvas.clientHeight;
    ctx.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--soft");
    ctx.lineWidth = 0.6;
    ctx.beginPath();
    ctx.moveTo(this.toX(x), EDGE.top);
    ctx.lineTo(this.toX(x), height - EDGE.bottom);
    ctx.stroke();
    for (const row of rows) {
      if (this.isLog && row.value <= 0) continue;
      ctx.fillStyle = colourOf(row.runIdx);
      ctx.beginPath();
      ctx.arc(this.toX(row.x), this.toY(row.value), 3, 0, 7);
      ctx.fill();
    }
  }

  showTip(x, rows, event) {
    const head = document.createElement("div"), axis = this.axis();
    const isStep = axis === "step";
    head.textContent = isStep ? word("step") + " " + withUnit(x, [], 7) : withUnit(x, SI, 7) + " " + word(axis);
    rows.sort((a, b) => b.value - a.value);
    this.tip.replaceChildren(head, ...rows.slice(0, 24).map((row) => {
      const entry = document.createElement("div");
      const swatch = document.createElement("i"), value = document.createElement("b");
      swatch.className = "swatch";
      swatch.style.background = colourOf(row.runIdx);
      value.textContent = formatValue(row.value, this.spec.unit, 5);
      entry.append(swatch, row.label, value);
      return entry;
    }));
    this.tip.hidden = false;
    const isRight = event.offsetX > this.canvas.clientWidth / 2, pointerX = this.canvas.offsetLeft + event.offsetX;
    this.tip.style.left = isRight ? "" : pointerX + 16 + "px";
    this.tip.style.right = isRight ? this.figure.clientWidth - pointerX + 16 + "px" : "";
    this.tip.style.top = this.canvas.offsetTop + 8 + "px";
  }

  endDrag() {
    const drag = this.drag;
    this.drag = null;
    if (drag && this.drawnRanges && Math.abs(drag.to - drag.from) > 5) {
      this.zoom = [this.fromX(Math.min(drag.from, drag.to)), this.fromX(Math.max(drag.from, drag.to))];
    }
    this.draw();
  }
}

/* Return the index of the number in `column` nearest to x among the rows where `values` is not null; null if none. */
function nearest(column, values, x) {
  let nearestIdx = null;
  for (let i = 0; i < column.length; i++) {
    if (column[i] === null || values[i] === null) continue;
    if (nearestIdx === null || Math.abs(column[i] - x) < Math.abs(column[nearestIdx] - x)) nearestIdx = i;
  }
  return nearestIdx;
}

/* Create the charts and connect the controls. */

const page = JSON.parse(document.getElementById("data").textContent);
const view = { smoothing: 0, axis: "step", marks: true, hidden: new Set() };
const isChinese = /^zh/i.test(navigator.language);
document.documentElement.lang = isChinese ? "zh" : "en";

/* Return a text in the browser's language; text without a translation, such as a run's name, is unchanged. */
function word(text) {
  return isChinese && Object.hasOwn(page.zh, text) ? page.zh[text] : text;
}

const charts = page.charts.map((spec) => new Chart(spec, page.runs, view));

function drawAll() {
  document.querySelectorAll("i.swatch[data-run]").forEach((swatch) => {
    swatch.style.background = colourOf(Number(swatch.dataset.run));
  });
  for (const chart of charts) chart.draw();
  document.documentElement.dataset.drawn = String(charts.filter((chart) => chart.drawnRanges).length);
}

function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  drawAll();
}

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
document.getElementById("charts").append(...charts.map((chart) => chart.figure));
document.querySelectorAll("input[data-run]").forEach((checkbox) => {
  checkbox.onchange = () => {
    const runIdx = Number(checkbox.dataset.run);
    if (checkbox.checked) view.hidden.delete(runIdx); else view.hidden.add(runIdx);
    checkbox.closest("tr").classList.toggle("off", !checkbox.checked);
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
  for (const chart of charts) if (!chart.spec.x) chart.zoom = null;
  drawAll();
};
for (const option of document.getElementById("axis").options) option.textContent = word(option.textContent);
document.getElementById("marks").onchange = (event) => { view.marks = event.target.checked; drawAll(); };
document.getElementById("theme").onclick = () => {
  useTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
};
document.querySelectorAll("button.all-settings").forEach((button) => {
  button.onclick = () => {
    const showsDifferences = document.querySelector("table.settings").classList.toggle("only-differences");
    button.textContent = word(showsDifferences ? "show all" : "show differences only");
  };
});
if (page.runs.length === 1) document.querySelector("table.settings").classList.remove("only-differences");
prefersDark.onchange = (event) => useTheme(event.matches ? "dark" : "light");
window.onresize = drawAll;
useTheme(location.hash === "#dark" || (location.hash !== "#light" && prefersDark.matches) ? "dark" : "light");
