"""Stable-Baselines3 stays behind its adapter and TD3+BC."""

from pathlib import Path

from run_python import run_python


def test_on_policy_training_and_a_run_of_ppo_do_without_it_and_one_of_td3_asks_for_it(
    tmp_path: Path,
) -> None:
    code = f"""
import sys
sys.modules["stable_baselines3"] = None  # as if it were not installed
from pathlib import Path
from vla_gym.cli.main import main
from vla_gym_trainers.cli import main as train
import vla_gym_trainers.on_policy.train, vla_gym_trainers.rollout.pipeline
from vla_gym_trainers.evaluation.trained import load_policy
from vla_gym_trainers.on_policy.rl_token_actor import ActorSizes, RLTokenActor
folder = Path({str(tmp_path)!r})
RLTokenActor(ActorSizes(4, 2, [8], 1.0, 2, 8, [1.0] * 7)).save(folder)
assert load_policy(folder).action_space.shape == (2, 7)
(folder / "policy.safetensors").write_bytes(b"")
assert train(["td3", "--task-ids", "9"]) == 2
sys.exit(main(["play", "--policy", str(folder / "policy.safetensors")]))
"""
    done = run_python(code, fails=True)
    assert done.returncode == 2 and done.stderr.count("needs the trainers") == 2
