"""GRPO on a VLA's own action tokens, on one page: sixteen episodes, one update, again.

    python examples/grpo.py --task 5 --rollouts 10

Eight environments a group begin in the same state and draw different tokens; what did better than
its group becomes likelier. Only LoRA adapters are trained. `vla-gym-train grpo` adds evaluation,
checkpoints, phases and asynchronous collection to the same parts.
"""

import argparse
import math
import time

from vla_gym import vla
from vla_gym.suites import get_task
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla.lora import LoraSettings
from vla_gym_trainers.on_policy.collector import RolloutCollector
from vla_gym_trainers.on_policy.config import GRPOConfig
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.student import trainable_copy
from vla_gym_trainers.on_policy.targets import grpo_targets, rollout_metrics
from vla_gym_trainers.on_policy.vla_policy import TokenPolicy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--vla", default="mini", help="a VLA with a token head and an L1 head")
parser.add_argument("--task", type=int, default=5)
parser.add_argument("--groups", type=int, default=2)
parser.add_argument("--group-size", type=int, default=8)
parser.add_argument("--rollouts", type=int, default=10)
parser.add_argument("--adapters", default="grpo_adapters", help="folder to save them in")
args = parser.parse_args()

base = vla.load(args.vla)
# The adapters are a copy's; the frozen weights are shared. The L1 head is not trained here.
student, adapters = trainable_copy(base, "lora", lora=LoraSettings(r=16, exclude=("action_head",)))
print(adapters.counts)
policy = TokenPolicy(student, temperature=1.0)
learner = Learner(policy, GRPOConfig(learning_rate=3e-4, num_minibatches=4))

num_envs = args.groups * args.group_size
envs = LiberoVectorEnv(
    num_envs,
    "goal",
    task_ids=args.task,
    group_size=args.group_size,  # so many consecutive environments play the same layouts
    chunk_len=base.horizon,
    image_size=base.image_size,
    gamma=1.0,
    autoreset_mode="SAME_STEP",
)
limit = get_task("goal", args.task).max_control_steps
num_chunks = math.ceil(limit / base.horizon)
rollout = Rollout(policy, num_envs, num_chunks, episodes=1, group_size=args.group_size)
collector = RolloutCollector(envs, groups=2)  # one simulates, one is in the VLA
for i in range(args.rollouts):
    began = time.perf_counter()
    collector.collect(policy, rollout, seed=1000 * i)
    # (R - mean of the group) / std of the group, whole episodes weighing the same, however long;
    # groups without contrast are dropped
    targets = grpo_targets(rollout)
    played = rollout_metrics(rollout)
    learnt = learner.update(rollout, targets.advantages, targets.keep)
    print(
        f"{i:3d}: success {played['rollout/success']:.2f}, "
        f"kept {targets.metrics['rollout/episodes_kept']:.0f} of {num_envs} episodes, "
        f"KL {learnt.get('train/kl', 0.0):.4f}, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
envs.close()
adapters.save(args.adapters)
print(f"adapters: {args.adapters}")
