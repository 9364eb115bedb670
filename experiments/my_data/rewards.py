"""A reward of one's own: rlx calls the function that experiments/my_data.yaml names."""


def right_answer(sample, *, near: float = 0.1):
    """1 for the answer in the data; `near` for another single letter or number; else 0."""
    said = sample.spans.get("answer", "").strip().lower()
    if said == sample.problem["answer"].lower():
        return 1.0
    return near if said.isdigit() or (len(said) == 1 and said.isalpha()) else 0.0
