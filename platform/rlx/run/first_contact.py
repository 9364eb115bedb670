"""The first contact: a pretrained model answers a few problems before it is trained."""

from collections.abc import Sequence

from rlx.errors import RewardError
from rlx.evaluation import FirstContact, describe_first_contact
from rlx.model import Policy
from rlx.phase_setup import PhaseSetup
from rlx.plugin import Problem
from rlx.plugin_calls import show_plugin_output
from rlx.run.collect import build_prompt_fit, sample_and_score
from rlx.run.context import RunContext
from rlx.run.progress import Progress
from rlx.seeding import derive_seed

PROMPTS, MOST_PROMPTS = 8, 32
"""Problems of a first contact, and of one in which the first ones carry no signal, if a step does
not have more: where one answer in a hundred is right, eight problems may well have none."""


def draw_contact_problems(
    policy: Policy, setup: PhaseSetup, count: int
) -> tuple[Sequence[Problem], list[int]]:
    """Draws the first training problems that fit the model, with a sampling seed for each."""
    seed, data = setup.spec.seed, derive_seed(setup.spec.seed, "train")
    with show_plugin_output(setup.spec.task.plugin):
        drawn = build_prompt_fit(policy, setup).draw_train(
            lambda number: setup.task.problem("train", number, data), 0, count
        )
    return drawn.problems, [derive_seed(seed, "first contact", n) for n in drawn.numbers]


def make_first_contact(context: RunContext, setup: PhaseSetup) -> FirstContact:
    """Has the model answer training problems, records what came of it, and learns nothing.

    Raises:
        RewardError: no group has a signal, and the run was not submitted with `--anyway`.
    """
    context.progress.show(Progress("first contact", 0, PROMPTS))
    found = _try_problems(context, setup, PROMPTS)
    if not found.has_signal:
        most = max(MOST_PROMPTS, setup.spec.rollout.prompts_per_step)
        context.progress.show(Progress("first contact", PROMPTS, most))
        found = _try_problems(context, setup, most)
    stops = not found.has_signal and not context.folder.anyway.exists()
    if context.recorder:
        level = "info" if found.has_signal else "warning"
        context.recorder.event("first_contact", found.summarize(), level=level, **found.to_json())
        print("\n".join(found.list_lines()), flush=True)
    if stops:
        context.ranks.gather(None)  # the first rank has recorded what came of it
        change = f"; {found.advice[0]}" if found.advice else ""
        raise RewardError(
            "first contact: the model's answers carry no signal, so no step would learn: "
            f"{found.summarize()}{change}. `rlx logs` shows samples and what to change; "
            "`rlx submit --anyway` trains all the same"
        )
    return found


def _try_problems(context: RunContext, setup: PhaseSetup, count: int) -> FirstContact:
    """Samples, scores and describes the phase's rollouts of the first training problems."""
    problems, seeds = draw_contact_problems(context.policy, setup, count)
    rollouts = sample_and_score(context, setup, setup.plan, problems, seeds)
    decode = context.policy.dialogue.decode_tokens
    return describe_first_contact(setup, rollouts.trees, rollouts.table, decode)
