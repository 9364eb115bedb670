"""Notes and tags as a form sends them."""

from rlx_web.text import render_visible_text

__all__ = ["NOTE_LIMITS", "NoteError", "parse_note", "parse_tags"]

NOTE_LIMITS = {"characters": 4000, "tags": 20, "tag": 40}
"""The longest note, the most tags, and the longest tag, in characters."""


class NoteError(ValueError):
    """A note or its tags are too long; the message says which, and the limit."""


def parse_note(text: str) -> str:
    """A note with plain line ends; characters that cannot be seen are replaced by their codes.

    Raises:
        NoteError: it is too long.
    """
    note = "\n".join(text.splitlines()).strip()
    if len(note) > NOTE_LIMITS["characters"]:
        raise NoteError(f"a note has at most {NOTE_LIMITS['characters']} characters")
    return render_visible_text(note, "\n")


def parse_tags(text: str) -> list[str]:
    """The tags in a text, separated by blanks or commas, each once.

    Raises:
        NoteError: there are too many, or one is too long.
    """
    tags = list(dict.fromkeys(render_visible_text(t) for t in text.replace(",", " ").split()))
    if len(tags) > NOTE_LIMITS["tags"]:
        raise NoteError(f"a run has at most {NOTE_LIMITS['tags']} tags")
    if long := [tag for tag in tags if len(tag) > NOTE_LIMITS["tag"]]:
        raise NoteError(f"a tag has at most {NOTE_LIMITS['tag']} characters: {long[0][:60]}")
    return tags
