// Colours tokens by one value at a time, and shows all values of the token under the pointer.

import { number, visible } from "/static/chart.js";
import { keys, link } from "/static/keys.js";
import { got } from "/static/live.js";

const SHADES = 8;
const box = document.getElementById("tokens"), readout = document.getElementById("readout");
const channel = document.getElementById("channel"), rows = document.getElementById("rows");
const spans = [...box.children];
let lines = [], channels = [], chosen = -1;

/** The colour class of a value: p1 to p8 above 0, n1 to n8 below. */
export function shade(value, largest) {
  if (typeof value !== "number" || value === 0 || !largest) return "";
  return `${value > 0 ? "p" : "n"}${Math.max(1, Math.ceil((Math.abs(value) / largest) * SHADES))}`;
}

function paint() {
  const { name, largest } = channels.find((c) => c.name === channel.value) ?? {};
  for (const [i, span] of spans.entries()) {
    span.classList.remove(...[...span.classList].filter((c) => /^[pn]\d$/.test(c)));
    const colour = shade(lines[i][name], largest);
    if (colour) span.classList.add(colour);
  }
  document.getElementById("low").textContent = number(-largest);
  document.getElementById("high").textContent = number(largest);
}

function tell(i) {
  const line = lines[i];
  const said = [`#${line.position}`, `“${visible(line.text).replace("⏎\n", "⏎")}”`, `id ${line.token}`, line.author];
  if (line.turn) said.push(`turn ${line.turn}`);
  said.push(line.learns ? "learns" : "does not learn");
  for (const c of channels)
    if (line[c.name] !== undefined && line[c.name] !== null) said.push(`${c.title} ${number(line[c.name])}`);
  readout.textContent = said.join("  ·  ");
}

function choose(i, scroll) {
  spans[chosen]?.classList.remove("chosen");
  chosen = Math.max(0, Math.min(spans.length - 1, i));
  spans[chosen].classList.add("chosen");
  if (scroll) spans[chosen].scrollIntoView({ block: "nearest" });
  tell(chosen);
}

function table() {
  rows.replaceChildren(...lines.map((line) => {
    const row = document.createElement("tr");
    const cells = [line.position, visible(line.text), line.author, line.turn || "", line.learns ? "yes" : "·"];
    for (const c of channels) cells.push(line[c.name] === undefined || line[c.name] === null ? "·" : number(line[c.name]));
    for (const [i, text] of cells.entries()) {
      const cell = document.createElement("td");
      if (i === 0 || i === 3 || i > 4) cell.className = "n";
      if (i === 1) { const code = document.createElement("code"); code.textContent = text; cell.append(code); }
      else cell.textContent = text;
      row.append(cell);
    }
    return row;
  }));
}

async function begin() {
  const data = await got(`${location.pathname}.json${location.search}`);
  if (!data) return;
  ({ lines, channels } = data);
  channel.addEventListener("change", paint);
  box.addEventListener("pointerover", (event) => {
    const span = event.target.closest("[data-i]");
    if (span) choose(Number(span.dataset.i), false);
  });
  document.getElementById("table").addEventListener("toggle", table, { once: true });
  keys({
    ArrowRight: () => choose(chosen + 1, true),
    ArrowLeft: () => choose(chosen - 1, true),
    "[": link("previous"),
    "]": link("next"),
  });
  paint();
  const asked = /^#t(\d+)$/.exec(location.hash);
  const at = asked ? lines.findIndex((line) => line.position === Number(asked[1])) : -1;
  if (at >= 0) choose(at, true);
  document.body.dataset.ready = "true";
}

begin();
