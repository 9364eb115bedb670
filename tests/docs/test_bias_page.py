"""docs/bias.md says what the code computes, and every shipped estimator is in it."""

import re

import pytest
import torch
from bias_table import (
    LOSSES,
    PAGE,
    PLACEMENTS,
    TEXT,
    VARIANTS,
    Variant,
    compare_case,
    list_case_reasons,
    show_cell,
)
from estimator_pages import names
from expected_gradients import PROCESS, Case, build_case, compute_expected_gradient, list_steps
from rows import each_row

from rlx.spec import CreditSpec

ROWS = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]


def read_cells(variant):
    """The figures of a variant as the page has them, by placement."""
    wanted = f"| `{variant.name}`", variant.describe_options()
    (row,) = [row for row in ROWS if len(row) == 8 and (row[0], row[1]) == wanted]
    return dict(zip(PLACEMENTS, row[3:6], strict=True))


@each_row("objective", ["sum", "mean"])
def test_the_exact_gradient_is_that_of_automatic_differentiation(objective):
    logits = PROCESS.logits.clone().requires_grad_()
    returns = PROCESS.returns[objective]
    (slope,) = torch.autograd.grad(PROCESS.compute_expected_return(logits, returns), logits)
    torch.testing.assert_close(PROCESS.compute_exact_gradient(returns), slope, rtol=0, atol=1e-9)


@each_row("sizes", [(1, 4), (2, 2)])
def test_the_enumerated_steps_are_all_there_are(sizes):
    assert sum(step.probability for step in list_steps(*sizes)) == pytest.approx(1, abs=1e-12)


@each_row(
    ("variant", "placement"),
    [
        (Variant("rloo", {}), "turn_proportional"),
        (Variant("grpo", {}), "final_token_only"),
        (Variant("gae", {}), "turn_proportional"),
        (Variant("multiturn_grpo", {"statistics": "per_turn"}), "turn_end"),
    ],
)
def test_cells_are_what_the_code_computes(variant, placement):
    """`compare_case` also refuses a verdict that `rlx plan` does not share."""
    computed = show_cell(compare_case(variant.build_case(placement)))
    assert read_cells(variant)[placement] == computed, "run `make bias`"


def test_structured_scores_do_not_read_the_placement():
    """The page says that they are those of `final_token_only`."""
    case = build_case("grpo", "final_token_only")
    structured = Case(case.estimator, CreditSpec(placement="turn_proportional"))
    gradients = [compute_expected_gradient(each, list_steps(1, 4)) for each in (case, structured)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


@each_row("variant", VARIANTS, ids=str)
def test_every_variant_has_the_verdict_and_reasons_of_the_plan(variant):
    for placement, cell in read_cells(variant).items():
        assert cell.startswith("exact") != bool(list_case_reasons(variant.build_case(placement)))


def test_every_estimator_and_aggregation_is_in_the_page():
    assert {variant.name for variant in VARIANTS} == set(names())
    losses = [row for row in ROWS if row[0].startswith("| `aggregate")]
    assert len(losses) == len(LOSSES)
    texts = re.split(r"<!-- \w+ -->", TEXT.read_text())
    assert all(text in PAGE.read_text() for text in texts), "run `make bias`"
