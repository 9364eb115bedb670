"""`make credit`: draws docs/credit.svg, a rollout tree with the advantage of every token.

    python docs/make/credit_picture.py

The rows are those of `rlx plan experiments/rlcr.yaml --json`: synthetic responses to a
real problem, with the experiment's own rewards, loss mask and estimator.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rlx_command import ROOT, rlx

EXPERIMENT = "experiments/rlcr.yaml"
PICTURE = ROOT / "docs" / "credit.svg"
ANSWERS, CONFIDENCES = 2, 3
"""Branches that are drawn of the prompt, and of each answer."""
WIDTH = 640
CHARACTER, LINE = 7.3, 22
"""Pixels of a character, and of a line of tokens."""
GAIN, LOSS, UNTRAINED = (33, 102, 172), (178, 24, 43), "#ececec"


def pick_rows(phase: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields depth and row of the first prompt's first answers, with confidences below each."""
    rows = [row for row in phase["rows"] if row["tree"] == 0]
    for answer in [row for row in rows if row["parent"] is None][:ANSWERS]:
        yield 1, answer
        below = [row for row in rows if row["parent"] == answer["row"]]
        yield from ((2, row) for row in below[:CONFIDENCES])


def mix_colour(advantage: float, limit: float) -> str:
    """Blue above 0 and red below, the paler the nearer to 0."""
    strength = 0.2 + 0.7 * min(abs(advantage) / limit, 1)
    target = GAIN if advantage > 0 else LOSS
    return "#" + "".join(f"{round(255 + (part - 255) * strength):02x}" for part in target)


def draw_text(x: float, y: float, text: str, colour: str = "#333333", style: str = "") -> str:
    kept = escape(text).replace(" ", "\N{NO-BREAK SPACE}")
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {style}>{kept}</text>'


def draw_row(
    row: Mapping[str, Any], depth: int, top: float, limits: Mapping[str, float]
) -> Iterator[str]:
    """Yields a line that says what the row is, and one box per token."""
    left = 24 + 44 * depth
    limit = limits[row["kind"]]
    label = f"{row['kind']}   score {row['score']:.2f}   advantage {row['advantage']:+.2f}"
    yield draw_text(left, top - 7, label, "#555555", 'font-size="11"')
    x: float = left
    for token in row["tokens"]:
        text = token["text"].replace("\n", "⏎")
        width = CHARACTER * len(text) + 5
        learns = token["learns"]
        colour = mix_colour(token["advantage"], limit) if learns else UNTRAINED
        strong = learns and abs(token["advantage"]) > 0.6 * limit
        yield (
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{LINE - 3}" rx="2" '
            f'fill="{colour}"/>'
        )
        yield draw_text(x + 2.5, top + 14, text, "#ffffff" if strong else "#222222")
        x += width + 1.5


def draw(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """The picture: the prompt, then every row, joined to its parent."""
    limits: dict[str, float] = {}
    for _, row in rows:
        limits[row["kind"]] = max(limits.get(row["kind"], 1e-6), abs(row["advantage"]))
    prompt = " ".join(rows[0][1]["context"][0]["text"].split("\n")).strip()
    parts = [draw_text(24, 30, prompt, "#111111", 'font-weight="bold"')]
    joints = {0: (32.0, 38.0)}
    top = 66.0
    for depth, row in rows:
        x, start = joints[depth - 1]
        middle = top + LINE / 2 - 2
        path = f"M{x:.0f} {start:.0f} V{middle:.1f} H{20 + 44 * depth}"
        parts.append(f'<path d="{path}" fill="none" stroke="#bbbbbb"/>')
        parts += draw_row(row, depth, top, limits)
        joints[depth] = (32.0 + 44 * depth, top + LINE)
        top += LINE + 22
    note = "blue: made more likely; red: less likely; grey: not trained"
    parts.append(draw_text(24, top - 2, note, "#777777", 'font-size="11"'))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 12:.0f}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    plan = json.loads(rlx("plan", EXPERIMENT, "--json", quiet=True))
    PICTURE.write_text(draw(list(pick_rows(plan["phases"][-1]))), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
