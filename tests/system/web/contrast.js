// The worst contrast of text with what is behind it, by kind of element.
() => {
  const canvas = document.createElement("canvas");
  const brush = canvas.getContext("2d", { willReadFrequently: true });
  canvas.width = canvas.height = 1;
  // The colour behind an element: what is painted by those that it stands in, one over the other.
  const seen = new Map();
  const over = (colours) => {
    const key = colours.join();
    if (!seen.has(key)) seen.set(key, painted(colours));
    return seen.get(key);
  };
  const painted = (colours) => {
    brush.clearRect(0, 0, 1, 1);
    for (const colour of colours) { brush.fillStyle = colour; brush.fillRect(0, 0, 1, 1); }
    return [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = new Map();
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    if (element.closest(".visually-hidden, .skip, option, title")) continue;
    const style = getComputedStyle(element), behind = [];
    for (let e = element; e; e = e.parentElement) behind.unshift(getComputedStyle(e).backgroundColor);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    const pair = [light(over(behind)), light(over([...behind, ink]))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    const where = `${element.localName}.${element.getAttribute("class") ?? ""}`;
    if (!(found.get(where)?.[0] <= ratio)) found.set(where, [ratio, element.textContent.slice(0, 40)]);
  }
  return [...found].map(([where, [ratio, text]]) => [where, ratio, text]);
}
