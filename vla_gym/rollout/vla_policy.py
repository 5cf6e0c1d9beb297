"""A frozen VLA that plays episodes, and which files and options it is loaded from."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.envs.checks import as_integer, as_number, check_choice
from vla_gym.errors import ConfigError
from vla_gym.rollout.policies import (
    BATCH_SIZE,
    Info,
    Observations,
    episode_key,
    in_episodes,
    in_fixed_batches,
)
from vla_gym.vla.base import FrozenVLA, TokenVLA, check_output
from vla_gym.vla.paraphrases import paraphrases
from vla_gym.vla.stateful import VLAMemory

#: What a checkpoint's folder says how to use its weights, and the weights.
_SETTINGS, _WEIGHTS = (".json", ".yaml"), (".safetensors", ".pt", ".bin")
#: What trainers and evaluations leave there, by the beginning of its name.
_OTHERS = ("card", "optimizer", "scheduler", "training_args", "rng_state")


class VLAPolicy:
    """A frozen VLA: executes the chunks that it proposes, greedily or sampled.

    The state of a stateful VLA is kept by environment: it plays in one rollout at a time.
    """

    expert = False

    def __init__(
        self,
        vla: str | Path | FrozenVLA,
        *,
        head: str | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        chunk_len: int | None = None,
        batch_size: int = BATCH_SIZE,
        phrasing: str = "original",
        device: str = "cpu",
        allow_class: bool = True,
    ) -> None:
        """Load the VLA.

        Args:
            vla: As ``vla_gym.vla.load`` takes it, or the model itself.
            head: ``"l1"``, ``"token"`` or ``"flow"``; None: the VLA's own first choice.
            temperature: 0 takes the most likely tokens, more samples them.
            seed: Of the sampling.
            chunk_len: Control steps executed a chunk; default: the VLA's horizon.
            batch_size: Rows of a forward pass.
            phrasing: ``"original"``, or ``"held-out"`` to tell it each task in the words that
                cloning left out (:mod:`vla_gym.vla.paraphrases`).
            device: Torch device.
            allow_class: False where ``vla`` was read from a file.

        Raises:
            WeightsError: If the checkpoint is missing or damaged.
            ConfigError: If the VLA has no such head or is stateful and is to be sampled, the chunk
                is longer than its horizon, or another argument is out of range.
        """
        check_choice(phrasing, "phrasing", ("original", "held-out"))
        temperature = as_number(temperature, "temperature", 0.0, np.inf)
        seed, batch_size = as_integer(seed, "seed", 0), as_integer(batch_size, "batch_size", 1)
        self.vla = load_vla(vla, head, device, allow_class=allow_class)
        self._vla_memory = VLAMemory(self.vla)
        self._temperature, self._seed, self._batch_size = temperature, seed, batch_size
        if temperature > 0.0 and not isinstance(self.vla, TokenVLA):
            raise ConfigError(f"The VLA {vla!r} cannot sample tokens: leave out --temperature.")
        if temperature > 0.0 and self._vla_memory.is_stateful:
            raise ConfigError(
                f"The VLA {self.vla.name!r} has a state, and tokens are sampled without one: leave "
                "out --temperature."
            )
        self.chunk_len = check_chunk_len(chunk_len, self.vla)
        self.image_size = self.vla.image_size
        self.cameras = self.vla.cameras
        self.name = f"{self.vla.name}, {head} head" if head not in (None, "l1") else self.vla.name
        known = vla_identity(vla) if isinstance(vla, str | Path) else {"name": vla.name}
        self.identity: dict[str, Any] = {"kind": "vla", "vla": known, "head": self.vla.head}
        if temperature > 0.0:
            self.name += f" sampled at T={temperature:g}"
            self.identity |= {"temperature": temperature, "seed": seed}
        self._held_out = phrasing == "held-out"
        if self._held_out:
            self.name += ", held-out words"
            self.identity["phrasing"] = phrasing

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the VLA's chunks."""
        if self._held_out:
            infos = [{**i, "instruction": held_out_words(i["instruction"])} for i in infos]
        if self._temperature > 0.0:
            rows = [self._sample(observations, row, info) for row, info in enumerate(infos)]
            return np.stack(rows)
        return in_fixed_batches(self._infer, observations, infos, self._batch_size)

    def _infer(self, observations: dict[str, np.ndarray], infos: list[Info]) -> np.ndarray:
        images = {camera: observations[camera] for camera in self.cameras}
        vla, texts = in_episodes(self._vla_memory, infos), [info["instruction"] for info in infos]
        output = vla.infer(images, texts, observations["proprio"])
        return self._clipped(check_output(vla, output, len(texts)).actions)

    def _sample(self, observations: Observations, row: int, info: Info) -> np.ndarray:
        """Sample one chunk by a generator of its own, so that no other row matters."""
        import torch

        assert isinstance(self.vla, TokenVLA)
        key = np.random.SeedSequence(episode_key(self._seed, info))
        state = key.generate_state(1, np.uint64)[0]
        tokens, _ = self.vla.act_tokens(
            {camera: observations[camera][row : row + 1] for camera in self.cameras},
            [info["instruction"]],
            observations["proprio"][row : row + 1],
            temperature=self._temperature,
            generator=torch.Generator().manual_seed(int(state) & (2**63 - 1)),
        )
        return self._clipped(self.vla.tokens_to_actions(tokens))[0]

    def _clipped(self, actions: Any) -> np.ndarray:
        chunks = actions[:, : self.chunk_len].detach().float().cpu().numpy()
        return np.clip(chunks, -1.0, 1.0)


