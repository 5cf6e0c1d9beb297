"""All that a training run depends on, saved and brought back: it goes on bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_gym_trainers.runs.run_dir import check_format, restoring
from vla_gym_trainers.runs.sb3_vec_env import SB3VecEnv
from vla_gym_trainers.runs.torch_helpers import load_tensors, save_tensors
from vla_gym_trainers.td3.algorithm import TD3BC

#: Raised when the content changes, so that an old checkpoint is refused, not misread.
FORMAT = 11


def save_checkpoint(folder: Path, model: TD3BC, run_state: Mapping[str, Any]) -> None:
    """Write a checkpoint between two rollouts, where nothing is under way.

    ``model.zip`` is SB3's (networks, targets, optimisers, generators, counters), ``replay.pkl``
    the replay with its generator and the episodes that are running, ``loop.pkl`` the environments'
    states and ``run_state``, anything that can be pickled, ``vla.pt`` what is trained of the VLA,
    if anything is.
    """
    env: Any = model.get_env()
    model.save(folder / "model.zip")
    with open(folder / "replay.pkl", "wb") as file:
        pickle.dump(model.replay_buffer, file, protocol=pickle.HIGHEST_PROTOCOL)
    if model.fine_tuner is not None:
        save_tensors(folder / "vla.pt", model.fine_tuner.state_dict())
    pipeline = model.pipeline
    loop = {
        "format": FORMAT,
        "env": env.get_state(),
        "pipeline": model.pipeline_state if pipeline is None else pipeline.state(),
        "run": dict(run_state),
    }
    with open(folder / "loop.pkl", "wb") as file:
        pickle.dump(loop, file, protocol=pickle.HIGHEST_PROTOCOL)


def load_checkpoint(
    folder: Path, env: SB3VecEnv, device: str = "cpu"
) -> tuple[TD3BC, dict[str, Any]]:
    """Bring algorithm and environments to where a checkpoint was written.

    Pickles are executed when they are read: load checkpoints of your own runs only. The
    environments are made as those of the run, and set to the saved states here.

    Returns:
        The algorithm, ready for ``learn(..., reset_num_timesteps=False)``, and ``run_state``.

    Raises:
        WeightsError: If a file is missing, damaged or of another version.
        ConfigError: If it is of another VLA or of other adapters.
    """
    with restoring(folder):
        with open(folder / "loop.pkl", "rb") as file:
            loop = pickle.load(file)
        check_format(folder, loop["format"], FORMAT)
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
    # The model's own last observation stays: the VLA's answer to a restored frame may differ in the
    # last bit (another batch), and the saved one is what the run would have acted on.
    env.set_state(loop["env"])
    model.pipeline_state = loop["pipeline"]
    return model, loop["run"]
