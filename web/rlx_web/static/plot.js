// Line charts, drawn by uPlot. The charts of a page share their pointer, zoom, scale and smoothing.

import uPlot from "/static/uplot/uPlot.esm.js";
import { around, columns, nearest, number, smoothed, visible } from "/static/chart.js";

const COLOURS = 6, HEIGHT = 150, FAINT = "40";
const FONT = "10px system-ui, sans-serif";

/** @typedef {{label: string, points: [number, number][]}} Curve */

const theme = matchMedia("(prefers-color-scheme: dark)");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (i) => `--c${i % COLOURS}`;

/** The charts of a page, and the form with their settings, which the address keeps. */
export class Board {
  #form; #plots = new Map(); #size;

  /** @param {HTMLFormElement} form with smooth, log, from and to @param {() => void} redraw every chart */
  constructor(form, redraw) {
    this.#form = form;
    this.#size = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) {
        const plot = this.#plots.get(target.closest("figure"));
        if (plot && contentRect.width) plot.setSize({ width: Math.floor(contentRect.width), height: plot.height });
      }
    });
    const asked = new URLSearchParams(location.search);
    for (const field of this.#fields())
      if (asked.has(field.name)) field.type === "checkbox" ? (field.checked = true) : (field.value = asked.get(field.name));
    form.hidden = false;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => { this.#keep(); redraw(); }));
    form.addEventListener("input", (event) => {
      this.#keep();
      if (["from", "to"].includes(event.target.name)) this.#zoom();
      else redraw();
    });
    theme.addEventListener("change", () => { for (const plot of this.#plots.values()) plot.redraw(); });
    this.#keep();
  }

  /** The weight of earlier values in a smoothed curve, from 0 to below 1. */
  get weight() { return Number(this.#form.elements.smooth.value); }

  /** Shows a range of x in every chart; null shows everything. @param {[number, number] | null} range */
  zoom(range) {
    [this.#form.elements.from.value, this.#form.elements.to.value] = range?.map(number) ?? ["", ""];
    this.#keep();
    this.#zoom();
  }

  /**
   * Draws curves into a figure, over what stood there.
   * @param {HTMLElement} figure @param {Curve[]} curves
   * @param {string} title
   */
  draw(figure, curves, title) {
    const shown = curves.filter((c) => c.points.length);
    if (!shown.length) return;
    this.#plots.get(figure)?.destroy();
    for (const old of figure.querySelectorAll(".plot, .legend")) old.remove();
    const log = this.#form.elements.log.checked;
    const lines = shown.map((c) => this.#line(c));
    const drawn = columns([...lines, ...(this.weight ? shown.map((c) => c.points) : [])].map((points) => (log ? positive(points) : points)));
    const box = document.createElement("div");
    box.className = "plot";
    box.setAttribute("role", "img");
    const ends = shown.map((c, i) => `${c.label} ${number(lines[i].at(-1)[1])}`).join(", ");
    box.setAttribute("aria-label", visible(`${title} by step: ${ends}`));
    figure.append(box);
    const legend = named(figure, shown, lines, log), width = Math.floor(box.clientWidth) || 320;
    const plot = new uPlot(this.#options(shown, { width, log, legend }), drawn, box);
    this.#plots.set(figure, plot);
    this.#size.observe(box);
    this.#zoom([plot]);
  }

  #fields() { return ["smooth", "log", "from", "to"].map((name) => this.#form.elements[name]); }

  #line({ points }) { return this.weight ? smoothed(points, this.weight) : points; }

  #keep() {
    const kept = new URLSearchParams(location.search);
    for (const field of this.#fields()) {
      const value = field.type === "checkbox" ? (field.checked ? "1" : "") : field.value === field.defaultValue ? "" : field.value;
      value ? kept.set(field.name, value) : kept.delete(field.name);
    }
    history.replaceState(null, "", `${location.pathname}${kept.size ? `?${kept}` : ""}${location.hash}`);
    this.#form.querySelector("output").value = this.#form.elements.smooth.value;
  }

  #zoom(plots = this.#plots.values()) {
    const [from, to] = ["from", "to"].map((name) => this.#form.elements[name].value.trim());
    const read = (text, other) => (text && Number.isFinite(Number(text)) ? Number(text) : other);
    for (const plot of plots) {
      const xs = plot.data[0];
      if (!xs.length) continue;
      const min = read(from, xs[0]), max = read(to, xs.at(-1));
      plot.setScale("x", min < max ? { min, max } : { min: xs[0], max: xs.at(-1) });
    }
  }

  #options(curves, { width, log, legend }) {
    const line = (i, faint) => ({
      label: "", spanGaps: true, width: faint ? 1 : 1.6, points: { show: (u, s) => !faint && u.data[s].filter((v) => v !== null).length === 1 },
      stroke: () => ink(colour(i)) + (faint ? FAINT : ""),
    });
    const axis = { font: FONT, stroke: () => ink("--faint"), ticks: { show: false }, values: (u, splits) => splits.map((v) => (v === null ? "" : number(v))) };
    return {
      width, height: HEIGHT, legend: { show: false }, padding: [8, 14, 0, 0],
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: rangeOf } },
      axes: [
        { ...axis, size: 22, space: 60, grid: { show: false } },
        { ...axis, size: 48, space: 28, grid: { width: 1, stroke: () => ink("--edge") } },
      ],
      series: [{}, ...curves.map((_, i) => line(i, false)), ...(this.weight ? curves.map((_, i) => line(i, true)) : [])],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false },
        dataIdx: (u, s, i) => nearest(u.data[0], u.data[s], i) ?? i,
        points: { size: (u, s) => (s <= curves.length ? 6 : 0) },
        bind: { dblclick: () => () => { this.zoom(null); return null; } },
        sync: { key: "page", scales: ["x", null], filters: { pub: (type) => type === "mousemove" } },
      },
      hooks: {
        setCursor: [(u) => legend(u.cursor.idx, u)],
        setSelect: [(u) => {
          if (!u.select.width) return;
          const ends = [u.select.left, u.select.left + u.select.width].map((at) => u.posToVal(at, "x"));
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.zoom(ends);
        }],
      },
    };
  }
}

const rangeOf = (u, min, max) => {
  if (min === null || min === undefined) return [null, null];
  return min === max ? around(min) : uPlot.rangeNum(min, max, 0.1, true);
};

const positive = (points) => points.filter(([, y]) => y > 0);

/** Adds a legend, and returns what shows the values at an index of the data, or the last ones. */
function named(figure, curves, lines, log) {
  const list = document.createElement("div");
  list.className = "legend";
  const cells = curves.map((curve, i) => {
    const item = document.createElement("span"), swatch = document.createElement("span"), value = document.createElement("b");
    item.className = `entry c${i % COLOURS}`;
    swatch.className = "swatch";
    item.append(swatch, `${visible(curve.label)} `, value);
    list.append(item);
    return value;
  });
  const place = document.createElement("span");
  place.className = "faint";
  list.append(place);
  const left = lines.flat().filter(([, y]) => !(y > 0)).length;
  const rest = () => {
    for (const [i, line] of lines.entries()) cells[i].textContent = number(line.at(-1)[1]);
    place.textContent = log && left ? `not shown: ${left} of 0 or below` : "";
  };
  figure.append(list);
  rest();
  return (at, plot) => {
    if (at === null || at === undefined) return rest();
    for (const i of cells.keys()) cells[i].textContent = number(plot.data[i + 1][plot.cursor.idxs[i + 1]]);
    place.textContent = `step ${number(plot.data[0][at])}`;
  };
}
