"""Which task and which layout an environment plays next: a function of seed and episode alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from vla_gym.envs.checks import MAX_ENVS, MAX_SEED, as_integer, as_number, check_choice
from vla_gym.errors import ConfigError

TaskSampling = Literal["uniform", "round_robin", "balanced"]

# Sets the generator of a block's order apart from those of episodes: no episode number is as large.
_BLOCK_TAG = 0xB10C5EED
# The same for the stream that draws by weights.
_WEIGHTS_TAG = 0x3E164725


class TaskSchedule:
    """The order in which environment number ``env_index`` of a vector env plays its tasks.

    Nothing but (seed, episode number), and weights that somebody sets, decides what comes next: not
    when other environments finished, nor which process runs them. Environment i of a vector env
    that is seeded with ``base`` has the seed ``base + i``, so a single environment with that seed,
    ``env_index=i`` and the same ``group_size`` plays the same episodes.

    ``env_index // group_size`` is the group; consecutive environments of a group play the same task
    and the same layout in each episode.

    sampling:
        ``"uniform"`` draws an entry of the list independently in each episode;
        ``"round_robin"`` plays the list in its order, each group one entry further;
        ``"balanced"`` does so in a new random order for each block of ``len(task_ids)`` episodes.
        With the last two, an environment plays each entry once in a block of ``len(task_ids)``
        episodes, and at any episode number the counts of the entries over all groups differ by at
        most one. Layouts do not depend on the sampling, nor on weights.

    Attributes:
        task_ids: The entries. A repeated id counts as often as it is listed.
        sampling: See above.
        env_index: Number of the environment, from 0.
        group_size: Environments a group, at least 1.
        weights: How often entries are drawn, by task id; see :meth:`set_weights`.
    """

    def __init__(
        self,
        task_ids: Sequence[int],
        sampling: TaskSampling = "uniform",
        env_index: int = 0,
        group_size: int = 1,
    ) -> None:
        """Check the arguments.

        Raises:
            ConfigError: If the list is empty, or another argument is out of range.
        """
        check_choice(sampling, "task_sampling", get_args(TaskSampling))
        self.task_ids = tuple(as_integer(task_id, "task_id", 0) for task_id in task_ids)
        if not self.task_ids:
            raise ConfigError("number of task_ids must be at least 1, got 0.")
        self.sampling: TaskSampling = sampling
        self.env_index = as_integer(env_index, "env_index", 0)
        self.group_size = as_integer(group_size, "group_size", 1)
        self.weights: dict[int, float] = {}

    @property
    def min_seed(self) -> int:
        """Smallest seed that environment ``env_index`` may have: its base seed is not negative."""
        return self._min_seed(self.env_index)

    def _min_seed(self, index: int) -> int:
        return index if self.sampling == "balanced" else index % self.group_size

    def check(self, seed: int, episode: int, env_index: int | None = None) -> tuple[int, int, int]:
        """Return arguments of :meth:`task_and_rng` as ``int``, if there is such an episode.

        Raises:
            ConfigError: If a number is negative or not an integer, or the seed is smaller than
                :attr:`min_seed` of that environment.
        """
        seed = as_integer(seed, "seed", 0, MAX_SEED + MAX_ENVS)
        episode = as_integer(episode, "episode", 0)
        index = self.env_index if env_index is None else as_integer(env_index, "env_index", 0)
        if seed < self._min_seed(index):
            raise ConfigError(
                f"Environment {index} of a vector env has the seed base + {index}; expected at "
                f"least {self._min_seed(index)}, got {seed}."
            )
        return seed, episode, index

    def task_and_rng(
        self, seed: int, episode: int, env_index: int | None = None
    ) -> tuple[int, int, np.random.Generator]:
        """Return what an episode begins with.

        Args:
            seed: The environment's own seed (base seed + env_index), see :meth:`check`.
            episode: Number of the episode since that seed was set, from 0.
            env_index: Number of the environment, if it is another one of the vector env.

        Returns:
            The task's id; the seed that all of the group share, by which layouts are drawn (the
            environment's own with ``group_size=1``); and the generator that draws the layout.
        """
        index = self.env_index if env_index is None else env_index
        key_seed = seed - index % self.group_size
        rng = np.random.default_rng([key_seed, episode])
        # Drawn in every mode, so that the layouts that follow are the same in all of them.
        drawn = int(rng.integers(len(self.task_ids)))
        if self.weights:
            drawn = self._weighted(key_seed, episode)
        return self.task_ids[self._entry(drawn, seed, episode, index)], key_seed, rng

    def _entry(self, drawn: int, seed: int, episode: int, index: int) -> int:
        count = len(self.task_ids)
        if self.sampling == "uniform":
            return drawn
        block, turn = divmod(episode, count)
        place = (index // self.group_size + turn) % count
        if self.sampling == "round_robin":
            return place
        order = np.random.default_rng([seed - index, _BLOCK_TAG, block])
        return int(order.permutation(count)[place])

    def _weighted(self, key_seed: int, episode: int) -> int:
        sizes = np.array([self.weights.get(task_id, 1.0) for task_id in self.task_ids])
        rng = np.random.default_rng([key_seed, episode, _WEIGHTS_TAG])
        return int(rng.choice(len(sizes), p=sizes / sizes.sum()))

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Draw the episodes that follow by these weights.

        Args:
            weights: By task id, in [0, 1e9]; a task that is not named has 1. Empty: none.

        Raises:
            ConfigError: If tasks are not drawn (``sampling``), or these are no weights by task id,
                one is out of range, or all are 0; nothing has changed then.
        """
        if self.sampling != "uniform":
            raise ConfigError(
                "Weights say how tasks are drawn, and environments with task_sampling "
                f"{self.sampling!r} draw none: make them with 'uniform'."
            )
        if not isinstance(weights, Mapping):
            raise ConfigError(f"Expected weights by task id, {{3: 0.5}}, got {weights!r:.80}.")
        checked = {
            as_integer(task_id, "task_id", 0): as_number(weight, "a task's weight", 0, 1e9)
            for task_id, weight in weights.items()
        }
        if not any(checked.get(task_id, 1.0) for task_id in self.task_ids):
            raise ConfigError(
                f"The weights of tasks {self.task_ids} must not all be 0: give one of them a "
                "weight above 0."
            )
        self.weights = checked
