"""The tokenizer and chat template of SmolLM2-135M-Instruct: what it makes of prompts and tags."""

import pytest
from real_models import unpack_tokenizer
from rows import each_row

from rlx.model.tokenizer import build_dialogue, pretrained_tokenizer
from rlx.plugin import Message
from rlx.rollout import find_spans

SYSTEM = "You know words."
OWN_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONVERSATIONS = {
    "a question": ("first letter of house",),
    "an example": ("first letter of house", "<answer>h</answer>", "last letter of garden"),
    "two examples": (
        "number of letters in apple\n",
        "<answer>5</answer>",
        "x =  5\n\n1. Red",
        "<think>a, b</think> <answer>(17+3)*4</answer>",
        "¿über? 日本 🙂",
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return pretrained_tokenizer(unpack_tokenizer(tmp_path_factory.mktemp("smollm2")))


@pytest.fixture(scope="module")
def chat(tokenizer):
    return build_dialogue(tokenizer, (tokenizer.eos_token_id,), chat_template=True)


def render(tokenizer, system, texts):
    """Token ids of a conversation by the template alone."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant") * len(texts)
    messages += [{"role": r, "content": c} for r, c in zip(roles, texts, strict=False)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@each_row("system", ["", SYSTEM])
@each_row("name", CONVERSATIONS)
def test_prompts_are_the_template_s(tokenizer, chat, name, system):
    *earlier, asked = CONVERSATIONS[name]
    roles = ("user", "assistant") * len(earlier)
    history = [Message(role, text) for role, text in zip(roles, earlier, strict=False)]
    ids = chat.open(asked, system, history)
    assert list(ids) == render(tokenizer, system, CONVERSATIONS[name])
    assert tokenizer.decode(ids).startswith(f"<|im_start|>system\n{system or OWN_SYSTEM}<|im_end|>")


@each_row(
    "text, name, outer, inner",
    [
        ("<answer>4</answer>", "answer", "<answer>4</answer>", "4"),
        ("The <answer>4, 5</answer>.", "answer", " <answer>4, 5</answer>.", "4, 5"),
        ("<answer></answer>", "answer", "<answer></answer>", ""),
        ("<think>a\n</think><answer>(1)*4</answer>", "think", "<think>a\n</think><", "a\n"),
        ("<think>a\n</think><answer>(1)*4</answer>", "answer", "><answer>(1)*4</answer>", "(1)*4"),
        ("<confidence>.3</confidence>", "confidence", "<confidence>.3</confidence>", ">.3"),
    ],
)
def test_a_token_that_crosses_a_tag_belongs_to_the_span(tokenizer, chat, text, name, outer, inner):
    """`Ġ<`, `>.`, `><` and `></` are single tokens of this vocabulary."""
    ids = chat.encode(text)
    read, ends = chat.read(ids)
    assert read == text
    span = find_spans(read, ends, [name])[name]
    assert tokenizer.decode(ids[slice(*span.outer)]) == outer
    assert tokenizer.decode(ids[slice(*span.inner)]) == inner
