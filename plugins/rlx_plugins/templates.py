"""Templates of prompts and demonstrations: text with field names in braces."""

import string
from collections.abc import Mapping


def list_template_fields(template: str) -> list[str]:
    """Returns the field names in a template.

    Raises:
        ValueError: it is malformed, or a field has a format or a conversion.
    """
    names = []
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if not name or form or conversion:
            raise ValueError(f"{template!r}: a field is a name in braces; write {{{{ for a brace")
        names.append(name)
    return names


def fill_template(template: str, texts: Mapping[str, str]) -> str:
    """Puts texts into a template; what they hold is never read as a template itself."""
    pieces = string.Formatter().parse(template)
    return "".join(
        literal + (texts[name] if name is not None else "") for literal, name, _, _ in pieces
    )
