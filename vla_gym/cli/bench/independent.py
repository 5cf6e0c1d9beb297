"""Independent processes with one environment each, for comparison with as many workers."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vla_gym.cli.bench.drivers import Driver, in_chunks, make_single
from vla_gym.cli.bench.spec import CALL_DEADLINE_S, Contender


class IndependentDriver(Driver):
    """``num_envs`` processes that play a single environment each and wait for nobody.

    They are children of one process, as workers are: where the kernel shares the processor among
    sessions first (autogroup), processes with sessions of their own would get more than workers.
    """

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        context = multiprocessing.get_context("spawn")
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        for index in range(contender.num_envs):
            link, far_end = context.Pipe()
            process = context.Process(target=_serve, args=(far_end, contender, index), daemon=True)
            process.start()
            far_end.close()
            self._links.append(link)
            self._processes.append(process)
        self._receive_all()

    def _ask(self, name: str, arguments: list[Any]) -> list[Any]:
        for link, argument in zip(self._links, arguments, strict=True):
            link.send((name, argument))
        return self._receive_all()

    def _receive_all(self) -> list[Any]:
        results = []
        for link in self._links:
            if not link.poll(CALL_DEADLINE_S):
                raise TimeoutError("An independent process gives no answer.")
            error, result = link.recv()
            if error is not None:
                raise error
            results.append(result)
        return results

    def reset(self, init_state_id: int, states: np.ndarray | None) -> dict[str, float]:  # noqa: ARG002
        """See :class:`Driver`."""
        return {"settled_s": max(self._ask("reset", [init_state_id] * len(self._links)))}

    def reset_one(self, init_state_id: int, states: np.ndarray | None) -> float:
        """See :class:`Driver`; the others are reset as well."""
        return self.reset(init_state_id, states)["settled_s"]

    def play(self, actions: np.ndarray) -> dict[str, Any]:
        """See :class:`Driver`; ``seconds`` is what the steps take at the sum of the rates."""
        chunks = in_chunks(actions, self.contender.env.chunk_len)
        results = self._ask("play", [chunks[:, i] for i in range(chunks.shape[1])])
        steps = sum(result["steps"] for result in results)
        rate = sum(result["steps"] / result["seconds"] for result in results)
        ended = sum(result["ended"] for result in results)
        calls = chunks.shape[0] * chunks.shape[1]
        return {"seconds": steps / rate, "steps": steps, "calls": calls, "ended": ended}

    def worker_pids(self) -> list[int]:
        """See :class:`Driver`."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """See :class:`Driver`."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(10)


def _serve(link: Connection, contender: Contender, index: int) -> None:
    """Build a single environment and play it as asked; ends with its input."""
    try:
        env = make_single(contender.env, index)
        env.reset(seed=contender.seed + index)
        link.send((None, None))
        while True:
            name, argument = link.recv()
            begin = time.perf_counter()
            if name == "reset":
                env.reset(options={"init_state_id": argument})
                link.send((None, time.perf_counter() - begin))
            else:
                steps = ended = 0
                for chunk in argument:
                    _, _, terminated, truncated, info = env.step(chunk)
                    steps += info["executed_steps"]
                    ended += int(terminated or truncated)
                seconds = time.perf_counter() - begin
                link.send((None, {"seconds": seconds, "steps": steps, "ended": ended}))
    except EOFError:
        env.close()
    except Exception as error:
        # A VlaGymError arrives as itself; others with the traceback of this process.
        error.add_note(traceback.format_exc())
        link.send((error, None))
