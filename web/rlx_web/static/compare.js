// Overlays the curves of several runs by step, tokens or time.

import { got } from "/static/live.js";
import { Board } from "/static/plot.js";

const overlay = document.getElementById("overlay");
const FIRST = ["rewards/accuracy/mean", "train/reward_answer", "train/reward"];
const OVER = { step: "step", tokens: "tokens", time: "hours" };
const NONE = { curves: {}, means: {}, width: 1 };
/** @type {Map<string, any>} answers by address */
const known = new Map();
let asked = 0;

async function answer(run, name, x) {
  const address = `/runs/${encodeURIComponent(run)}/curves.json?${new URLSearchParams({ name, x, smooth: true })}`;
  if (!known.has(address)) {
    const data = await got(address);
    if (!data) return NONE;
    known.set(address, data);
  }
  return known.get(address);
}

async function show(board, metric, x, recipes) {
  const mine = ++asked;
  const curves = await Promise.all(
    recipes.flatMap((runs, colour) => runs.map(async (run) => {
      const found = await answer(run, metric, x), label = `${String.fromCharCode(65 + colour)} ${run}`;
      return { label, colour, points: found.curves[metric] ?? [], means: found.means[metric], width: found.width };
    })),
  );
  if (mine !== asked) return; // something else has been asked for since
  board.draw(document.getElementById("chart"), curves, { title: metric, x: OVER[x], height: 320 });
  overlay.dataset.ready = `${metric} ${x}`;
}

if (overlay) {
  const recipes = overlay.dataset.runs.split(";").map((runs) => runs.split(",").filter(Boolean));
  const [metric, x] = ["metric", "x"].map((id) => document.getElementById(id));
  const first = FIRST.find((name) => [...metric.options].some((option) => option.value === name));
  if (first) metric.value = first;
  const redraw = () => metric.options.length && show(board, metric.value, x.value, recipes);
  const board = new Board(document.getElementById("plots"), redraw);
  metric.addEventListener("change", redraw);
  x.addEventListener("change", () => { board.zoom(null); redraw(); });
  redraw();
}
