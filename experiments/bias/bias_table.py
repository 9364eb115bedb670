"""`make bias`: writes bias.md, the expected gradient of every estimator beside the exact one.

    python experiments/bias/bias_table.py

Steps of one prompt with four rollouts and of two prompts with two are enumerated; larger ones are
drawn.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from expected_gradients import (
    ENUMERATED,
    PROCESS,
    Case,
    Comparison,
    Step,
    build_case,
    compare_gradients,
    compute_expected_gradient,
    compute_gradients,
    draw_steps,
    estimate_cosine,
    list_steps,
    measure_deviation,
)

from rlx.discovery import resolve_plugins
from rlx.plan import check_file
from rlx.spec import CreditSpec, LossSpec

HOME = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("bias.md")
TEXT = Path(__file__).with_name("bias_page.md.tmpl")
PLACEMENTS = ("turn_proportional", "turn_end", "final_token_only")
DRAWN = {"count": 20_000, "seed": 0}
LARGE = {"prompts": 16, "size": 4, "count": 300, "seed": 1}


class Variant(NamedTuple):
    """An estimator with some options; a critic whose values are all too high by `critic`."""

    name: str
    options: dict[str, object]
    critic: float = 0.0

    def build_case(self, placement: str) -> Case:
        """The case under a placement."""
        return build_case(self.name, placement, self.critic, **self.options)

    def describe_options(self) -> str:
        """The options as in YAML."""
        words = [f"`{k}: {str(v).lower()}`" for k, v in self.options.items()]
        return ", ".join([*words, "critic off by 0.5"] if self.critic else words)


VARIANTS = tuple(
    Variant(name, *rest)
    for name, *rest in (
        ("dr_grpo", {}),
        ("gae", {}),
        ("gae", {}, 0.5),
        ("gae", {"lam": 0.5}, 0.5),
        ("gae", {"gamma": 0.9}),
        ("gae", {"whiten": True}),
        ("gdpo", {}),
        ("gdpo", {"renormalize": "tokens"}),
        ("gdpo", {"renormalize": "none"}),
        ("gdpo", {"normalize": "center", "renormalize": "none"}),
        ("gigpo", {}),
        ("gigpo", {"normalize": "std"}),
        ("gigpo", {"normalize": "leave_one_out", "gamma": 1.0}),
        ("gigpo", {"omega": 0.0}),
        ("gpg", {}),
        ("gpg", {"alpha": "scores"}),
        ("grpo", {}),
        ("grpo", {"normalize": "batch_std"}),
        ("grpo", {"normalize": "center"}),
        ("grpo", {"normalize": "leave_one_out"}),
        ("grpo", {"enable_multiturn_advantage": True}),
        ("maxrl", {}),
        ("mt_grpo", {}),
        ("multiturn_grpo", {}),
        ("multiturn_grpo", {"statistics": "per_turn"}),
        ("opo", {}),
        ("optimal_token_baseline", {}),
        ("optimal_token_baseline", {"singleton": "raw"}),
        ("pass_at_k", {}),
        ("pass_at_k", {"normalize": "center"}),
        ("reinforce_plus_plus", {}),
        ("reinforce_plus_plus", {"whiten": False}),
        ("reinforce_plus_plus", {"whiten": False, "gamma": 0.9}),
        ("reinforce_plus_plus_baseline", {}),
        ("reinforce_plus_plus_baseline", {"whiten": False}),
        ("remax", {}),
        ("remax", {"returns": "to_go"}),
        ("rloo", {}),
        ("tree_grpo", {}),
        ("tree_grpo", {"normalize": "center"}),
        ("turn_level_gae", {}),
        ("turn_level_gae", {"lam_high": 0.5}, 0.5),
        ("turn_level_gae", {"gamma_high": 0.9}),
        ("turn_level_gae", {"whiten": True}),
        ("two_level", {}),
        ("two_level", {"normalize": "center"}),
        ("uniform", {}),
        ("vineppo", {}),
    )
)
LOSSES = (
    {"aggregate": "sequence_sum"},
    {"aggregate": "constant"},
    {"aggregate": "sequence_mean"},
    {"aggregate": "token_mean"},
    {"aggregate": "sequence_mean", "ratio": "sequence"},
)
LARGER = (
    Variant("gae", {"whiten": True}),
    Variant("gdpo", {}),
    Variant("gdpo", {"renormalize": "none"}),
    Variant("grpo", {}),
    Variant("grpo", {"normalize": "batch_std"}),
    Variant("multiturn_grpo", {}),
    Variant("reinforce_plus_plus", {}),
    Variant("reinforce_plus_plus_baseline", {}),
)
EXPERIMENTS = (
    "kg",
    "kg_grpo",
    "kg_gae",
    "sources/kg_r1",
    "sources/kg_r1_turn_end",
    "frozen_lake",
)


# Figures ------------------------------------------------------------------------------------------


@cache
def draw_cached(prompts: int, size: int, count: int, seed: int) -> tuple[Step, ...]:
    """Drawn steps, each kind once."""
    return tuple(draw_steps(prompts, size, count, seed))


def compare_case(case: Case) -> tuple[Comparison, ...]:
    """Its expected gradient beside the exact one, for every enumerated size of a step."""
    exact = PROCESS.compute_exact_gradient(PROCESS.returns[case.objective])
    return tuple(
        compare_gradients(compute_expected_gradient(case, list_steps(*sizes)), exact)
        for sizes in ENUMERATED
    )


# Page ---------------------------------------------------------------------------------------------


def show_cell(found: Sequence[Comparison]) -> str:
    """The verdict: "exact" or the cosine, and the ratio of norms."""
    is_exact = all(each.is_unbiased for each in found)
    verdict = "exact" if is_exact else f"{found[0].cosine:.4f}"
    return f"{verdict} ×{found[0].ratio:.2f}"


def build_variant_row(variant: Variant) -> str:
    """One line of the table of estimators."""
    cases = {placement: variant.build_case(placement) for placement in PLACEMENTS}
    reads_turns = cases["turn_end"].estimator.reading() == "turns"
    compared = dict.fromkeys(PLACEMENTS, show_cell(compare_case(cases["turn_end"])))
    if not reads_turns:  # the placement counts
        compared = {p: show_cell(compare_case(case)) for p, case in cases.items()}
    goal = cases["turn_end"].objective if reads_turns else "as placed"
    cells = [f"`{variant.name}`", variant.describe_options(), goal, *compared.values()]
    steps = list_steps(*ENUMERATED[0])
    gradients = compute_gradients(cases["final_token_only"], steps)
    deviation = f"{measure_deviation(gradients, steps, **DRAWN):.1f}"
    return f"| {' | '.join([*cells, deviation])} |"


def build_loss_row(loss: dict[str, str]) -> str:
    """One line of the table of losses, with an unbiased estimator."""
    case = build_case("rloo", "turn_end")
    case = Case(case.estimator, case.credit, LossSpec.model_validate(loss))
    exact = PROCESS.compute_exact_gradient(PROCESS.returns[case.objective])
    cosine, error = estimate_cosine(case, draw_cached(**LARGE), exact)
    what = ", ".join(f"`{k}: {v}`" for k, v in loss.items())
    cells = [what, show_cell(compare_case(case)), f"{cosine:.4f} ± {error:.4f}"]
    return f"| {' | '.join(cells)} |"


def build_larger_row(variant: Variant) -> str:
    """One line of the table of larger steps."""
    case = variant.build_case("turn_end")
    exact = PROCESS.compute_exact_gradient(PROCESS.returns[case.objective])
    one, two = (f"{each.cosine:.4f}" for each in compare_case(case))
    cosine, error = estimate_cosine(case, draw_cached(**LARGE), exact)
    cells = [f"`{variant.name}`", variant.describe_options(), one, two]
    return f"| {' | '.join([*cells, f'{cosine:.4f} ± {error:.4f}'])} |"


def build_experiment_row(name: str) -> str:
    """One line of the table of shipped agents: their estimator, credit and aggregation."""
    path = HOME / "experiments" / f"{name}.yaml"
    spec = check_file(path)[0].spec
    credit = CreditSpec(
        placement=spec.credit.resolved_placement,
        turn_reduce=spec.credit.turn_reduce,
        score_source=spec.credit.score_source,
    )
    loss = LossSpec(aggregate=spec.loss.aggregate, ratio=spec.loss.ratio)
    case = Case(resolve_plugins(spec).estimator, credit, loss)
    found = show_cell(compare_case(case))
    link = f"[`{name}.yaml`](../{name}.yaml)"
    cells = [link, f"`{spec.estimator.plugin}`", case.objective, found]
    return f"| {' | '.join(cells)} |"


def build_tables() -> Iterator[tuple[str, str]]:
    """Yields the name of every table in the page, and its Markdown."""
    tables: dict[str, tuple[str, Iterator[str]]] = {
        "estimators": (
            "| estimator | options | return | `turn_proportional` | `turn_end` | "
            "`final_token_only` | check |",
            map(build_variant_row, VARIANTS),
        ),
        "losses": ("| loss | 1 × 4 | 16 × 4, drawn |", map(build_loss_row, LOSSES)),
        "steps": (
            "| estimator | options | 1 × 4 | 2 × 2 | 16 × 4, drawn |",
            map(build_larger_row, LARGER),
        ),
        "experiments": (
            "| experiment | estimator | return | its gradient |",
            map(build_experiment_row, EXPERIMENTS),
        ),
    }
    for name, (head, rows) in tables.items():
        line = "|" + " --- |" * (head.count("|") - 1)
        yield name, "\n".join([head, line, *rows])


def main() -> None:
    page = TEXT.read_text()
    for name, table in build_tables():
        page = page.replace(f"<!-- {name} -->", table)
    PAGE.write_text(page)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
