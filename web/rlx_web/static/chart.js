// Arithmetic and text of charts, which need no browser.

/** At most four significant digits; non-finite values are strings. @param {number | string | null | undefined} v */
export function number(v) {
  if (v === null || v === undefined) return "—";
  if (typeof v !== "number") return String(v);
  const size = Math.abs(v);
  const plain = size === 0 || (size >= 1e-4 && size < 1e6);
  return plain ? String(Number(v.toPrecision(4))) : v.toExponential(2);
}

/** The ends of an axis for curves that have one value: around it, not from 0 to its double. @param {number} value */
export function around(value) {
  const margin = Math.abs(value) / 10 || 1;
  return [value - margin, value + margin];
}

/** Appends new points; a step that is written again replaces its old value. */
export function merged(points, news) {
  const at = new Map(points);
  for (const [x, y] of news) at.set(x, y);
  return [...at].sort((a, b) => a[0] - b[0]);
}

/**
 * Curves as columns over one x: null where a curve has no point.
 * @param {[number, number][][]} curves @returns {[number[], ...(number | null)[][]]}
 */
export function columns(curves) {
  const xs = [...new Set(curves.flatMap((points) => points.map(([x]) => x)))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, i) => [x, i]));
  return [xs, ...curves.map((points) => {
    const column = new Array(xs.length).fill(null);
    for (const [x, y] of points) column[at.get(x)] = typeof y === "number" ? y : null;
    return column;
  })];
}

/** The index of the value that is nearest in x to index `i`; null if the column has none. */
export function nearest(xs, column, i) {
  if (i === null || i === undefined) return null;
  let before = i, after = i;
  while (before >= 0 && typeof column[before] !== "number") before -= 1;
  while (after < xs.length && typeof column[after] !== "number") after += 1;
  if (before < 0) return after < xs.length ? after : null;
  if (after >= xs.length) return before;
  return Math.abs(xs[before] - xs[i]) <= Math.abs(xs[after] - xs[i]) ? before : after;
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
