"""Prints the table of `docs/models_and_data.md`: the chat templates with which tools work.

    python tests/model/measure_tool_templates.py FOLDER    # of files NAME.jinja

A template is put on the tokenizer of `tests/real_tokenizer`; what its own tokenizer says of replies
(`response_template`) is not known here.
"""

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from real_models import unpack_tokenizer  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from rlx.errors import SpecError  # noqa: E402
from rlx.model import ChatDialogue  # noqa: E402
from rlx.rollout import list_schemas  # noqa: E402


def measure(tokenizer, template, tools):
    """What is possible, in words: the names of the columns of the table."""
    tokenizer.chat_template = template
    try:
        ChatDialogue(tokenizer, (tokenizer.eos_token_id,)).check_tools(tools)
    except SpecError as error:
        return str(error).partition("; set")[0].partition(", which this one")[0]
    return "works"


def main(folder):
    tools = list_schemas(["tool_examples:look_up"])
    with tempfile.TemporaryDirectory() as unpacked:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(unpack_tokenizer(Path(unpacked)))
    found = defaultdict(list)
    for file in sorted(Path(folder).glob("*.jinja")):
        found[measure(tokenizer, file.read_text(encoding="utf-8"), tools)].append(file.stem)
    for what, names in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(names)}: {what}\n    {', '.join(names)}")


if __name__ == "__main__":
    main(sys.argv[1])
