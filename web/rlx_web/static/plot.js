// Line charts, drawn by uPlot. The charts of a page share their pointer and their zoom.

import uPlot from "/static/uplot/uPlot.esm.js";
import { around, columns, nearest, number, visible } from "/static/chart.js";

const COLOURS = 6, HEIGHT = 150;
const FONT = "10px system-ui, sans-serif";

/** @typedef {{label: string, points: [number, number][]}} Curve */

const theme = matchMedia("(prefers-color-scheme: dark)");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (i) => `--c${i % COLOURS}`;

/** The charts of a page. */
export class Board {
  #plots = new Map(); #size; #range = null;

  constructor() {
    this.#size = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) {
        const plot = this.#plots.get(target.closest("figure"));
        if (plot && contentRect.width) plot.setSize({ width: Math.floor(contentRect.width), height: plot.height });
      }
    });
    theme.addEventListener("change", () => { for (const plot of this.#plots.values()) plot.redraw(); });
  }

  /** Shows a range of x in every chart; null shows everything. @param {[number, number] | null} range */
  zoom(range) {
    this.#range = range;
    for (const plot of this.#plots.values()) this.#show(plot);
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
    const box = document.createElement("div");
    box.className = "plot";
    box.setAttribute("role", "img");
    const ends = shown.map((c) => `${c.label} ${number(c.points.at(-1)[1])}`).join(", ");
    box.setAttribute("aria-label", visible(`${title} by step: ${ends}`));
    figure.append(box);
    const legend = named(figure, shown), width = Math.floor(box.clientWidth) || 320;
    const plot = new uPlot(this.#options(shown, width, legend), columns(shown.map((c) => c.points)), box);
    this.#plots.set(figure, plot);
    this.#size.observe(box);
    this.#show(plot);
  }

  #show(plot) {
    const xs = plot.data[0];
    const [min, max] = this.#range ?? [xs[0], xs.at(-1)];
    plot.setScale("x", { min, max });
  }

  #options(curves, width, legend) {
    const line = (i) => ({
      label: "", spanGaps: true, width: 1.6, points: { show: (u, s) => u.data[s].filter((v) => v !== null).length === 1 },
      stroke: () => ink(colour(i)),
    });
    const axis = { font: FONT, stroke: () => ink("--faint"), ticks: { show: false }, values: (u, splits) => splits.map((v) => (v === null ? "" : number(v))) };
    return {
      width, height: HEIGHT, legend: { show: false }, padding: [8, 14, 0, 0],
      scales: { x: { time: false }, y: { range: rangeOf } },
      axes: [
        { ...axis, size: 22, space: 60, grid: { show: false } },
        { ...axis, size: 48, space: 28, grid: { width: 1, stroke: () => ink("--edge") } },
      ],
      series: [{}, ...curves.map((_, i) => line(i))],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false },
        dataIdx: (u, s, i) => nearest(u.data[0], u.data[s], i) ?? i,
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

/** Adds a legend, and returns what shows the values at an index of the data, or the last ones. */
function named(figure, curves) {
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
  const rest = () => {
    for (const [i, { points }] of curves.entries()) cells[i].textContent = number(points.at(-1)[1]);
    place.textContent = "";
  };
  figure.append(list);
  rest();
  return (at, plot) => {
    if (at === null || at === undefined) return rest();
    for (const i of cells.keys()) cells[i].textContent = number(plot.data[i + 1][plot.cursor.idxs[i + 1]]);
    place.textContent = `step ${number(plot.data[0][at])}`;
  };
}
