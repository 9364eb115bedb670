"""Prompts of the task `kg`: a question, and its topic entities if the template shows them."""

from collections.abc import Sequence

from rlx_plugins.kg.text import escape_text
from rlx_plugins.templates import fill_template, list_template_fields


def check_prompt_template(template: str) -> None:
    """Checks that a template holds `{question}`, perhaps `{entities}`, and no other field.

    Raises:
        ValueError: it does not, or it is malformed.
    """
    names = set(list_template_fields(template))
    if "question" not in names or names - {"question", "entities"}:
        raise ValueError("must hold {question}, perhaps {entities}, and no other field")


def fill_prompt(template: str, question: str, entities: Sequence[str]) -> str:
    """Returns a question's prompt.

    Entities are untrusted: each is escaped as in observations, and quoted as in a query, so that a
    name with a comma can be copied. Without any entity, the text is `none`.
    """
    listed = ", ".join(map(_quote_name, entities)) or "none"
    return fill_template(template, {"question": question, "entities": listed})


def _quote_name(name: str) -> str:
    shown = escape_text(name)
    quote = "'" if '"' in shown else '"'
    return f"{quote}{shown}{quote}"
