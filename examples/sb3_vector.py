"""Train a stock stable-baselines3 algorithm on many LIBERO environments at once.

    python examples/sb3_vector.py --algo td3 --num-envs 4 --steps 2000

The frozen VLA works inside the environment: the policy sees its RL token, its own action chunk and
the robot's state, and answers with a whole chunk. Stock algorithms start from scratch, so nothing
is learnt in a few minutes; `vla-gym-train td3` starts at the VLA.
"""

import argparse

import stable_baselines3 as sb3

from vla_gym_trainers.runs.sb3_vec_env import make_sb3_vec_env

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--algo", choices=("td3", "sac", "ppo"), default="td3")
parser.add_argument("--steps", type=int, default=2000, help="chunks to collect in all")
parser.add_argument("--num-envs", type=int, default=4)
parser.add_argument("--workers", type=int, help="worker processes; default: one per core")
args = parser.parse_args()

print("Starting the environments; the first time compiles the scene...", flush=True)
# The environments live in worker processes. Note that nothing here needs a __main__ guard.
env = make_sb3_vec_env(
    "LiberoVLA-goal-v0",
    args.num_envs,
    workers=args.workers,
    task_ids=[2, 8],  # the bottle on the cabinet, the bowl on the plate: both in one batch
    gamma=0.99,
)
# SB3's algorithms discount a timestep, which is a whole chunk here.
gamma = 0.99 ** env.action_space.shape[0]
if args.algo == "ppo":
    settings = {"n_steps": 32, "batch_size": 32}
else:
    settings = {"learning_starts": 100, "buffer_size": 20_000, "gradient_steps": 1}
algorithm = {"td3": sb3.TD3, "sac": sb3.SAC, "ppo": sb3.PPO}[args.algo]
model = algorithm("MultiInputPolicy", env, gamma=gamma, seed=0, verbose=1, **settings)
model.learn(args.steps, progress_bar=True, log_interval=1 if args.algo == "ppo" else 4)
env.close()
