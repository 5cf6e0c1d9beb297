"""Train TorchRL's SAC: `pip install torchrl==0.14.1`, then this file."""

from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymWrapper
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

import vla_gym  # noqa: F401  (registers the environments)


def train(chunks: int = 400, num_envs: int = 2, **options: Any) -> tuple[ReplayBuffer, float]:
    """Collect and learn from so many chunks; return the buffer and the last loss of the critics."""
    torch.set_num_threads(1)
    options = {"task_ids": 8, "assets": "lite", "gamma": 0.99, "flat": True} | options
    options |= {"autoreset_mode": "DISABLED", "string_infos": False}
    envs = gym.make_vec("LiberoVLA-goal-v0", num_envs, **options)
    env = GymWrapper(envs).auto_register_info_dict()
    (observed,), (acted,) = env.observation_spec["observation"].shape[1:], env.action_spec.shape[1:]
    net = nn.Sequential(MLP(observed, 2 * acted, num_cells=[256, 256]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(
        MLP(observed + acted, 1, num_cells=[256, 256]), ["action", "observation"]
    )
    loss = SACLoss(actor, critic, action_spec=env.action_spec_unbatched)
    # Its time step is a whole chunk of control steps, 7 numbers each.
    loss.make_value_estimator(gamma=options["gamma"] ** (acted // 7))
    targets, optimizer = SoftUpdate(loss, eps=0.995), torch.optim.Adam(loss.parameters(), 3e-4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=64)
    collector = Collector(env, actor, frames_per_batch=2 * num_envs, total_frames=chunks)
    for data in collector:
        buffer.extend(data.reshape(-1))
        losses = loss(buffer.sample())
        total = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        targets.step()
    collector.shutdown()
    return buffer, float(losses["loss_qvalue"].detach())


if __name__ == "__main__":
    train()
