"""A run's policy that no plain VLA can play, since it sees less or remembers, as a player."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vla_gym.errors import WeightsError
from vla_gym.outside import Object, file_sha256, read_json
from vla_gym.rollout.policies import BATCH_SIZE
from vla_gym.rollout.vla_policy import vla_identity
from vla_gym.vla import load
from vla_gym_trainers.explorer.config import AdversarialConfig, ExplorerConfig
from vla_gym_trainers.on_policy.config import GRPOConfig, OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import local_device
from vla_gym_trainers.on_policy.networks import make_networks
from vla_gym_trainers.on_policy.validation import PolicyPlayer
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.settings import command_of, read_settings
from vla_gym_trainers.runs.torch_helpers import load_parameters


def load_player(
    run: Path,
    *,
    seed: int | None = None,
    vla: str | None = None,
    device: str = "cpu",
    batch_size: int = BATCH_SIZE,
) -> PolicyPlayer:
    """Load what ``vla-gym-train explorer | adversarial | ppo | grpo`` has trained.

    It sees what it saw in training, and remembers as it did: nothing of the world model is needed.
    It acts greedily unless its draws have a seed. The VLA that it was trained from is the one that
    the run's configuration names, by default.

    Raises:
        ConfigError: If it is no run, or its settings do not fit the VLA.
        WeightsError: If the run has no parameters yet, or a file is damaged.
    """
    file = run / "config.json"
    kinds = {kind.algorithm: kind for kind in (AdversarialConfig, ExplorerConfig, PPOConfig)}
    kind: type[OnPolicyConfig] = kinds.get(command_of(read_json(file, Object)) or "", GRPOConfig)
    config = read_settings(file, kind)
    changes: dict[str, Any] = {"world_model": None, "device": device, "vla": vla or config.vla}
    if isinstance(config, ExplorerConfig):
        changes["teacher"] = None
    else:
        changes["rewards"] = ()
    config = dataclasses.replace(config, **changes)
    # What a run's configuration names is a checkpoint, never a class to import.
    loaded = load(config.vla, device=local_device(device), allow_class=vla is not None)
    networks = make_networks(config, loaded)
    path = newest_parameters(run)
    policy = networks.policy
    policy.load_state_dict(load_parameters(path))
    player = PolicyPlayer(policy.act, policy, networks.chunk_len, seed)
    player.name, player.batch_size = run.name, batch_size
    who = {"sha256": file_sha256(path), "vla": vla_identity(config.vla)}
    player.identity = {"kind": "trained", **who}
    return player


def newest_parameters(run: Path) -> Path:
    """Return the file of the parameters to use: the best ones if any were validated, else the last.

    Raises:
        WeightsError: If there is none.
    """
    best, checkpoints = RunDir(run).best, RunDir(run).checkpoints()
    if best.is_file():
        return best
    if not checkpoints:
        raise WeightsError(f"{run} has no checkpoint yet: let it train until the first one.")
    return checkpoints[-1] / "policy.safetensors"
