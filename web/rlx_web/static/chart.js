// Line charts in SVG: first arithmetic, which needs no browser, then drawing.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const COLOURS = 6;

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

/** At most four significant digits; non-finite values are strings. @param {number | string | null | undefined} v */
export function number(v) {
  if (v === null || v === undefined) return "—";
  if (typeof v !== "number") return String(v);
  const size = Math.abs(v);
  const plain = size === 0 || (size >= 1e-4 && size < 1e6);
  return plain ? String(Number(v.toPrecision(4))) : v.toExponential(2);
}

/**
 * Exponential moving average, corrected for its beginning as Adam's is: the first value is itself.
 * @param {[number, number][]} points @param {number} weight of what came before, from 0 to below 1
 */
export function smoothed(points, weight) {
  let sum = 0, mass = 0;
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return [x, sum / mass];
  });
}

/** Smallest and largest of x and y over all curves. @param {[number, number][][]} curves */
export function bounds(curves) {
  const box = [Infinity, -Infinity, Infinity, -Infinity];
  for (const points of curves)
    for (const [x, y] of points) {
      if (x < box[0]) box[0] = x;
      if (x > box[1]) box[1] = x;
      if (y < box[2]) box[2] = y;
      if (y > box[3]) box[3] = y;
    }
  return box;
}

/** Appends new points; a step that is written again replaces its old value. */
export function merged(points, news) {
  const at = new Map(points);
  for (const [x, y] of news) at.set(x, y);
  return [...at].sort((a, b) => a[0] - b[0]);
}

/** The point whose x is nearest. @param {[number, number][]} points @param {number} x */
export function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  const before = points[Math.max(0, low - 1)], after = points[low];
  return Math.abs(before[0] - x) <= Math.abs(after[0] - x) ? before : after;
}

const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}\p{Cn}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}]/gu;

/** Replaces control characters, direction marks, fillers and the like by their codes. */
export function visible(text) {
  return String(text).replace(HIDDEN, (c) => {
    const code = c.codePointAt(0);
    if (c === "\n") return "⏎\n";
    if (code === 127) return "␡";
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

export function make(name, attributes = {}, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/**
 * Draws curves into a figure, over what stood there.
 * @param {HTMLElement} figure
 * @param {{label: string, points: [number, number][], faint?: [number, number][], colour?: number}[]} curves
 * @param {{title: string, x?: string, width?: number, height?: number}} options
 */
export function draw(figure, curves, { title, x: over = "step", width = 320, height = 150 }) {
  const shown = curves.filter((c) => c.points.length);
  figure.querySelector("svg")?.remove();
  figure.querySelector(".legend")?.remove();
  if (!shown.length) return;
  const box = bounds(shown.flatMap((c) => [c.points, c.faint ?? []]).filter((p) => p.length));
  const x = scale(box[0], box[1], LEFT, width - RIGHT), y = scale(box[2], box[3], height - BOTTOM, TOP);
  const label = `${title} by ${over}: ${shown.map((c) => `${c.label} ${number(c.points.at(-1)[1])}`).join(", ")}`;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": visible(label) });
  for (const t of ticks(box[2], box[3])) {
    svg.append(make("path", { class: "grid", d: `M${LEFT} ${y(t)}H${width - RIGHT}` }));
    svg.append(make("text", { class: "tick", x: LEFT - 6, y: y(t) + 3, "text-anchor": "end" }, number(t)));
  }
  for (const t of ticks(box[0], box[1], width > 500 ? 8 : 4))
    svg.append(make("text", { class: "tick", x: x(t), y: height - 6, "text-anchor": "middle" }, number(t)));
  for (const [i, curve] of shown.entries()) {
    const colour = (curve.colour ?? i) % COLOURS;
    if (curve.faint) svg.append(make("polyline", { class: `line l${colour} pale`, points: path(curve.faint, x, y) }));
    svg.append(make("polyline", { class: `line l${colour}`, points: path(curve.points, x, y) }));
    if (curve.points.length === 1)
      svg.append(make("circle", { class: `dot d${colour}`, r: 3, cx: x(curve.points[0][0]), cy: y(curve.points[0][1]) }));
  }
  figure.append(svg);
  const legend = named(figure, shown);
  point(svg, shown, x, y, over, legend, width);
}

function path(points, x, y) {
  return points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
}

/** The legend, which also shows the values at the pointer. */
function named(figure, curves) {
  const list = document.createElement("div");
  list.className = "legend";
  const cells = curves.map((curve, i) => {
    const item = document.createElement("span"), value = document.createElement("b");
    item.className = `entry c${(curve.colour ?? i) % COLOURS}`;
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    item.append(swatch, `${visible(curve.label)} `, value);
    list.append(item);
    return value;
  });
  const place = document.createElement("span");
  place.className = "faint";
  list.append(place);
  figure.append(list);
  return { cells, place };
}

function point(svg, curves, x, y, over, legend, width) {
  const dots = curves.map((c, i) => make("circle", { class: `dot d${(c.colour ?? i) % COLOURS}`, r: 2.6, visibility: "hidden" }));
  const rule = make("path", { class: "rule", visibility: "hidden" });
  svg.append(rule, ...dots);
  const rest = () => {
    for (const [i, c] of curves.entries()) legend.cells[i].textContent = number(c.points.at(-1)[1]);
    legend.place.textContent = "";
    for (const mark of [rule, ...dots]) mark.setAttribute("visibility", "hidden");
  };
  const all = curves.flatMap((c) => c.points).sort((one, other) => one[0] - other[0]);
  const show = (at) => {
    const near = nearest(all, at);
    for (const [i, c] of curves.entries()) {
      const [px, py] = nearest(c.points, near[0]);
      legend.cells[i].textContent = number(py);
      dots[i].setAttribute("cx", x(px));
      dots[i].setAttribute("cy", y(py));
      dots[i].setAttribute("visibility", "visible");
    }
    rule.setAttribute("d", `M${x(near[0])} ${TOP}V${svg.viewBox.baseVal.height - BOTTOM}`);
    rule.setAttribute("visibility", "visible");
    legend.place.textContent = `${over} ${number(near[0])}`;
  };
  const box = bounds(curves.map((c) => c.points)), back = scale(LEFT, width - RIGHT, box[0], box[1]);
  svg.addEventListener("pointermove", (event) => {
    const size = svg.getBoundingClientRect();
    show(back(((event.clientX - size.left) / size.width) * width));
  });
  svg.addEventListener("pointerleave", rest);
  rest();
}
