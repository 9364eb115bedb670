"""`make screenshots`: takes screenshots of the dashboard for the documentation.

    python docs/make/screenshots.py [--registry URL]

Shows the runs of a registry. Without `--registry` it first trains runs of two experiments
(RLCR in two turns, the knowledge-graph agent), which takes about 10 minutes. Writes docs/web/*.png.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlx_command import ROOT, rlx

PICTURES = ROOT / "docs" / "web"
RUNS = (
    ("rlcr",),
    ("kg",),
    ("rlcr", "--set", "seed=1"),
)
LARGEST = 300_000
"""Maximum size of a picture in bytes."""
SIZE = {"width": 1280, "height": 860}

sys.path.insert(0, str(ROOT / "tests"))


def trained(folder: Path) -> str:
    """Trains the runs and returns the URL of their registry."""
    os.environ["RLX_HOME"] = str(folder)
    for spec, *options in RUNS:
        rlx("submit", f"experiments/{spec}.yaml", *options)
    return f"sqlite:///{folder}/registry.db"


ANYWHERE = """(home) => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode())
    walk.currentNode.data = walk.currentNode.data.replaceAll(home, ".rlx");
}"""


def chosen(url: str) -> tuple[str, str, str]:
    """Selects a run, its newest rollouts, and an interesting rollout.

    The rollout is the longest one with a large advantage in an early step, preferably of a run with
    an environment.
    """
    from rlx_registry import Registry

    with Registry.open(url, read_only=True) as registry:
        every = [row for row in registry.queries.run_rows() if row.status == "finished"]
        rows = [row for row in every if registry.results.rollout_steps(row.id)]
        if not rows:
            sys.exit(f"no finished run of {url} has recorded rollouts")
        named = [row for row in rows if row.name == "rlcr"] or rows
        first = named[-1].id
        talked = next((row.id for row in rows if row.name == "kg"), first)
        steps = registry.results.rollout_steps(talked)
        step = steps[len(steps) // 8]
        index = registry.results.rollout_index(talked, step)
        much = max(abs(row.advantage) for row in index) / 2
        chosen_row = max(index, key=lambda row: (abs(row.advantage) >= much, row.n_tokens))
        newest = f"/runs/{first}/rollouts/{registry.results.rollout_steps(first)[-1]}"
        credit = f"/runs/{talked}/rollouts/{step}/{chosen_row.row}"
        return first, newest, credit


def pages(url: str) -> dict[str, str]:
    """Addresses by picture name."""
    run, rollouts, credit = chosen(url)
    return {
        "runs": "/",
        "run": f"/runs/{run}",
        "rollouts": rollouts,
        "credit": credit,
    }


def home_of(url: str) -> Path:
    """The folder of the registry, which pictures must not show."""
    return Path(url.removeprefix("sqlite:///")).parent


def settled(page: Any, address: str) -> None:
    """Opens a page and waits until it is drawn."""
    page.goto(address)
    page.evaluate("document.querySelectorAll('.fold[aria-expanded=false]').forEach(e => e.click())")
    for section in page.locator("[data-section]").all():
        section.scroll_into_view_if_needed()
        section.locator("xpath=self::*[@data-ready]").wait_for()
    if "/rollouts/" in address and address.count("/") == 5:
        page.locator("body[data-ready]").wait_for()
        tokens = page.locator("#tokens .learns")
        tokens.nth(tokens.count() // 2).hover()
    page.evaluate("document.body.scrollIntoView({ behavior: 'instant' })")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", metavar="URL")
    url = parser.parse_args().registry
    from browsing import Tabs, Visit, browser, served

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        url = url or trained(Path(folder))
        with browser() as opened, served(url) as address:
            tab = Visit(Tabs(opened, address, viewport=SIZE, color_scheme="light"))
            for name, where in pages(url).items():
                settled(tab.page, where)
                tab.page.evaluate(ANYWHERE, str(home_of(url)))
                path = PICTURES / f"{name}.png"
                tab.page.screenshot(path=path)
                size = path.stat().st_size
                print(f"{path.relative_to(ROOT)}  {size / 1000:.0f} kB", flush=True)
                if size > LARGEST:
                    sys.exit(f"{path} is larger than {LARGEST / 1000:.0f} kB")
            tab.close()


if __name__ == "__main__":
    main()
