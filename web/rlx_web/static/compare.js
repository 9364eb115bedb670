// Overlays the curves of several runs by step, tokens or time.

import { draw, smoothed } from "/static/chart.js";
import { got } from "/static/live.js";

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

/** Smooths the means over buckets of steps; the weight of one step is raised to the bucket's width. */
function drawn({ curves, means, width }, name, weight) {
  return { points: smoothed(means[name] ?? [], weight ** width), faint: curves[name] ?? [] };
}

async function show(metric, x, smooth, recipes) {
  const mine = ++asked, weight = Number(smooth.value);
  document.getElementById("smoothed").value = smooth.value;
  const curves = await Promise.all(
    recipes.flatMap((runs, colour) => runs.map(async (run) => {
      const label = `${String.fromCharCode(65 + colour)} ${run}`;
      return { label, colour, ...drawn(await answer(run, metric.value, x.value), metric.value, weight) };
    })),
  );
  if (mine !== asked) return; // something else has been asked for since
  draw(document.getElementById("chart"), curves, { title: metric.value, x: OVER[x.value], width: 900, height: 320 });
  overlay.dataset.ready = `${metric.value} ${x.value}`;
}

if (overlay) {
  const recipes = overlay.dataset.runs.split(";").map((runs) => runs.split(",").filter(Boolean));
  const [metric, x, smooth] = ["metric", "x", "smooth"].map((id) => document.getElementById(id));
  const first = FIRST.find((name) => [...metric.options].some((option) => option.value === name));
  if (first) metric.value = first;
  for (const element of [metric, x]) element.addEventListener("change", () => show(metric, x, smooth, recipes));
  smooth.addEventListener("input", () => show(metric, x, smooth, recipes));
  if (metric.options.length) show(metric, x, smooth, recipes);
}
