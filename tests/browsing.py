"""Chromium, and dashboards that it can visit."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from rlx_web import create_app

__all__ = ["Visit", "browser", "served"]

NAMES = ("chromium", "chromium-browser", "google-chrome")
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


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
    from playwright.sync_api import sync_playwright

    path = next(found for name in NAMES if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        # Where we are root, as in containers, its sandbox does not start.
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", OFFLINE])
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def served(url: str) -> Iterator[str]:
    """The address of the dashboard of a registry."""
    config = uvicorn.Config(
        create_app(url), host="127.0.0.1", port=0, log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Visit:
    """A tab, and everything about it that must not happen."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.address = address
        self.context = browser.new_context(base_url=address, **options)
        self.context.set_default_timeout(30_000)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", self._opened)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("requestfailed", lambda request: self.faults.append(f"lost: {request.url}"))
        self.context.on("page", lambda page: self.faults.append(f"a window: {page.url}"))

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")

    def _opened(self, dialog: Any) -> None:
        self.faults.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def close(self) -> None:
        """Ends the visit; says whether anything happened that must not."""
        self.context.close()
        aborted = [f for f in self.faults if not f.startswith("lost: " + self.address)]
        elsewhere = [url for url in self.asked if not url.startswith(self.address + "/")]
        assert (aborted, elsewhere) == ([], []), f"{aborted}, {elsewhere}"
