"""Stable-Baselines3 stays behind its adapter and TD3+BC."""

from run_python import run_python


def test_on_policy_training_does_not_import_it() -> None:
    code = (
        "import sys, vla_gym_trainers.on_policy.train, vla_gym_trainers.rollout.collector, "
        "vla_gym_trainers.rollout.pipeline; assert 'stable_baselines3' not in sys.modules"
    )
    run_python(code)
