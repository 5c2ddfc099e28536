"use strict";
/* One chart: a canvas, drawn anew whenever anything changes. */

const EDGE = { left: 62, right: 12, top: 10, bottom: 26 };

class Chart {
  /* chart: as Python describes it; runs: columns, points and marks of each; view: what the reader has chosen. */
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

  /* The lines to draw, of training or of evaluations: {run, label, x, y, raw, dash}. */
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

  /* The ranges of both axes over what is drawn; null where nothing is. */
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
    if (y1 - y0 < 1e-9 * Math.abs(y1)) y0 = y1; /* a constant, but for rounding: no axis is that fine */
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
      pen.fillText(word("nothing to draw"), width / 2 - 40, height / 2);
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

  /* Checkpoints are ticks at the bottom, restarts dashed lines; what failed or was left out is red. */
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

/* The place of the number in a rising column that lies nearest to x, among those whose line has a value there. */
function nearest(column, values, x) {
  let found = null;
  for (let i = 0; i < column.length; i++) {
    if (column[i] === null || values[i] === null) continue;
    if (found === null || Math.abs(column[i] - x) < Math.abs(column[found] - x)) found = i;
  }
  return found;
}
