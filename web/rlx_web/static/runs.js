// The list of runs: folds groups, compares ticked runs, and keeps running ones up to date.

import { number } from "/static/chart.js";
import { follow } from "/static/live.js";

for (const button of document.querySelectorAll("[data-fold]"))
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    for (const row of button.closest("tbody").querySelectorAll(".member")) row.hidden = !open;
  });

for (const box of document.querySelectorAll("[data-all]"))
  box.addEventListener("change", () => {
    for (const one of box.closest("tbody").querySelectorAll('input[name="run"]')) one.checked = box.checked;
  });

const total = document.getElementById("total");
let counted = null;

function show(data) {
  const alive = new Map(data.runs.map((run) => [run.id, run]));
  for (const row of document.querySelectorAll("[data-run]")) {
    const run = alive.get(row.dataset.run), badge = row.querySelector(".badge");
    if (!run) {
      if (["running", "submitted"].includes(badge.textContent)) return again();
      continue;
    }
    if (badge.textContent !== run.status) { badge.textContent = run.status; badge.className = `badge ${run.status}`; }
    row.querySelector('[data-field="step"]').textContent = run.step;
    for (const [name, figure] of Object.entries(run.figures))
      if (figure && figure.step) row.querySelector(`[data-field="${name}"]`).textContent = number(figure.value);
  }
  const now = Object.values(data.statuses).reduce((a, b) => a + b, 0);
  counted ??= now;
  return now === counted || again();
}

/** Reloads the page; if the reader has ticked something, only reports that it is out of date. */
function again() {
  if (!document.querySelector('input[type="checkbox"]:checked')) location.reload();
  else total.textContent = "new data: reload the page";
  return false;
}

follow(() => "/live.json", show);
