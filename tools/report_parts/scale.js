"use strict";
/* Numbers: how they are written, where an axis has its ticks, and the colours of runs. */

/* Eight colours each, which the colour-blind tell apart too, on the background of each theme (tests/tools/test_report.py). */
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

/* Ticks between two numbers: 1, 2 or 5 times a power of ten apart; on a logarithmic axis powers and what fits between. */
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

/* An exponential mean that begins without a bias: what is missing stays missing. */
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
