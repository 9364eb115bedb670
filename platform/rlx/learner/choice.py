"""Which form a model's packed trees are computed in: the first that gives the plain rows' numbers.

Names of architectures say too little (a window, a sink or a soft cap is an option of some of
them), and a form that does not fit a model would be wrong without a word. So each is tried on a few
random trees, with its gradient, against plain rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.learner.distributed import Ranks
from rlx.learner.forms import CachedForm, FlexForm, ForwardForm, GroupedForm, PlainForm
from rlx.learner.forward import PackedModule
from rlx.learner.pack import collate_trees, pack_trees

__all__ = ["FormChoice", "choose_form"]

FORMS: dict[str, tuple[ForwardForm, ...]] = {
    "cuda": (FlexForm(), GroupedForm(), CachedForm(), PlainForm()),
    "cpu": (GroupedForm(), CachedForm(), PlainForm()),
}
"""By kind of device, the fastest first. Plain rows are right by definition."""

NEAR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative L2 distance up to which outputs are alike. Rounding is a hundredth of it."""

SHAPE = (30, (12, 5, 12), 4, (3, 5))
"""Tokens of the prompt, of each answer, of the question, and of each confidence."""


@dataclass(frozen=True, slots=True)
class FormChoice:
    """A form, and for each that would be faster why it does not fit this model."""

    form: ForwardForm
    refused: tuple[str, ...]

    def __str__(self) -> str:
        shares = "shared prefixes are computed once" if self.form.merges else "nothing is shared"
        why = "".join(f"; not {reason}" for reason in self.refused)
        return f"{self.form.name}: {shares}{why}"


def choose_form(module: PackedModule, ranks: Ranks) -> FormChoice:
    """Tries the forms of a device, and lets the module use the first that fits.

    Args:
        module: whole, on the rank's device, not yet sharded.
        ranks: which all use the same form.

    Returns:
        What was chosen, alike on every rank.
    """
    forms = FORMS[ranks.device.type]
    module.use(forms[-1])
    expected = _compute_trial_outputs(module)
    refused: list[str] = []
    for form in forms[:-1]:
        if reason := _find_form_fault(module, form, expected):
            refused.append(f"{form.name} ({reason})")
        else:
            break
    everyone = ranks.gather(refused)
    most = max(everyone, key=len)
    module.use(forms[len(most)])
    return FormChoice(forms[len(most)], tuple(most))


def _find_form_fault(module: PackedModule, form: ForwardForm, expected: tuple[Tensor, ...]) -> str:
    """Why a form does not fit; nothing where it does."""
    try:
        module.use(form)
        found = _compute_trial_outputs(module)
    except Exception as error:  # noqa: BLE001  (a model may refuse in any way)
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    for what, a, b in zip(("outputs", "gradients"), found, expected, strict=False):
        distance, length = float((a - b).norm()), float(b.norm())
        if not distance <= NEAR.get(a.dtype, NEAR[torch.bfloat16]) * length:
            return f"{what} differ from those of plain rows by {distance:.1g} of {length:.1g}"
    return ""


def _compute_trial_outputs(module: PackedModule) -> tuple[Tensor, ...]:
    """Outputs of a few trees, and the gradient of the first parameters where any learn.

    Of several: an adapter's A has none as long as its B is zero, and it begins so.
    """
    learned = [p for p in module.model.parameters() if p.requires_grad][:4]
    some = next(module.model.parameters())
    ids, is_token, trees, want = _build_trial_rows(module)
    packed = collate_trees(
        pack_trees(ids, is_token, trees, want, ids.numel(), merge=module.form.merges), ids
    )
    with torch.enable_grad():
        outputs = module.outputs(packed.to(some.device))
    order = (packed.rows * ids.shape[1] + packed.columns).argsort()  # forms pack in other orders
    outputs = outputs[order.to(some.device)]
    weights = torch.linspace(-1, 1, outputs.numel(), device=some.device).view_as(outputs)
    if not learned:
        return (outputs.detach(),)
    gradients = torch.autograd.grad((outputs.float() * weights).sum(), learned)
    return outputs.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def _build_trial_rows(module: PackedModule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two-turn rows of two trees: token ids, which are any, of which tree, and which are wanted."""
    vocabulary = module.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)

    def generate_token_ids(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompt, answers, question, confidences = SHAPE
    rows, trees, learned = [], [], []
    for tree in range(2):
        opening, start = (
            generate_token_ids(prompt),
            generate_token_ids(3),
        )  # which answers share as well
        for answer in answers:
            said = [*opening, *start[: tree + 1], *generate_token_ids(answer)]
            asked = [*said, *generate_token_ids(question)]
            rows += [said, *([*asked, *generate_token_ids(count)] for count in confidences)]
            learned += [prompt, *[len(asked)] * len(confidences)]
            trees += [tree] * (1 + len(confidences))
    width = max(map(len, rows))
    column = torch.arange(width)
    is_token = column < torch.tensor([[len(row)] for row in rows])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    want = is_token & (column >= torch.tensor(learned)[:, None])
    return ids, is_token, torch.tensor(trees), want
