"""The Countdown scorer of the source, read literally."""

import re

__all__ = ["literal_score"]


def literal_score(text: str, truth: dict) -> float:
    """What the source's regex and `eval` make of it; it may hang on answers that mean harm."""
    if "Assistant:" in text:
        text = text.split("Assistant:", 1)[1]
    blocks = re.findall(r"<answer>(.*?)</answer>", text.split("\n")[-1])
    if not blocks:
        return 0.0
    equation = blocks[-1].strip()
    if sorted(int(n) for n in re.findall(r"\d+", equation)) != sorted(truth["numbers"]):
        return 0.1
    if not re.match(r"^[\d+\-*/().\s]+$", equation):
        return 0.1
    try:
        value = eval(equation, {"__builtins__": None}, {})
    except (ArithmeticError, SyntaxError, TypeError):
        return 0.1
    return 1.0 if abs(value - truth["target"]) < 1e-5 else 0.1
