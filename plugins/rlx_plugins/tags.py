"""Finding tagged text in what a model wrote, in time linear in its length whatever it holds."""

__all__ = ["last_block"]


def last_block(text: str, opening: str, closing: str, start: int = 0) -> str | None:
    """Returns what the last block between two tags of `text[start:]` holds, or None without one.

    Gives what the last match of the regular expression `opening(.*?)closing` (with `.` matching
    line ends) would give; that expression takes quadratic time on `opening * n`. Every match ends
    at some closing tag and opens at the first opening tag since the closing tag before it, so the
    closing tags are visited from the end until one has an opening tag of its own.
    """
    first = text.find(opening, start)
    end = text.rfind(closing, first) if first >= 0 else -1
    while end >= 0:
        previous = text.rfind(closing, first, end)
        begin = first if previous < 0 else text.find(opening, previous + len(closing), end)
        if begin >= 0:
            return text[begin + len(opening) : end]
        end = previous
    return None
