"""Tasks of one's own: BDDL files that a user has written, as one more suite.

Files are read once. A suite is named after its content, which is kept in the cache under that name:
workers, saved states and later commands find by name what was read, whatever becomes of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from vla_gym.assets import cache_dir
from vla_gym.assets.cache import make_shared
from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym.files import replacing
from vla_gym.outside import check_path, read_bytes, read_json
from vla_gym.suites.libero.bddl import parse_problem
from vla_gym.suites.libero.bddl_checks import check_problem
from vla_gym.suites.libero.suite import LiberoSuite
from vla_gym.suites.libero.tasks import LiberoTask
from vla_gym.suites.registry import OWN_PREFIX

#: A BDDL file, a folder of them, or several of both.
BddlPath = str | Path | Sequence[str | Path]
#: Step limit in control steps: the longest of LIBERO's.
MAX_CONTROL_STEPS = 520
#: Bounds of what is read; LIBERO's own files have up to 9,000 bytes.
MAX_BYTES, MAX_FILES = 2**18, 1000


class BddlSuite(LiberoSuite):
    """The tasks of some BDDL files; they have no official initial states."""

    num_init_states = 0

    def __init__(self, files: Sequence[tuple[str, str]]) -> None:
        """Check the files: name without ``.bddl``, and content, of each, in the order of the ids.

        Raises:
            ConfigError: If one is not what LIBERO can build.
        """
        super().__init__(OWN_PREFIX + _digest(json.dumps(files))[:16])
        self._tasks = tuple(_task(self.name, i, *file) for i, file in enumerate(files))

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """Name and content of each file."""
        return tuple((task.name, task.bddl) for task in self._tasks)

    def keep(self) -> None:
        """Write the files into the cache, where :func:`stored_suite` finds them by name.

        Raises:
            ConfigError: If the cache cannot be written.
        """
        folder, text = cache_dir() / "bddl", json.dumps(self.files).encode()
        path = folder / f"{self.name}.json"
        try:
            if path.is_file() and path.read_bytes() == text:
                return  # perhaps another user's, who alone may replace it
            make_shared(folder)
            with replacing(path) as scratch:
                scratch.write_bytes(text)
        except OSError as error:
            raise ConfigError(
                f"The cache {folder} cannot be written ({error}): set VLA_GYM_CACHE to a writable "
                "folder."
            ) from error

    @property
    def tasks(self) -> tuple[LiberoTask, ...]:
        """The tasks in the order of the files."""
        return self._tasks


def choose_suite(
    suite: str | Sequence[str] | None, bddl_path: BddlPath | None
) -> str | Sequence[str]:
    """Return the suite that one of two options asks for.

    Args:
        suite: See :func:`~vla_gym.suites.get_suite`.
        bddl_path: BDDL files of a user's own, see :func:`own_suite`.

    Raises:
        ConfigError: If none or both are given, or there is something wrong with the files.
    """
    if bddl_path is None:
        if suite is None:
            raise ConfigError("Give suite='goal', say, or bddl_path='my_task.bddl'.")
        return suite
    if suite is not None:
        raise ConfigError(
            f"suite={suite!r} and bddl_path={bddl_path!r:.200} contradict each other: give one "
            "of them. bddl_path is for the ids Libero-v0 and LiberoVLA-v0."
        )
    return own_suite(bddl_path).name


def own_suite(bddl_path: BddlPath) -> BddlSuite:
    """Read BDDL files, check them and keep their content in the cache.

    Args:
        bddl_path: A file, a folder whose ``*.bddl`` files are taken in the order of their names,
            or several of both.

    Raises:
        ConfigError: If a path leads to no BDDL file, one is not what LIBERO can build, or the cache
            cannot be written.
    """
    paths = [bddl_path] if isinstance(bddl_path, str | Path) else bddl_path
    if not isinstance(paths, Sequence) or not all(isinstance(p, str | Path) for p in paths):
        raise ConfigError(
            f"bddl_path must be a path, or a list of paths, of BDDL files, got {bddl_path!r:.200}."
        )
    files = [file for path in paths for file in _bddl_files(Path(path))]
    if not 1 <= len(files) <= MAX_FILES:
        raise ConfigError(f"bddl_path names {len(files)} files, expected 1..{MAX_FILES}.")
    suite = BddlSuite([(file.stem, _content(file)) for file in files])
    suite.keep()
    return suite


def stored_suite(name: str) -> BddlSuite:
    """Return the suite of that name, from the cache.

    Raises:
        UnknownTaskError: If the cache does not have it, or the file is damaged.
    """
    path = cache_dir() / "bddl" / f"{name}.json"
    advice = f"The suite {name!r} was made of BDDL files: give them again with bddl_path."
    suite = BddlSuite(read_json(path, list[tuple[str, str]], UnknownTaskError, advice))
    if suite.name != name:
        raise UnknownTaskError(f"{path} is damaged. {advice}")
    return suite


def _bddl_files(path: Path) -> list[Path]:
    check_path(path)
    path = Path(os.path.expanduser(path))
    if not os.path.isdir(path):
        return [path]
    files = sorted(path.glob("*.bddl"))
    if not files:
        raise ConfigError(f"{path} is a folder without *.bddl files: expected some, or a file.")
    return files


def _content(path: Path) -> str:
    data = read_bytes(path, ConfigError, "Expected a BDDL file.")
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path} has {len(data)} bytes: expected a BDDL file of at most {MAX_BYTES}."
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error}): expected BDDL.") from error


def _task(suite: str, task_id: int, name: str, text: str) -> LiberoTask:
    try:
        problem = parse_problem(text)
        check_problem(problem)
    except KeyError as error:
        raise ConfigError(f"{name}.bddl has no section {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{name}.bddl: {error}") from error
    except (IndexError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{name}.bddl is no BDDL of LIBERO's kind: expected (define (problem ...) ...) with "
            "the sections of LIBERO's own files."
        ) from error
    # What tasks of one compiled scene must have in common.
    moved = sorted(args[0] for predicate, *args in problem.init if predicate in ("on", "in"))
    scene = (problem.scene, [name for name, _ in problem.fixtures if name in moved])
    scene_name = OWN_PREFIX + _digest(repr(scene))[:16]
    limit = MAX_CONTROL_STEPS
    return LiberoTask(suite, task_id, name, problem.language, limit, scene_name, text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
