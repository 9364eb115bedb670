"""The dashboard as a client sees it, and its pages as a browser takes them."""

from html.parser import HTMLParser
from typing import Any

from fastapi.testclient import TestClient

from rlx.record import find_mlflow_link
from rlx_web import Access, create_app

OURS = "http://127.0.0.1:8711"
VOID = {"meta", "link", "input", "br", "hr", "img"}
PLACES = ("class", "id", "src", "rel", "type", "method", "name", "role", "hidden", "for")
"""Attributes whose values are ours alone."""


class Page(HTMLParser):
    """Elements, attributes and text of a page.

    Attributes:
        shape: every element with its depth, the names of its attributes and those values that no
            text of a run may change.
        text: what a reader sees, and `titles` what a pointer calls up.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.shape: list[tuple[Any, ...]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.data: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], f"never closed: {self._open}"
        self.text = "".join(self.data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = tuple((n, v if n in PLACES else ...) for n, v in attrs)
        self.shape.append((len(self._open), tag, said))
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.data.append(data)

    @property
    def tags(self) -> list[str]:
        return [element[1] for element in self.shape]

    def values(self, name: str) -> list[str]:
        return [value or "" for _, attribute, value in self.attributes if attribute == name]

    def cells(self) -> str:
        """The text of one element after the other, with every stretch of blanks as one."""
        return " ".join(" ".join(self.data).split())


class Dashboard(TestClient):
    """A client that takes pages apart."""

    def page(self, path: str, **named: Any) -> Page:
        response = self.get(path, **named)
        assert response.status_code == 200, (path, response.status_code, response.text[:500])
        assert response.headers["content-type"].startswith("text/html")
        return Page(response.text)

    def twin(self, path: str, **named: Any) -> Any:
        before, mark, query = path.partition("?")
        response = self.get(f"{before}.json{mark}{query}", **named)
        assert response.status_code == 200, (path, response.status_code, response.text[:500])
        assert response.headers["content-type"] == "application/json"
        return response.json()


def dashboard(url: str, **access: Any) -> Dashboard:
    """A client of the dashboard of a registry, on this machine."""
    return Dashboard(
        create_app(url, Access(**{"token": None, **access}), find_mlflow_link),
        base_url=OURS,
        follow_redirects=False,
    )


def leaves(value: Any) -> list[Any]:
    """Every plain value and every key in some JSON."""
    if isinstance(value, dict):
        return [leaf for item in value.items() for leaf in leaves(list(item))]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]
