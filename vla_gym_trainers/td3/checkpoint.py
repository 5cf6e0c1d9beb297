"""All that a training run depends on, saved and brought back: it goes on bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.runs.run_dir import restoring
from vla_gym_trainers.runs.torch_helpers import load_tensors, save_tensors
from vla_gym_trainers.td3.algorithm import TD3BC

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

#: Raised when the content changes, so that an old checkpoint is refused, not misread.
FORMAT = 10


def save_checkpoint(folder: Path, model: TD3BC, run_state: Mapping[str, Any]) -> None:
    """Write a checkpoint between two rollouts, where nothing is under way.

    ``model.zip`` is SB3's (networks, targets, optimisers, generators, counters), ``replay.pkl``
    the replay with its generator and the episodes that are running, ``loop.pkl`` the environments'
    states and ``run_state``, anything that can be pickled, ``vla.pt`` what is trained of the VLA,
    if anything is.

    Raises:
        ConfigError: If the environment has no ``get_state``.
    """
    env = _with_states(model.get_env())
    model.save(folder / "model.zip")
    with open(folder / "replay.pkl", "wb") as file:
        pickle.dump(model.replay_buffer, file, protocol=pickle.HIGHEST_PROTOCOL)
    if model.fine_tuner is not None:
        save_tensors(folder / "vla.pt", model.fine_tuner.state_dict())
    loop = {
        "format": FORMAT,
        "env": env.get_state(),
        "pipeline": model.pipeline_state,
        "run": dict(run_state),
    }
    with open(folder / "loop.pkl", "wb") as file:
        pickle.dump(loop, file, protocol=pickle.HIGHEST_PROTOCOL)


def _with_states(env: Any) -> Any:
    """Return environments whose states can be saved; raise a ConfigError if they cannot."""
    if not hasattr(getattr(env, "vector_env", None), "get_state"):
        raise ConfigError(
            f"{type(env).__name__} cannot save the state of its environments: make it with "
            "make_sb3_vec_env, or with sb3_vec_env around a LiberoVectorEnv."
        )
    return env


def load_checkpoint(folder: Path, env: VecEnv, device: str = "cpu") -> tuple[TD3BC, dict[str, Any]]:
    """Bring algorithm and environments to where a checkpoint was written.

    Pickles are executed when they are read: load checkpoints of your own runs only. The
    environments are made as those of the run, and set to the saved states here.

    Returns:
        The algorithm, ready for ``learn(..., reset_num_timesteps=False)``, and ``run_state``.

    Raises:
        WeightsError: If a file is missing, damaged or of another version.
        ConfigError: If it is of another VLA or of other adapters, or ``env`` has no states.
    """
    environments = _with_states(env)
    with restoring(folder):
        with open(folder / "loop.pkl", "rb") as file:
            loop = pickle.load(file)
        if loop["format"] != FORMAT:
            raise WeightsError(
                f"{folder} has format {loop['format']}, expected {FORMAT}: begin a new run, or go "
                "on with the vla_gym version that wrote it."
            )
        # The replay comes from its own file: a buffer of one row in the meantime.
        model = TD3BC.load(
            folder / "model.zip",
            env=env,
            device=device,
            force_reset=False,
            custom_objects={"buffer_size": 1},
        )
        with open(folder / "replay.pkl", "rb") as file:
            model.replay_buffer = pickle.load(file)
        if model.fine_tuner is not None:
            model.fine_tuner.load_state_dict(load_tensors(folder / "vla.pt"))
    model.buffer_size = model.replay_buffer.buffer_size
    model.replay_buffer.device = model.device
    last_obs = copy.deepcopy(model._last_obs)
    environments.set_state(loop["env"])
    model.pipeline_state = loop["pipeline"]
    # The VLA's answer to a restored frame may differ in the last bit (another batch): the saved
    # observation is the one that the run would have acted on.
    model._last_obs = last_obs
    return model, loop["run"]
