"""A replay in TorchRL's words."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from vla_gym.errors import ConfigError
from vla_gym_trainers.td3.replay import ChunkReplayBuffer


def replay_tensordict(buffer: ChunkReplayBuffer) -> TensorDict:
    """Return a copy of all stored transitions, the oldest first.

    Args:
        buffer: Of a TD3+BC model (``model.replay_buffer``), or of a checkpoint.

    Returns:
        (n,) on the CPU, with the keys of TorchRL's collectors: those of the observation;
        ``action``, as the environment takes it, (n, C, 7) float32; and in ``next`` those of the
        observation (at an episode's end its last one), ``reward`` and ``discount``
        (``gamma ** executed_steps``), (n, 1) float32, ``terminated``, ``truncated`` and ``done``,
        (n, 1) bool. Discrete keys are (n,) int64.

    Raises:
        ConfigError: If it holds what a VLA saw, which is not part of its rows.
    """
    ring = buffer._ring
    if "obs/vla_input" in ring.shapes:
        raise ConfigError(
            "Expected a replay without keep_inputs, got one that holds what the VLA saw: train "
            "without vla_update_freq."
        )
    slots = np.arange(ring.num_added - len(ring), ring.num_added) % ring.capacity
    rows = ring.gather(slots, torch.device("cpu"))
    for name in buffer._integers:
        rows[name] = rows[name].long().squeeze(-1)
    after = {key: rows[f"next/{key}"] for key in buffer.obs_shape}
    after |= {"reward": rows["rewards"], "discount": rows["discounts"]}
    after |= {"terminated": rows["dones"].bool(), "truncated": rows["truncated"].bool()}
    after["done"] = after["terminated"] | after["truncated"]
    action = rows["actions"].unflatten(1, buffer.action_space.shape)
    before = {key: rows[f"obs/{key}"] for key in buffer.obs_shape}
    columns = {**before, "action": action, "next": after}
    return TensorDict(columns, batch_size=len(ring)).contiguous()
