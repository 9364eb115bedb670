// Times that go on: how long ago something was, and how long it still takes.

import { ago, lasting } from "/static/live.js";

const skew = Number(document.documentElement.dataset.now) - Date.now() / 1000;

/** Seconds since the epoch, by the server's clock. */
export const now = () => Date.now() / 1000 + skew;

function tick() {
  for (const element of document.querySelectorAll("[data-at]"))
    if (element.dataset.at) element.textContent = ago(now() - Number(element.dataset.at));
  for (const element of document.querySelectorAll("[data-until]"))
    if (element.dataset.until) element.textContent = lasting(Math.max(0, Number(element.dataset.until) - now()));
}

setInterval(tick, 1000);
