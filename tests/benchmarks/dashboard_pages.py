"""What the first view of every page of the dashboard costs on a large registry.

    python tests/benchmarks/dashboard_pages.py              the whole table, as text
    python tests/benchmarks/dashboard_pages.py run long     pages by a part of their names

Every view is of a server process that has served nothing before, by a browser profile that has
seen nothing before; the registry's file is in the system's memory. The server's time is from the
request of the page to its last byte, without a browser. In Chromium counts the time from the
navigation until every chart that can be seen is drawn, and every byte that came over the wire.
"""

import http.client
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import row
from large_registry import BIG_STEP, EXACT_RUN, LONG_RUN, ORDINARY, build, freshen

sys.path.insert(0, str(Path(__file__).parents[1]))
from dashboards import Dashboard, dashboard

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".bench" / "dashboard"
EIGHT = "&".join(f"run=r-{run:04d}" for run in (1, 2, 3, 4, 5, 6, 7, 8))
PAGES = {
    "runs": "/",
    "runs_found": "/?q=status:failed",
    "runs_page": "/?page=5",
    "run": f"/runs/r-{ORDINARY:04d}",
    "run_long": f"/runs/r-{LONG_RUN:04d}",
    "run_exact": f"/runs/r-{EXACT_RUN:04d}",
    "rollouts": f"/runs/r-{ORDINARY:04d}/rollouts/{BIG_STEP}",
    "rollouts_filtered": f"/runs/r-{ORDINARY:04d}/rollouts/{BIG_STEP}?text=nineteen&low=0.5",
    "rollouts_long": f"/runs/r-{LONG_RUN:04d}/rollouts/5000",
    "credit": f"/runs/r-{ORDINARY:04d}/rollouts/{BIG_STEP}/500",
    "compare": f"/compare?{EIGHT}",
    "system": "/system",
}
"""By name, what is asked for."""
GOALS = {"server": (500, "ms"), "ready": (1000, "ms"), "transferred": (300, "KB")}
ROUNDS = 5
READY = """() => {
  const near = (e) => e.getBoundingClientRect().top < innerHeight + 300;
  const parts = [...document.querySelectorAll("[data-section]")].filter(near);
  const drawn = [...parts, ...document.querySelectorAll("#overlay")].every((e) => e.dataset.ready);
  const told = !document.getElementById("tokens") || document.body.dataset.ready;
  return document.readyState === "complete" && drawn && told;
}"""
NOTED = """
window.changed = 0;
new MutationObserver((all) => { window.changed = performance.now(); }).observe(
  document, { subtree: true, attributes: true, attributeFilter: ["data-ready"] });
"""
TOOK = """() => Math.max(window.changed,
  performance.getEntriesByType("navigation")[0].loadEventEnd)"""


def asked(served: Dashboard, path: str) -> tuple[float, float]:
    """Milliseconds until the last byte of a page, and those of the server's CPU meanwhile."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    before, began = served.cpu(), time.perf_counter()
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    response = connection.getresponse()
    response.read()
    took = time.perf_counter() - began
    connection.close()
    assert response.status == 200, (path, response.status)
    return 1e3 * took, 1e3 * (served.cpu() - before)


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


def seen(chromium: Any, served: Dashboard, path: str) -> tuple[float, float]:
    """Milliseconds until a page's charts are ready, and kilobytes that came until then."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    failed: list[str] = []
    page.on("pageerror", lambda error: failed.append(str(error)))
    bytes_ = [0]
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    session.on(
        "Network.loadingFinished",
        lambda event: bytes_.__setitem__(0, bytes_[0] + event["encodedDataLength"]),
    )
    page.add_init_script(NOTED)
    page.goto(served.url + path, wait_until="commit")
    page.wait_for_function(READY, timeout=30_000)
    took = page.evaluate(TOOK)
    page.wait_for_timeout(200)  # Chromium tells of the last bytes a little later
    context.close()
    assert not failed, (path, failed)
    return took, bytes_[0] / 1000


def measured(names: Sequence[str], rounds: int = ROUNDS) -> Iterator[list[dict[str, Any]]]:
    """Three figures of each page, page by page."""
    url = build(FOLDER)
    with browser() as chromium:
        for name in names:
            path, found = PAGES[name], []
            for _ in range(rounds):
                freshen(url)
                with dashboard(url) as served:
                    server, cpu = asked(served, path)
                with dashboard(url) as served:
                    found.append((server, cpu, *seen(chromium, served, path)))
            columns = list(zip(*found, strict=True))
            told = {"server": columns[0], "ready": columns[2], "transferred": columns[3]}
            yield [
                row(
                    f"dashboard_{name}_{what}",
                    values,
                    f"the goal, {GOALS[what][0]} {GOALS[what][1]}: {path}",
                    GOALS[what][1],
                    **({"milliseconds": statistics.median(columns[1])} if what == "server" else {}),
                )
                for what, values in told.items()
            ]


def dashboard_pages() -> list[dict[str, Any]]:
    """Rows for docs/benchmarks.md."""
    return [row for page in measured(list(PAGES)) for row in page]


if __name__ == "__main__":
    wanted = [name for name in PAGES if not sys.argv[1:] or name in sys.argv[1:]]
    for page in measured(wanted):
        for figure in page:
            shown = {k: figure[k] for k in ("ratio", "low", "high", "milliseconds") if k in figure}
            print(f"{figure['name']:40} {shown}", flush=True)
