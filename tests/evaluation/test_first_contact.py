"""What is said of a model's first answers; what it wrote is escaped."""

from rlx.evaluation import FirstContact
from rlx.evaluation.first_contact import (
    ContactSample,
    GroupContact,
    RewardContact,
    TurnContact,
)

CONTACT = FirstContact(
    prompts=2,
    turns={"answer": TurnContact(8, 0.25, {"answer": 0.5})},
    rewards={"accuracy": RewardContact(0.125, 0.0, 1.0, 0.0, {"wrong answer": 7})},
    groups={"answer": GroupContact(2, 1)},
    samples=[
        ContactSample("answer", "2 + 2 = ?\n", "four\x1b[2J", {"accuracy": "0 (wrong answer)"})
    ],
    advice=["begin the answer turn for the model: `prefix: <answer>`"],
)


def test_a_contact_is_told_in_full():
    assert CONTACT.list_lines() == [
        "first contact: 2 problems",
        "  8 answers: 50% hold `answer`, 25% are cut off",
        "  accuracy: mean 0.125, 7× wrong answer",
        "  1 of 2 answer groups have a signal",
        "  sample 1, answer:",
        "    reads",
        "      | 2 + 2 = ?",
        "    writes",
        "      | four\\x1b[2J",
        "    accuracy 0 (wrong answer)",
        "  to change: begin the answer turn for the model: `prefix: <answer>`",
    ]
