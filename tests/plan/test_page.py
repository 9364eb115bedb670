"""The page stands on its own, and shows untrusted text as text."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from rlx.plan.page import render_plan_page

VOID = {"meta", "link", "br", "path", "rect", "img", "input", "hr"}
EVIL = "<script>alert(1)</script>\x1b[31m\u202e"


class Outline(HTMLParser):
    """Tags that were opened, with their attributes; fails where they do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, self.getpos()


def drawn(report):
    return render_plan_page(report, [phase.shown for phase in report.phases])


def test_it_parses_and_refers_to_nothing(plan):
    text = drawn(plan("rlcr"))
    outline = Outline(text)
    names = {tag for tag, _ in outline.tags}
    assert "svg" in names and not names & {"script", "link", "img", "iframe", "a", "base"}
    assert not any(key in ("src", "href", "onload") for _, a in outline.tags for key in a)
    assert not re.search(r"https?:|url\(|@import|//", text)
    assert "prefers-color-scheme:dark" in text


def test_every_token_of_the_tree_is_a_box_with_its_figures(plan):
    report = plan("rlcr")
    shown = {row.row for phase in report.phases for row in phase.rows if row.row in phase.shown}
    assert shown
    boxes = [a for tag, a in Outline(drawn(report)).tags if "tok " in (a.get("class") or "")]
    figures = [a["title"] for a in boxes if a.get("title")]
    trees = [{r.tree for r in p.rows if r.row in p.shown} for p in report.phases]
    rows = [r for p, t in zip(report.phases, trees, strict=True) for r in p.rows if r.tree in t]
    assert len(figures) == sum(len(row.tokens) for row in rows)
    assert all("advantage" in title and "weight" in title for title in figures)


def test_untrusted_text_is_shown_and_not_obeyed(plan):
    report = plan("countdown")
    (phase,) = report.phases
    row = phase.rows[0]
    token = replace(row.tokens[0], text=EVIL)
    evil = replace(row, tokens=(token, *row.tokens[1:]), problem=EVIL, kind=EVIL)
    rows = (evil, *phase.rows[1:])
    text = drawn(replace(report, phases=(replace(phase, rows=rows),), name=EVIL))
    assert "script" not in {tag for tag, _ in Outline(text).tags}
    assert "&lt;script&gt;" in text and "\x1b" not in text and "\u202e" not in text
