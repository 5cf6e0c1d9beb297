"""What a training run has made: its policy over the RL token, or its VLA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import Text, file_sha256, read_json
from vla_gym.rollout.policies import BATCH_SIZE
from vla_gym.rollout.vla_policy import check_chunk_len, vla_identity
from vla_gym.vla.spec_options import split_options, with_option
from vla_gym_trainers.evaluation.actor_policy import ActorPolicy
from vla_gym_trainers.runs.settings import needs_trainers
from vla_gym_trainers.world_model.protocol import load_world_model, model_folder, world_memory_size

#: Files of a run that hold a policy over the RL token.
ACTOR_FILES = ("rl_token_actor.safetensors", "policy.safetensors")


def policy_file(path: Path) -> Path | None:
    """Return the file of a policy over the RL token, ``path`` itself; None if a run has none."""
    if path.is_file():
        return path
    return next((path / name for name in ACTOR_FILES if (path / name).is_file()), None)


def load_policy(path: Path) -> Any:
    """Load the network of a trained policy from its file or a run directory; it has ``predict``.

    Raises:
        WeightsError: If there is no such file, or it cannot be read.
    """
    file = policy_file(path)
    if file is None:
        raise WeightsError(
            f"No trained policy in {path}: expected a run directory of 'vla-gym-train td3 | ppo | "
            "grpo', or its policy.safetensors. A run writes its policy when it ends; one that was "
            f"stopped ends with --resume {path} --max-minutes 0."
        )
    if file.name == ACTOR_FILES[0]:
        from vla_gym_trainers.on_policy.rl_token_actor import RLTokenActor

        return RLTokenActor.load(file.parent)
    with needs_trainers():
        from vla_gym_trainers.td3.policy import RLTokenPolicy

    return RLTokenPolicy.load(file)


def load_trained(
    path: Path,
    vla: str | None = None,
    batch_size: int = BATCH_SIZE,
    *,
    rl_token: str | None = None,
    device: str = "cpu",
) -> ActorPolicy:
    """Load a policy of ``vla-gym-train td3``, its VLA and the RL token's encoder.

    Args:
        path: The policy's file, or the run directory that holds it and ``config.json``.
        vla: The VLA, as ``vla_gym.vla.load`` takes it; default: the one that the run has trained,
            else that its configuration names, else ``"mini"``.
        batch_size: Rows of a forward pass.
        rl_token: Folder of its encoder, ``"auto"`` or ``"mean"``; default: as in the run.
        device: Torch device of VLA and encoder.

    Raises:
        WeightsError: If a file is missing or damaged.
        ConfigError: If policy and VLA do not fit each other, or the run has trained its VLA and
            not written it yet.
    """
    from vla_gym.rl_token import choose_rl_token
    from vla_gym.vla import load

    model = load_policy(path)
    run = trained_on(path)
    given, vla = vla is not None, vla or run.vla
    folder = path if path.is_dir() else path.parent
    if run.vla_update_freq and not given:  # the run has trained its VLA and encoder as well
        trained = trained_vla(folder, vla)
        if trained is None:
            raise ConfigError(
                f"{path} is of a run that also trains its VLA, and {folder} has none that can be "
                "loaded: a run writes it when it ends, so go on with it (vla-gym-train td3 "
                "--resume); or name a VLA with --vla."
            )
        vla, own = trained, folder / "rl_token"
        rl_token = rl_token or (str(own) if own.is_dir() else None)
    rl_token = rl_token or run.rl_token
    # What a run's configuration names is a checkpoint, never a class to import.
    loaded = load(vla, device=device, allow_class=given)
    encoder = choose_rl_token(rl_token, loaded, device)
    chunk_len = check_chunk_len(int(model.action_space.shape[0]), loaded)
    name = path.stem if path.is_file() else path.name
    world_model = None
    if world_memory_size(model.observation_space):
        if run.world_model is None:
            raise ConfigError(
                f"{path} was trained with a world model, which nothing names: it belongs into its "
                "run directory, whose config.json does."
            )
        world_model = load_world_model(
            run.world_model, device, allow_class=False, vlas={vla: loaded}
        )
    policy = ActorPolicy(
        model,
        loaded,
        encoder,
        chunk_len,
        batch_size=batch_size,
        name=name,
        world_model=world_model,
    )
    wanted = model.observation_space["rl_token"].shape
    dim = loaded.hidden_size if encoder is None else encoder.dim
    if wanted != (dim,):
        raise ConfigError(
            f"{path} was trained on RL tokens of shape {wanted}, here they have ({dim},): name "
            f"what it was trained on with --vla (now {vla}) and --rl-token (now {rl_token})."
        )
    token = {"name": "mean"}
    if encoder is not None:
        token = vla_identity(loaded.name if rl_token == "auto" else rl_token, "-rl-token")
    policy.identity |= {
        "sha256": file_sha256(policy_file(path) or path),
        "guarded_tasks": list(model.guarded_tasks),
        "vla": vla_identity(vla),
        "rl_token": token,
    }
    if world_model is not None:
        folder = model_folder(run.world_model or "")
        policy.identity["world_model"] = vla_identity(folder, "-world-model")
    return policy


#: Which head acts for a VLA that PPO or GRPO has trained, by their ``policy``; others: its own.
HEADS = {"tokens": "token", "gaussian": "l1", "flow": "flow"}


class TrainedOn(Struct):
    """What a run's configuration says of its policy; the defaults are those without one.

    The names come from a file: load the VLA with ``allow_class=False``.
    """

    vla: Text = "mini"
    rl_token: Text = "auto"
    policy: str = "tokens"
    world_model: Text | None = None
    vla_update_freq: int = 0
    hidden_cameras: list[str] = []
    memory_size: int = 0
    suite: Text = "goal"
    use_task_id: bool = False


def trained_on(path: Path) -> TrainedOn:
    """Return what a run's policy was trained on, by the run's directory or a file in it.

    Raises:
        ConfigError: If there is a configuration that cannot be read.
    """
    config = (path if path.is_dir() else path.parent) / "config.json"
    if not config.is_file():
        return TrainedOn()
    return read_json(
        config, TrainedOn, advice=f"Restore it, for it says what {path} was trained on."
    )


def trained_vla(run_dir: Path, vla: str) -> str | None:
    """Return what :func:`vla_gym.vla.load` takes for the VLA that a run began with and trained.

    A plain checkpoint if the run has one, else the VLA with the run's adapters; None if it has
    neither, its path cannot stand in a specification, or the run began with other adapters, which
    would be lost.
    """
    if (run_dir / "vla").is_dir():
        spec = str(run_dir / "vla")
        for name, value in split_options(vla)[1].items():
            spec = spec if name == "adapters" else with_option(spec, name, value)
        return spec
    folder = run_dir / "adapters"
    has_adapters = "adapters" in split_options(vla)[1]
    if not folder.is_dir() or has_adapters or set(str(folder)) & set("?&"):
        return None
    return with_option(vla, "adapters", str(folder))
