"""Chromium, and dashboards that it can visit."""

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import uvicorn
from patience import LIMIT

from rlx_web import Access, create_app

NAMES = ("chromium", "chromium-browser", "google-chrome")
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
LEAN = (
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--renderer-process-limit=1",
    "--disable-features=SpareRendererForSitePerProcess",
)
"""Neither a graphics card made up by software nor processes kept for later."""


def missing() -> str | None:
    """What is not installed."""
    if not any(map(shutil.which, NAMES)):
        return "Chromium is not installed: apt-get install chromium"
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install playwright"
    return None


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium, which finds no machine but this one.

    Where it is missing the tests that ask are skipped; with RLX_CI=1 they fail.
    """
    if said := missing():
        if os.environ.get("RLX_CI") == "1":
            pytest.fail(said)
        pytest.skip(said)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1000 * LIMIT)

    path = next(found for name in NAMES if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        # Where we are root, as in containers, its sandbox does not start.
        flags = ["--no-sandbox", OFFLINE, *LEAN]
        launch = partial(
            playwright.chromium.launch, executable_path=path, args=flags, timeout=1000 * LIMIT
        )
        opened = Chromium(launch)
        try:
            yield opened
        finally:
            opened.close()


class Chromium:
    """A browser, and its successor where it ends, as on a machine that is short of memory."""

    def __init__(self, launch: Callable[[], Any]) -> None:
        self._launch, self._opened = launch, launch()

    def restart_if_ended(self) -> bool:
        """Whether it had ended, and its contexts with it."""
        from playwright.sync_api import Error

        try:
            self._opened.new_browser_cdp_session().detach()  # `is_connected` knows nothing new
        except Error:
            self._opened = self._launch()
            return True
        return False

    def new_context(self, **options: Any) -> Any:
        """As Playwright's."""
        return self._opened.new_context(**options)

    def close(self) -> None:
        """Ends it."""
        self._opened.close()


@contextmanager
def served(url: str) -> Iterator[str]:
    """The address of the dashboard of a registry, which a thread serves."""
    config = uvicorn.Config(
        create_app(url, Access(token=None)), log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        serving.start()
        try:
            yield f"http://127.0.0.1:{port}"  # who connects before it serves waits in line
        finally:
            server.should_exit = True
            serving.join(LIMIT)
            assert not serving.is_alive(), "somebody still waits for an answer"


DRAW = """async () => {
  for (const section of document.querySelectorAll("[data-section]")) {
    section.open = true;
    section.scrollIntoView();
    while (!section.hasAttribute("data-ready")) await new Promise(requestAnimationFrame);
  }
}"""


def draw_sections(page: Any) -> None:
    """Has a page draw every section; what is drawn later would move what a test points at."""
    page.evaluate(DRAW)


class Tabs:
    """Tabs that share what was fetched from a dashboard: each on its own would start from nothing.

    Args:
        options: of Playwright's `new_context`.
    """

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.address = address
        self.context = browser.new_context(base_url=address, **options)
        self.context.set_default_timeout(1000 * LIMIT)
        self.context.on("page", self._note_page)
        self._is_ours = False
        self.windows: list[str] = []
        """Addresses of tabs that nobody here has opened, since the last visit ended."""

    def open_page(self) -> Any:
        self._is_ours = True
        page = self.context.new_page()
        self._is_ours = False
        return page

    def _note_page(self, page: Any) -> None:
        if not self._is_ours:
            self.windows.append(page.url)


class Visit:
    """A tab, and everything about it that must not happen."""

    def __init__(self, tabs: Tabs) -> None:
        self.tabs, self.address = tabs, tabs.address
        self.page = tabs.open_page()
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", self._opened)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("requestfailed", lambda request: self.faults.append(f"lost: {request.url}"))

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")

    def _opened(self, dialog: Any) -> None:
        self.faults.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def close(self) -> None:
        """Ends the visit; says whether anything happened that must not."""
        self.page.close()
        windows, self.tabs.windows = self.tabs.windows, []
        aborted = [f for f in self.faults if not f.startswith("lost: " + self.address)]
        elsewhere = [url for url in self.asked if not url.startswith(self.address + "/")]
        found = (aborted, elsewhere, windows)
        assert found == ([], [], []), found
