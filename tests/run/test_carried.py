"""What is handed from step to step."""

from types import SimpleNamespace

import torch

from rlx.run.context import ControllerState
from rlx.spec import AdaptiveBeta, CreditSpec


def stepped(kl=None, state=None):
    return SimpleNamespace(
        state=state or {},
        kl=kl,
        mask=torch.ones(2, 3, dtype=torch.bool),
        batch=SimpleNamespace(rows=(0,) * 64),
    )


def spec(estimator="gae", **credit):
    return SimpleNamespace(
        estimator=SimpleNamespace(plugin=estimator),
        credit=CreditSpec(**credit),
    )


def test_an_estimators_state_waits_for_it():
    carried = ControllerState.begin(CreditSpec(), None)
    carried = carried.after(
        stepped(state={"mean_square": 2.0}), spec("two_level"), with_critic=False
    )
    carried = carried.after(stepped(), spec("gae"), with_critic=True)
    carried = carried.after(stepped(), spec("two_level"), with_critic=False)
    assert carried.states == {"two_level": {"mean_square": 2.0}}
    assert carried.critic == 1


def test_beta_follows_the_measured_kl_and_survives_a_phase_with_the_same_settings():
    credit = {
        "use_kl_in_reward": True,
        "kl_coef": 0.2,
        "kl_adaptive": AdaptiveBeta(target=0.1, horizon=10_000),
    }
    carried = ControllerState.begin(CreditSpec(**credit), None)
    assert carried.kl.beta == 0.2
    carried = carried.after(stepped(kl=torch.full((2, 3), 0.02)), spec(**credit), with_critic=False)
    assert abs(carried.kl.beta - 0.199744) < 1e-9
    assert ControllerState.begin(CreditSpec(**credit), carried).kl == carried.kl
    fresh = ControllerState.begin(CreditSpec(kl_coef=0.5), carried)
    assert fresh.kl.beta == 0.5


def test_a_beta_that_adapts_is_taken_up_again_and_a_fixed_one_is_the_settings_own():
    adaptive = CreditSpec(kl_coef=0.2, kl_adaptive=AdaptiveBeta(target=0.1, horizon=10_000))
    for credit, kept, beta in (
        (adaptive, 0.7, 0.7),
        (adaptive, None, 0.2),
        (CreditSpec(kl_coef=0.5), 0.7, 0.5),
    ):
        carried = ControllerState.resume(credit, kept, {"opo": {"scale": 0.1}}, 3)
        assert carried.kl.beta == beta
        assert carried.adaptive_beta == (beta if credit.kl_adaptive else None)
        assert (carried.states, carried.critic) == ({"opo": {"scale": 0.1}}, 3)
        assert ControllerState.begin(credit, carried) is carried
