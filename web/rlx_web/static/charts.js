// Line charts in SVG, drawn from the page's JSON twin, and redrawn while the run goes on.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320, HEIGHT = 150, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;

/** Round numbers inside [low, high]. @param {number} low @param {number} high @param {number} count */
export function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const size = power * ([1, 2, 2.5, 5].find((m) => m * power >= rough) ?? 10);
  const first = Math.ceil(low / size - 1e-9), last = Math.floor(high / size + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * size).toPrecision(12)));
}

/** A linear map from [low, high] to [from, to]; the middle when low and high are one. */
export function scale(low, high, from, to) {
  return (v) => (high > low ? from + ((v - low) / (high - low)) * (to - from) : (from + to) / 2);
}

/** Four significant digits at most. @param {number} v */
export function number(v) {
  const size = Math.abs(v);
  const plain = size === 0 || (size >= 1e-4 && size < 1e6);
  return plain ? String(Number(v.toPrecision(4))) : v.toExponential(2);
}

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** @param {string} name @param {[number, number][]} points */
function draw(name, points) {
  const steps = points.map((p) => p[0]), values = points.map((p) => p[1]);
  const range = [Math.min(...steps), Math.max(...steps), Math.min(...values), Math.max(...values)];
  const x = scale(range[0], range[1], LEFT, WIDTH - RIGHT);
  const y = scale(range[2], range[3], HEIGHT - BOTTOM, TOP);
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${name} by step` });
  for (const t of ticks(range[2], range[3])) {
    svg.append(make("path", { class: "grid", d: `M${LEFT} ${y(t)}H${WIDTH - RIGHT}` }));
    svg.append(make("text", { class: "tick", x: LEFT - 6, y: y(t) + 3, "text-anchor": "end" }, number(t)));
  }
  for (const t of ticks(range[0], range[1]).filter(Number.isInteger))
    svg.append(make("text", { class: "tick", x: x(t), y: HEIGHT - 6, "text-anchor": "middle" }, number(t)));
  const line = points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
  svg.append(make("polyline", { class: "line", points: line }));
  hover(svg, points, x, y);
  return svg;
}

function hover(svg, points, x, y) {
  const dot = make("circle", { class: "dot", r: 3, cx: x(points.at(-1)[0]), cy: y(points.at(-1)[1]) });
  const label = make("text", { class: "label", y: TOP + 8 });
  svg.append(dot, label);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const near = points.reduce((a, b) => (Math.abs(x(b[0]) - at) < Math.abs(x(a[0]) - at) ? b : a));
    const right = x(near[0]) > WIDTH / 2;
    dot.setAttribute("cx", x(near[0]));
    dot.setAttribute("cy", y(near[1]));
    label.setAttribute("x", right ? LEFT + 4 : WIDTH - RIGHT - 4);
    label.setAttribute("text-anchor", right ? "start" : "end");
    label.textContent = `step ${near[0]}: ${number(near[1])}`;
  });
  svg.addEventListener("pointerleave", () => { label.textContent = ""; });
}

/** Shows a run as the twin describes it. Returns false when the page itself is out of date. */
function show(data) {
  const strip = document.getElementById("strip");
  // By position: names are free text, and HTML does not keep every character of an attribute.
  const figures = [...document.querySelectorAll("[data-metric]")];
  const metrics = data.charts.flatMap((part) => part.metrics);
  if (strip.dataset.status !== data.run.status || metrics.length !== figures.length) return false;
  for (const field of strip.querySelectorAll("[data-field]"))
    field.textContent = data.run[field.dataset.field] ?? "—";
  const progress = strip.querySelector("progress");
  if (progress) progress.value = data.run.step;
  for (const [i, metric] of metrics.entries()) {
    const figure = figures[i];
    if (figure.matches(":hover") && figure.querySelector("svg")) continue;
    figure.querySelector("svg")?.remove();
    figure.querySelector("b").textContent = number(metric.value);
    figure.append(draw(metric.name, metric.points));
  }
  return true;
}

async function follow() {
  const response = await fetch(`${location.pathname}.json`);
  const data = response.ok ? await response.json() : null;
  if (data && !show(data)) return location.reload();
  if (!data || ["queued", "running", "submitted"].includes(data.run.status)) setTimeout(follow, 5000);
}

if (typeof document !== "undefined") follow();
