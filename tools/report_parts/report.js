"use strict";
/* From the data in the page to its charts, and what the reader may choose. */

const page = JSON.parse(document.getElementById("data").textContent);
const view = { smoothing: 0, axis: "step", marks: true, hidden: new Set() };
const isChinese = /^zh/i.test(navigator.language);
document.documentElement.lang = isChinese ? "zh" : "en";

/* A label in the reader's language; what has no Chinese, as the name of a run, stays. */
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
    button.textContent = word(isShort ? "show all" : "show what differs");
  };
});
if (page.runs.length === 1) document.querySelector("table.settings").classList.remove("only-differences");
prefersDark.onchange = (event) => useTheme(event.matches ? "dark" : "light");
window.onresize = drawAll;
useTheme(location.hash === "#dark" || (location.hash !== "#light" && prefersDark.matches) ? "dark" : "light");
