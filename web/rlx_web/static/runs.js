// The list of runs: folds groups, and keeps running ones up to date.

import { number } from "/static/chart.js";
import { follow } from "/static/live.js";

for (const button of document.querySelectorAll("[data-fold]"))
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    for (const row of button.closest("tbody").querySelectorAll(".member")) row.hidden = !open;
  });

let counted = new URLSearchParams(location.search).get("q") ? null : Number(document.getElementById("total").dataset.total);

/** Writes into a column; false if the page does not have it. */
function fill(row, name, text) {
  const cell = row.querySelector(`[data-field="${name}"]`);
  if (cell) cell.textContent = text;
  return cell !== null;
}

function show(data) {
  const alive = new Map(data.runs.map((run) => [run.id, run]));
  for (const row of document.querySelectorAll("[data-run]")) {
    const run = alive.get(row.dataset.run), badge = row.querySelector(".badge");
    if (!run) {
      if (["running", "submitted"].includes(row.dataset.status)) return again();
      continue;
    }
    row.dataset.status = run.status;
    if (badge) { badge.textContent = run.status; badge.className = `badge ${run.status}`; }
    fill(row, "step", run.step);
    for (const [name, figure] of Object.entries(run.figures))
      if (figure?.step && !fill(row, name, number(figure.value))) return again(); // the first run with this figure
  }
  const now = Object.values(data.statuses).reduce((a, b) => a + b, 0);
  counted ??= now;
  return now === counted || again();
}

function again() {
  location.reload();
  return false;
}

follow(() => "/live.json", show);