def held_out_words(instruction: str) -> str:
    """Return an instruction in the words that cloning left out.

    Raises:
        ConfigError: If there is no other way to say it.
    """
    ways = paraphrases(instruction, held_out=True)
    if not ways:
        raise ConfigError(f"No other words are known for {instruction!r}: leave out --phrasing.")
    return ways[0]


def load_vla(
    vla: str | Path | FrozenVLA,
    head: str | None = None,
    device: str = "cpu",
    *,
    allow_class: bool = True,
) -> FrozenVLA:
    """Return a VLA that acts with one of its heads; None: with its own first choice.

    Raises:
        ConfigError: If it is no VLA, or has no such head.
        WeightsError: If the checkpoint is missing or damaged.
    """
    from vla_gym.vla import as_vla

    model = as_vla(vla, device, allow_class=allow_class)
    if head in (None, model.head):
        return model
    if head not in model.heads:
        raise ConfigError(
            f"The VLA {str(getattr(vla, 'name', vla))!r} has no {head!r} head, but "
            f"{' and '.join(model.heads)}: choose another one."
        )
    # A copy, which shares the network: others may hold the loaded one.
    model = copy.copy(model)
    model.head = str(head)
    return model


def check_chunk_len(chunk_len: int | None, vla: FrozenVLA) -> int:
    """Return the executed rows of a chunk; the VLA's horizon for None.

    Raises:
        ConfigError: If they are not within 1..horizon.
    """
    if chunk_len is None:
        return vla.horizon
    if not 1 <= chunk_len <= vla.horizon:
        raise ConfigError(
            f"--chunk-len must be in 1..{vla.horizon} (the VLA's horizon), got {chunk_len}: give "
            "another one, or leave out the --protocol that asks for it."
        )
    return chunk_len


def vla_identity(spec: str | Path, suffix: str = "") -> dict[str, Any]:
    """Return name and digest of a checkpoint's files, and the options it is loaded with, if any.

    Args:
        spec: As :func:`vla_gym.vla.load` takes it; with ``suffix``, as ``resolve_weights`` does.
        suffix: Of a shipped checkpoint that belongs to the VLA.
    """
    from vla_gym.vla.files import resolve_weights
    from vla_gym.vla.registry import parse_spec

    options: dict[str, Any] = {}
    if suffix:
        path = resolve_weights(spec, suffix)
    else:
        parsed = parse_spec(spec)
        path, options = parsed.path, dict(parsed.options)
    if "adapters" in options:
        folder = Path(str(options["adapters"])).expanduser()
        options["adapters"] = _digest(sorted(folder.glob("adapter_*")))
    # starVLA keeps weights in checkpoints/, and what says how to use them one folder above.
    parent = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    folder, kinds = (path, _WEIGHTS) if path.is_dir() else (parent, ())
    beside = (*folder.iterdir(), *folder.glob("checkpoints/*"))
    named = {path} - {folder} | {file for file in beside if file.suffix in (*_SETTINGS, *kinds)}
    files = sorted(f for f in named if f.is_file() and not f.name.startswith(_OTHERS))
    found: dict[str, Any] = {"name": path.name, "sha256": _digest(files)}
    return found | {"options": options} if options else found


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
