// The run page: fetches curves when their section comes into view, and keeps them up to date.

import { merged, visible } from "/static/chart.js";
import { now as clock } from "/static/clock.js";
import { follow, got, lasting } from "/static/live.js";
import { Board } from "/static/plot.js";

const strip = document.getElementById("strip"), run = strip.dataset.run;
const place = `/runs/${run}`;
const MOST = 40, LONGEST = 8000;
const ENDED = ["finished", "failed", "stopped", "lost"];
/** @type {Map<string, [number, number][]>} fetched curves, by metric */
const curves = new Map();
const advice = document.getElementById("plots"); // not there as long as there are no curves
const board = advice && new Board();
if (advice) advice.hidden = false;
const seen = { seq: Number(strip.dataset.seq), event: Number(strip.dataset.event) };
let sections = [];

function redraw(figure, chart) {
  const shown = chart.curves.map(([name, label]) => ({ label, points: curves.get(name) ?? [] }));
  board.draw(figure, shown, chart.title);
}

/** Splits names into batches that fit into one address. */
function batches(names) {
  const found = [];
  let left = 0;
  for (const name of names) {
    const length = encodeURIComponent(name.toWellFormed()).length;
    if (!found.length || left < length || found.at(-1).length === MOST) { found.push([]); left = LONGEST; }
    found.at(-1).push(name);
    left -= length;
  }
  return found;
}

/** Draws a section; fetches what it lacks. */
async function load(element) {
  const part = sections[Number(element.dataset.section)];
  const names = part.charts.flatMap((chart) => chart.curves.map(([name]) => name));
  for (const some of batches(names.filter((name) => !curves.has(name)))) {
    const data = await got(`${place}/curves.json?${new URLSearchParams(some.map((name) => ["name", name]))}`);
    for (const [name, points] of Object.entries(data?.curves ?? {})) curves.set(name, points);
  }
  for (const figure of element.querySelectorAll("[data-chart]")) redraw(figure, part.charts[Number(figure.dataset.chart)]);
  element.dataset.ready = "true";
}

function grow(points) {
  const news = new Map(Object.entries(points));
  for (const [name, more] of news)
    if (curves.has(name)) curves.set(name, merged(curves.get(name), more));
  for (const element of document.querySelectorAll("[data-section][data-ready]")) {
    const part = sections[Number(element.dataset.section)];
    for (const figure of element.querySelectorAll("[data-chart]:not(:hover)")) {
      const chart = part.charts[Number(figure.dataset.chart)];
      if (chart.curves.some(([name]) => news.has(name))) redraw(figure, chart);
    }
  }
}

function happened(events) {
  const body = document.getElementById("events");
  for (const event of events) {
    const row = document.createElement("tr");
    if (["error", "warning"].includes(event.level)) row.className = "bad";
    for (const text of [new Date(event.at * 1000).toISOString().slice(0, 19).replace("T", " "), event.kind, event.message]) {
      const cell = document.createElement("td");
      cell.textContent = visible(text);
      row.append(cell);
    }
    row.cells[0].className = "faint";
    row.cells[2].className = "text";
    body.prepend(row);
    body.querySelector(".none")?.remove();
  }
}

/** What the run does now, for instance its warm start. */
function now(progress) {
  strip.querySelector('[data-field="now"]').hidden = !progress;
  if (!progress) return;
  const { stage, done, total, note, doing } = progress, bar = strip.querySelector("progress.stage");
  strip.querySelector('[data-field="stage"]').textContent = visible(`${stage} ${done}/${total} ${note} ${doing}`);
  [bar.max, bar.value] = [total || 1, done];
}

function show(data) {
  const isFirst = !board && Object.keys(data.points).length > 0;
  if (isFirst || data.run.status !== strip.dataset.status) { location.reload(); return false; }
  strip.querySelector('[data-field="step"]').textContent = data.run.step;
  strip.querySelector('[data-field="phase"]').textContent = data.run.phase === null ? "—" : visible(data.run.phase);
  const left = strip.querySelector('[data-field="eta"]');
  left.dataset.until = data.run.eta === null ? "" : clock() + data.run.eta;
  left.textContent = lasting(data.run.eta);
  strip.querySelector('[data-field="heartbeat"]').dataset.at = data.run.heartbeat ?? "";
  const progress = strip.querySelector("progress.steps");
  if (progress) progress.value = data.run.step;
  now(data.progress);
  const idle = document.getElementById("idle");
  idle.hidden = !data.idle_steps;
  idle.querySelector("b").textContent = data.idle_steps;
  if (data.seq > seen.seq) grow(data.points);
  if (data.events.length) { happened(data.events); seen.event = data.events.at(-1).id; }
  seen.seq = data.seq;
  return !ENDED.includes(data.run.status);
}

/** Keeps which parts are unfolded, since the page loads itself again when its run ends. */
function keepFolds() {
  const key = `unfolded ${run}`, parts = [...document.querySelectorAll("details[id]")];
  const kept = JSON.parse(sessionStorage.getItem(key) ?? "[]");
  for (const part of parts) {
    part.open ||= kept.includes(part.id);
    part.addEventListener("toggle", () => {
      sessionStorage.setItem(key, JSON.stringify(parts.filter((p) => p.open).map((p) => p.id)));
    });
  }
}

/** Unfolds the part of the page that the address names. */
function unfold() {
  const part = document.getElementById(location.hash.slice(1));
  if (!(part instanceof HTMLDetailsElement) || part.open) return;
  part.open = true;
  part.scrollIntoView();
}

async function begin() {
  const data = await got(`${place}.json`);
  if (!data) return;
  ({ sections } = data);
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watch.unobserve(entry.target); load(entry.target); }
  }, { rootMargin: "300px" });
  for (const element of document.querySelectorAll("[data-section]")) watch.observe(element);
  if (!ENDED.includes(strip.dataset.status))
    follow(() => `${place}/live.json?after=${seen.seq}&event=${seen.event}`, show);
}

keepFolds();
addEventListener("hashchange", unfold);
unfold();
begin();
