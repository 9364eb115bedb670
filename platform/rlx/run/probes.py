"""Runs the probes of a run: the same held-out problems each time, split among the ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlx.errors import SpecError
from rlx.phase_setup import PhaseSetup
from rlx.probe import (
    ProbeContext,
    ProbeResult,
    RecordedProbe,
    build_recorded_probe,
    probe_model,
)
from rlx.progress import Progress
from rlx.rollout import Dialogue, PromptFit
from rlx.run.training import (
    build_probe_context,
    build_prompt_fit,
    draw_held_out_problems,
)
from rlx.spec import ProbeSpec

if TYPE_CHECKING:  # a probe needs no learner
    from rlx.learner import Ranks
    from rlx.run.context import RunContext


def run_probe(context: "RunContext", setup: PhaseSetup, *, step: int, label: str) -> None:
    """Probes the sampler's current weights; rank 0 records the results."""
    spec = context.spec.probe
    if spec is None:
        return
    means = build_probe_context(setup, context.policy, context.sampler, context.pool)
    fit = build_prompt_fit(context.policy, setup)
    found = probe_problems(
        spec, means, fit, context.spec.seed, context.ranks, context.progress.show
    )
    if context.recorder is None:
        return
    records = build_probe_records(found, spec, context.spec.seed, step)
    if not records:
        print(f"step {step}/{context.spec.steps}  probe: no answer could be probed", flush=True)
        return
    context.recorder.probe(records, found, label, context.folder.probe(step))
    for one in records:
        curve = one.figures["p_correct"]
        change = f"{curve[0]['mean']:.3f} → {curve[-1]['mean']:.3f}"
        at = f"step {step}/{context.spec.steps}"
        print(f"{at}  probe {one.suite}  mc_p_correct {change}", flush=True)


def require_texts(spec: ProbeSpec, speech: Dialogue) -> None:
    """Checks that the model's tokenizer can encode the texts that the probe inserts.

    Raises:
        SpecError: it cannot, or a text is empty.
    """
    forces = set(spec.schemes) != {"mistake"}
    texts = {"force": forces, "filler": "filler" in spec.schemes}
    for key in (key for key, used in texts.items() if used):
        text = getattr(spec, key)
        try:
            written = speech.encode(text)
        except SpecError as error:
            raise SpecError(
                f"probe.{key} is {text!r}, which this model's tokenizer cannot encode; use text "
                "that it can encode"
            ) from error
        if not written:
            raise SpecError(f"probe.{key} is empty: give the text to insert")


def probe_problems(
    spec: ProbeSpec,
    means: ProbeContext,
    fit: PromptFit,
    seed: int,
    ranks: "Ranks | None",
    show: Callable[[Progress], None],
) -> ProbeResult:
    """Probes the first held-out problems; each rank probes its share of them.

    Raises:
        SpecError: the model's tokenizer cannot encode a text of the probe.
    """
    require_texts(spec, means.speech)
    drawn, seeds = draw_held_out_problems(fit, means.task, seed, range(spec.problems), "probe")
    rank, count = (ranks.rank, ranks.count) if ranks else (0, 1)
    mine = slice(rank, None, count)

    def report_probe_progress(done: int, total: int) -> None:
        show(Progress("probe", done, total))

    share = probe_model(spec, means, drawn.problems[mine], seeds[mine], report_probe_progress)
    shares = ranks.gather(share) if ranks else [share]
    # Rank r has every `parts`-th problem from r on.
    parts, total = len(shares), sum(len(one.answered) for one in shares)
    answered = tuple(shares[i % parts].answered[i // parts] for i in range(total))
    samples = [
        replace(sample, answered=sample.answered * parts + of)
        for of, one in enumerate(shares)
        for sample in one.samples
    ]
    samples.sort(key=lambda sample: sample.answered)
    return ProbeResult(answered, tuple(samples))


def build_probe_records(
    found: ProbeResult, spec: ProbeSpec, seed: int, step: int
) -> list[RecordedProbe]:
    """Builds the record of every scheme that was sampled."""
    built = [build_recorded_probe(found, spec, scheme, seed, step) for scheme in spec.schemes]
    return [one for one in built if one is not None]
