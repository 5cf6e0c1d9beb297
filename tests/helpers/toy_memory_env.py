"""A toy that needs a memory: go, at the end, to the side that only the first observation shows.

An episode has 3 chunks. ``proprio[0]`` is 1 or -1 at first, 0 from then on; nothing else differs.
It succeeds if the last chunk's first numbers have that sign on average, so whoever does not
remember succeeds in half of the episodes, whatever it does.
"""

import sys
from types import SimpleNamespace

import cloudpickle
import numpy as np
import torch
from on_policy_toys import toy_envs
from toy_token_env import TEXTS, ToyTokenEnv

from vla_gym.vla import FrozenVLA
from vla_gym_trainers.on_policy.networks import EnvFactories

CHUNKS = 3


class ProprioVLA(FrozenVLA):
    """A VLA that shows proprio as it is, and does nothing: fast."""

    name, horizon, hidden_size, image_size = "proprio", 8, 8, 4
    num_hidden_tokens = 1

    def infer(self, images, instructions, proprio):
        del images, instructions
        hidden = torch.as_tensor(proprio, dtype=torch.float32)[:, None]
        return SimpleNamespace(hidden=hidden, actions=torch.zeros(len(proprio), 8, 7))


class ToyMemoryEnv(ToyTokenEnv):
    """See the module; tasks 0 and 1 are the sides, and the instruction is that of task 0."""

    def step(self, action):
        self._die_if_due()
        self.elapsed += len(action)
        is_last = self.elapsed >= CHUNKS * len(action)
        side = 1.0 if self.task == 0 else -1.0
        success = is_last and side * float(np.mean(action[:, 0])) > 0.0
        info = self._info(success, len(action))
        return self._observe(), float(success), success, is_last and not success, info

    def _observe(self):
        self.x = 0.0
        obs = super()._observe()
        side = 1.0 if self.task == 0 else -1.0
        obs["proprio"][0] = 0.0 if self.elapsed else side
        return {**obs, "task_id": np.int64(0)}

    def _info(self, success, executed):
        return {**super()._info(success, executed), "instruction": TEXTS[0]}


def memory_envs(num_envs, **kwargs):
    return toy_envs(num_envs, kind=ToyMemoryEnv, size=4, **kwargs)


def memory_factories(config):
    return EnvFactories(
        lambda: memory_envs(config.num_envs, group_size=config.group_size),
        lambda: memory_envs(config.eval_envs, autoreset_mode="DISABLED"),
        CHUNKS * 4,
        (0, 1),
    )


cloudpickle.register_pickle_by_value(sys.modules[__name__])
