"""Tasks and rewards that rlx ships; they enter through the same entry points as anyone's."""
