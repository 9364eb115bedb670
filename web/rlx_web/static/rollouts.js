// Keyboard navigation of rollouts.

import { keys, link } from "/static/keys.js";

const cards = [...document.querySelectorAll(".tree")];
const slider = document.getElementById("slider"), shown = slider.form.querySelector("output");
let at = -1;

function go(by) {
  at = Math.max(0, Math.min(cards.length - 1, at + by));
  cards[at]?.focus();
  cards[at]?.scrollIntoView({ block: "start" });
}

keys({
  j: () => go(1),
  k: () => go(-1),
  "[": link("previous"),
  "]": link("next"),
  n: link("older"),
  p: link("newer"),
  "/": () => document.getElementById("search").focus(),
});

slider.addEventListener("input", () => { shown.value = slider.value; });
slider.addEventListener("change", () => slider.form.requestSubmit());
