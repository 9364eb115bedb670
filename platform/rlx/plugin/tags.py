"""Finds tagged text in model output in linear time, also in adversarial text."""


def find_last_block(
    text: str, opening: str, closing: str, start: int = 0
) -> tuple[int, int] | None:
    """Returns where the content of the last block between two tags in `text[start:]` is, or None.

    It is the group of the last match of the regular expression `opening(.*?)closing`, with `.`
    matching line ends, which takes quadratic time on `opening * n`. Every match ends at a closing
    tag and begins at the first opening tag after the previous closing tag, so the search visits
    closing tags from the end until one has an opening tag of its own.

    Returns:
        Half-open range of characters of `text`.
    """
    first = text.find(opening, start)
    end = text.rfind(closing, first) if first >= 0 else -1
    while end >= 0:
        previous = text.rfind(closing, first, end)
        begin = first if previous < 0 else text.find(opening, previous + len(closing), end)
        if begin >= 0:
            return begin + len(opening), end
        end = previous
    return None


def get_last_block(text: str, opening: str, closing: str, start: int = 0) -> str | None:
    """Returns the content of the last block between two tags in `text[start:]`, or None."""
    found = find_last_block(text, opening, closing, start)
    return None if found is None else text[slice(*found)]
