"""The on-policy loop of an explorer, and of an explorer against its world model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym_trainers.explorer.config import AdversarialConfig, ExplorerConfig
from vla_gym_trainers.explorer.player import newest_parameters
from vla_gym_trainers.explorer.updates import WorldModelUpdates
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.loop import Loop
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.validation import PolicyPlayer
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.runs.torch_helpers import load_parameters
from vla_gym_trainers.world_model.behaviours import by_behaviour, cells_visited
from vla_gym_trainers.world_model.collect import collect
from vla_gym_trainers.world_model.config import WorldModelConfig
from vla_gym_trainers.world_model.data import Sequences
from vla_gym_trainers.world_model.memory import StepRecorder
from vla_gym_trainers.world_model.model import GRUWorldModel
from vla_gym_trainers.world_model.pictures import write_pictures
from vla_gym_trainers.world_model.protocol import load_world_model
from vla_gym_trainers.world_model.teacher import tokenised
from vla_gym_trainers.world_model.windows import check_length


class ExplorerLoop(Loop):
    """PPO whose films show what the world model predicts; see :class:`Loop`.

    Attributes:
        world_model: The world model.
    """

    config: ExplorerConfig

    def __init__(
        self, config: ExplorerConfig, run: Run, group: ProcessGroup, stack: ExitStack, **parts: Any
    ) -> None:
        """Begin, or go on from the run's checkpoint; see :class:`Loop`.

        Raises:
            ConfigError: If the world model is of a class of its own, which is not filmed.
        """
        super().__init__(config, run, group, stack, **parts)
        model = self.networks.world_model
        if not isinstance(model, GRUWorldModel):
            raise ConfigError(
                f"Expected a world model of 'vla-gym-train world-model', got "
                f"{type(model).__name__}: a class of your own gives rewards to ppo and grpo."
            )
        self.world_model = model

    def after_update(self, rollout: Rollout) -> dict[str, float]:
        """Return the state coverage: cells of the end effector, apart by task, for each chunk."""
        valid = rollout.data["valid"]
        positions = rollout.data["proprio"][valid][:, :3].numpy()
        cells = cells_visited(positions, np.asarray(rollout.data["task_id"][valid]))
        return {"rollout/coverage": cells / max(len(positions), 1)}

    def _film(self, path: Path) -> None:
        """Film an episode: the scene, what the wrist camera shows, what was predicted."""
        write_pictures(path, self.world_model, self.play({"explorer": 1}, self.config.tasks()[:1]))

    def play(self, counts: Mapping[str, int], task_ids: tuple[int, ...]) -> Sequences:
        """Return held-out episodes with tokens, as many a task by behaviour; the explorer draws."""
        config, chunk_len = self.config, self.networks.chunk_len
        episodes = WorldModelConfig(  # what is filmed and compared is played on this machine
            suites=(config.suite,),
            task_ids=task_ids,
            assets=config.assets,
            physics=config.physics,
            chunk_len=chunk_len,
            noise=0.0,
            num_envs=config.eval_envs,
            num_workers=1 if config.workers is None else config.workers,
            seed=config.seed,
            progress=False,
        )
        player = PolicyPlayer(self.policy.act, self.policy, chunk_len, config.seed)
        vla = self.world_model.vla
        data = collect(vla, episodes, dict(counts), held_out=True, explorer=player)
        data.tokens = tokenised(self.world_model, data)
        return data

    def results(self) -> dict[str, Any]:
        """Compare the explorer with random actions and the VLA, on the same layouts."""
        count = self.config.compare_episodes
        if not count:
            return {}
        counts = dict.fromkeys(("random", "vla", "explorer"), count)
        return self.compared(self.play(counts, self.config.tasks()))

    def compared(self, data: Sequences) -> dict[str, Any]:
        """Return what the world model makes of held-out episodes."""
        return {"behaviours": by_behaviour(self.world_model, data, paired=True)}


class AdversarialLoop(ExplorerLoop):
    """Cycles of a rollout, the explorer's update and the world model's; see :class:`ExplorerLoop`.

    Attributes:
        updates: The world model's part.
    """

    config: AdversarialConfig

    def __init__(
        self,
        config: AdversarialConfig,
        run: Run,
        group: ProcessGroup,
        stack: ExitStack,
        *,
        taught: Sequences | None = None,
        **parts: Any,
    ) -> None:
        """Begin with the explorer and the world model of the phases before, or go on.

        The world model is reminded of phase 1's training data, ``taught``, unless it is None.

        Raises:
            ConfigError: If there are several processes, windows are longer than episodes, or the
                explorer does not fit.
            WeightsError: If a checkpoint is damaged.
        """
        if group.size > 1:
            raise ConfigError("Phase 3 runs in one process: leave torchrun out.")
        super().__init__(config, run, group, stack, **parts)
        model, chunks = self.world_model, self._buffers[0].num_chunks
        if config.world_bptt_length > chunks:
            raise ConfigError(
                f"world_bptt_length must be at most {chunks}, the steps of the longest episode, "
                f"got {config.world_bptt_length}."
            )
        if taught is not None:
            check_length(taught, config.world_bptt_length)
            taught.tokens = tokenised(model, taught)
            taught = taught.without_frames()
        self.updates = WorldModelUpdates(model, config, taught)
        self._recorder = StepRecorder(model.chunk_len)
        self.train_envs.memory.recorder = self._recorder
        if run.checkpoint is not None:
            self.updates.restore(run.checkpoint)
        else:
            assert config.explorer is not None
            parameters = load_parameters(newest_parameters(config.explorer))
            for policy in filter(None, (self.policy, self.learner.reference)):
                policy.load_state_dict(parameters)

    def _is_over(self) -> bool:
        return super()._is_over() or self.progress.iteration >= self.config.total_iterations

    def after_update(self, rollout: Rollout) -> dict[str, float]:
        """Let the world model learn from what was played; return what that was like."""
        found = self.updates.cycle(self._recorder.pop(), self.progress.iteration)
        return {**super().after_update(rollout), **found}

    def write(self, folder: Path) -> None:
        """Write the files of a checkpoint, and model/ beside it."""
        super().write(folder)
        self.updates.save(folder)
        self.world_model.save_pretrained(self.run.dir.path / "model")

    def compared(self, data: Sequences) -> dict[str, Any]:
        """Return it for the model as it was before phase 3, too, on the same episodes."""
        assert self.config.teacher is not None
        before = load_world_model(self.config.teacher, self.config.device)
        found = by_behaviour(before, data, paired=True)
        return {**super().compared(data), "behaviours_before": found}
