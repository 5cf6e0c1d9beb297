"""The vector environment over parts on other machines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vla_gym.envs.checks import as_integer, check_flag, check_keywords
from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError
from vla_gym.remote.links import Wanted
from vla_gym.remote.part_env import PartEnv, VectorWrapper, build
from vla_gym.remote.pool import RemotePool
from vla_gym.remote.shards import Hosts
from vla_gym.suites import get_suite
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vector.batch import Arrays
from vla_gym.vector.plan import EnvPlan, check_limits, parse_autoreset_mode
from vla_gym.vector.processes.interrupts import Interrupts

# Arguments of a part that say nothing about its environments.
_OF_PARTS = ("workers", "render_devices")


class RemoteVectorEnv(LiberoVectorEnv):
    """``num_envs`` environments, a part of them on each of several machines.

    All that :class:`~vla_gym.vector.LiberoVectorEnv` promises holds: environment i plays what it
    plays on one machine, whatever the placement, in every autoreset mode, with ``send`` and
    ``recv``, groups, states, calls. To this class a machine is what a worker is to that one: if
    its part is lost, its environments that were stepping are truncated with ``worker_restarted``,
    and the part is placed again, on another machine if need be. Workers that fail within a part
    are replaced there, and reported in the same way.

    What was sent to a part together is best received together (``recv(env_ids=...)``): then one
    message comes back, and vector wrappers of the part see one batch. ``worker_of`` numbers parts.
    """

    def __init__(
        self,
        num_envs: int,
        suite: str | Sequence[str] | None = None,
        *,
        hosts: str | Hosts = "ray",
        vector_wrappers: Sequence[VectorWrapper] = (),
        gpu: bool = False,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        copy: bool = True,
        max_restarts: int = 5,
        step_timeout: float = 60.0,
        start_timeout: float = 300.0,
        **kwargs: Any,
    ) -> None:
        """Place the parts and build their environments.

        Args:
            num_envs: Number of environments N, on all machines.
            suite: See ``LiberoVectorEnv``.
            hosts: ``"ray"``: the machines of the Ray cluster that runs here, or of a new local
                one; ``"ray://host:port"``: those of that cluster. Or machines of your own kind.
            vector_wrappers: Applied to each part where it is, in this order: what they make is
                what travels. They must have ``recv`` and ``set_state``, as
                :class:`vla_gym.wrappers.vector.FrozenVLAObservation` has.
            gpu: Whether what a part runs needs a GPU; then only nodes that have one are used.
            autoreset_mode: As Gymnasium's.
            copy: False returns views, valid until the next but one step.
            max_restarts: Of a part, see ``LiberoVectorEnv``; and of each of its workers.
            step_timeout: Of the workers. A part that does not answer within this and
                ``start_timeout`` together counts as lost.
            start_timeout: A part must be placed and built within so many seconds; machines may
                join meanwhile.
            **kwargs: Further arguments of ``LiberoVectorEnv``: ``workers`` (a machine; None for
                one a core), ``render_devices`` (of each machine), ``task_ids``...

        Raises:
            ConfigError: If an argument is out of range, Ray is missing, there is no such cluster,
                or a machine has another version of this package or of the assets.
            WorkerError: If the environments can't be built.
        """
        limits = check_limits(max_restarts, step_timeout, start_timeout, copy)
        max_restarts, step_timeout, start_timeout = limits
        check_flag(gpu, "gpu")
        known = isinstance(vector_wrappers, list | tuple)
        if not known or not all(callable(wrapper) for wrapper in vector_wrappers):
            raise ConfigError(
                f"vector_wrappers must be a list of functions, got {vector_wrappers!r:.80}."
            )
        if "env_ids" in kwargs:
            raise ConfigError("env_ids is for one machine's part: leave it out with hosts.")
        if kwargs.get("env_factory") is None:
            check_keywords(kwargs, LiberoVectorEnv, LiberoEnv)
        planned = {k: v for k, v in kwargs.items() if k not in _OF_PARTS}
        self._plan = EnvPlan.make(num_envs, suite, **planned)
        self.autoreset_mode = parse_autoreset_mode(autoreset_mode)
        self._interrupts = Interrupts()
        assets: str | None = None
        if self._plan.scenes is not None:
            kwargs["assets"] = assets = str(self._plan.scenes["assets"])
        kwargs |= {
            "autoreset_mode": self.autoreset_mode.name,
            "max_restarts": max_restarts,
            "step_timeout": step_timeout,
            "start_timeout": start_timeout,
        }
        machines = _hosts(hosts, start_timeout, gpu)
        try:
            parts = min(self._plan.num_envs, machines.count(start_timeout))
            blocks = np.array_split(np.arange(self._plan.num_envs), parts)
            files = () if suite is None else getattr(get_suite(suite), "files", ())
            make = partial(PartEnv, num_envs, suite, copy=False, **kwargs)
            makers = [partial(make, env_ids=range(b[0], b[-1] + 1)) for b in blocks]
            builders = [partial(build, maker, tuple(vector_wrappers), files) for maker in makers]
        except BaseException:
            machines.close()
            raise
        self._pool = RemotePool(
            blocks,
            builders,
            machines,
            self._interrupts,
            assets=assets,
            step_timeout=step_timeout,
            start_timeout=start_timeout,
        )
        self._take_over(self._pool, max_restarts, copy)

    @property
    def places(self) -> tuple[str, ...]:
        """The machine of each part."""
        return self._pool.places

    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        *,
        env_ids: Sequence[int] | np.ndarray | None = None,
    ) -> Arrays:
        """See ``LiberoVectorEnv.recv``.

        With ``min_envs`` each part is asked for its share, and those that are done with it for
        more, so that none waits for a part that is slow.
        """
        if env_ids is not None:
            self._pool.wanted = Wanted(ids=frozenset(np.asarray(env_ids).reshape(-1).tolist()))
        elif min_envs is not None:
            count = as_integer(min_envs, "min_envs") - len(self._table.finished)
            self._pool.wanted = Wanted(count=count)
        try:
            return super().recv(min_envs, timeout, env_ids=env_ids)
        finally:
            self._pool.wanted = Wanted()


def _hosts(hosts: str | Hosts, timeout: float, gpu: bool) -> Hosts:
    if hasattr(hosts, "count") and hasattr(hosts, "close"):
        return hosts  # type: ignore[return-value]
    if not isinstance(hosts, str) or (hosts != "ray" and not hosts.startswith("ray://")):
        raise ConfigError(f"hosts must be 'ray' or 'ray://host:port', got {hosts!r:.80}.")
    from vla_gym.remote.ray_hosts import RayHosts

    return RayHosts(hosts, timeout, gpu=gpu)
