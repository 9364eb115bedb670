// The log of a run: appends what the run writes.

import { visible } from "/static/chart.js";
import { follow } from "/static/live.js";

const box = document.getElementById("lines"), ENDED = ["finished", "failed", "stopped", "lost"];
let end = Number(box.dataset.end);

function show(data) {
  if (data.lines.length) {
    document.getElementById("empty")?.remove();
    const atEnd = window.innerHeight + window.scrollY >= document.body.scrollHeight - 40;
    box.append(data.lines.map((line) => `${visible(line)}\n`).join(""));
    if (atEnd) window.scrollTo(0, document.body.scrollHeight);
  }
  end = data.end;
  return !ENDED.includes(data.run.status);
}

if (!ENDED.includes(box.dataset.status))
  follow(() => `${location.pathname}.json?after=${end}`, show);
