"""Download LIBERO's assets from a Hugging Face hub: only on request, resumable, checked.

Files go into ``libero-assets.partial`` in the cache folder and stay there if something fails, so
the next attempt fetches only what is missing. Sizes and checksums are the hub's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.assets.install import exclusive, libero_folder, put_in_place
from vla_gym.assets.manifest import libero_files, optional_files, shorten
from vla_gym.errors import AssetError, VlaGymError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPO_VARIABLE = "VLA_GYM_ASSETS_REPO"
#: The dataset that LeRobot's LIBERO environment downloads, at its commit of 2026-08.
HUB_REPO = "lerobot/libero-assets@0b3ea86be5fe169d0fd036ae63d1070ec09e90f6"
#: Size of that whole repository in bytes; the tasks load a part of it.
HUB_REPO_SIZE = 422_320_936

WORKERS = 8
_TIMEOUT_S = 15.0
_SPARE_BYTES = 100_000_000
_OTHER_WAYS = (
    "Or set HF_ENDPOINT to a mirror, or take the assets from a LIBERO checkout: "
    "vla-gym assets download --from-dir LIBERO (or --from-tar FILE)."
)


@dataclass(frozen=True)
class HubFile:
    """A file on the hub.

    Attributes:
        name: Path in the repository.
        size: Size in bytes.
        sha256: Its SHA-256 if the hub keeps it as a large file, else None.
        blob_id: Git's name of its content, or of the pointer of a large file.
    """

    name: str
    size: int
    sha256: str | None
    blob_id: str

    def matches(self, path: Path) -> bool:
        """Tell whether a local file has this size and checksum."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        data = path.read_bytes()
        if self.sha256 is not None:
            return hashlib.sha256(data).hexdigest() == self.sha256
        header = f"blob {len(data)}\0".encode()
        return hashlib.sha1(header + data, usedforsecurity=False).hexdigest() == self.blob_id


def hub_repo(repo: str | None = None) -> tuple[str, str]:
    """Return repository and revision to download from.

    Args:
        repo: ``"owner/name"`` or ``"owner/name@revision"``; default: the environment variable
            ``VLA_GYM_ASSETS_REPO``, else :data:`HUB_REPO`. Without a revision it is ``main``.

    Raises:
        AssetError: If it is not of that form.
    """
    text = repo or os.environ.get(REPO_VARIABLE) or HUB_REPO
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@(\S+))?", text)
    if match is None:
        raise AssetError(
            f"Hub repository: expected 'owner/name' or 'owner/name@revision', got {text!r}."
        )
    return match[1], match[2] or "main"


def download(
    repo: str | None = None, *, endpoint: str | None = None, progress: bool = True
) -> Path:
    """Download the assets into the cache folder and make them the ``libero`` pack.

    Args:
        repo: See :func:`hub_repo`.
        endpoint: The hub's address; default: ``HF_ENDPOINT``, else huggingface.co.
        progress: Show a progress bar.

    Returns:
        The pack's folder.

    Raises:
        AssetError: If the hub cannot be reached, lacks files, or sent wrong ones; if another
            process is at it; if the disk is full or the cache folder cannot be written.
    """
    name, revision = hub_repo(repo)
    with exclusive() as parent:
        partial = parent / f"{libero_folder().name}.partial"
        with _hub_errors(name, revision, partial):
            from huggingface_hub import HfApi

            api = HfApi(endpoint=endpoint)
            commit, files = list_files(api, name, revision)
            todo = [file for file in files if not file.matches(partial / file.name)]
            _check_space(parent, sum(file.size for file in todo))
            _fetch(api, name, commit, todo, files, partial, progress)
        wrong = [file.name for file in files if not file.matches(partial / file.name)]
        for bad in wrong:
            (partial / bad).unlink(missing_ok=True)
        if wrong:
            raise AssetError(
                f"{len(wrong)} files from {api.endpoint} do not have the checksums that the hub "
                f"states ({shorten(wrong)}). They were deleted: run the command again. If that "
                "does not help, a proxy or mirror changes them."
            )
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        return put_in_place(
            partial, {"source": f"{api.endpoint}/datasets/{name}", "commit": commit}
        )


def list_files(api: HfApi, name: str, revision: str) -> tuple[str, list[HubFile]]:
    """Return the commit of a revision and the files there that the tasks load.

    Raises:
        AssetError: If the repository lacks some of them.
    """
    # Unlike the calls after it, this one is not repeated: without a network it fails at once.
    revision = str(api.dataset_info(name, revision=revision, timeout=_TIMEOUT_S).sha)
    tree = api.list_repo_tree(name, recursive=True, revision=revision, repo_type="dataset")
    found: dict[str, HubFile] = {}
    for entry in tree:
        if (size := getattr(entry, "size", None)) is not None:  # a folder has none
            lfs: Any = getattr(entry, "lfs", None)
            sha256 = lfs.sha256 if lfs else None
            found[entry.path] = HubFile(
                entry.path, size, sha256, str(getattr(entry, "blob_id", ""))
            )
    missing = [path for path in libero_files() if path not in found]
    if missing:
        raise AssetError(
            f"The hub repository {name} at {revision} lacks {len(missing)} of the "
            f"{len(libero_files())} files that LIBERO's tasks load ({shorten(missing)}): "
            f"is it LIBERO's assets? The usual one is {HUB_REPO}."
        )
    wanted = [*libero_files(), *(path for path in optional_files() if path in found)]
    return revision, [found[path] for path in wanted]


def _fetch(
    api: HfApi,
    repo: str,
    commit: str,
    todo: list[HubFile],
    files: list[HubFile],
    partial: Path,
    progress: bool,
) -> None:
    """Download files in parallel; the first failure stops the rest."""
    from huggingface_hub import hf_hub_download
    from tqdm import tqdm

    total, left = sum(file.size for file in files), sum(file.size for file in todo)
    bar = tqdm(
        desc=f"LIBERO assets, {len(files)} files",
        total=total,
        initial=total - left,
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar, _quiet_hub(), ThreadPoolExecutor(WORKERS) as pool:
        futures = {
            pool.submit(
                hf_hub_download,
                repo,
                file.name,
                repo_type="dataset",
                revision=commit,
                local_dir=partial,
                endpoint=api.endpoint,
                # A file that is there but does not match was changed behind the hub's back.
                force_download=(partial / file.name).exists(),
            ): file
            for file in todo
        }
        try:
            for future in as_completed(futures):
                future.result()
                bar.update(futures[future].size)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Hide the hub library's own bar for every file and its remarks about retries."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    verbosity = logging.get_verbosity()
    hidden = are_progress_bars_disabled()
    logging.set_verbosity_error()
    if not hidden:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if not hidden:
            enable_progress_bars()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE_BYTES:
        raise AssetError(
            f"{folder} has {free / 1e6:.0f} MB free, but {needed / 1e6:.0f} MB are to be "
            "downloaded: make room or point the environment variable VLA_GYM_CACHE elsewhere."
        )


@contextlib.contextmanager
def _hub_errors(repo: str, revision: str, partial: Path) -> Iterator[None]:
    """Turn whatever the hub library raises into one AssetError that says what to do."""
    try:
        yield
    except VlaGymError:
        raise
    except Exception as error:
        from huggingface_hub import constants, errors

        if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
            raise AssetError(
                f"The hub at {constants.ENDPOINT} has no dataset {repo} at {revision}: check "
                f"--repo and {REPO_VARIABLE}. The usual one is {HUB_REPO}."
            ) from error
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise  # the disk, not the network
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        cause = error.__cause__
        if isinstance(error, errors.LocalEntryNotFoundError) and cause is not None:
            reason = f"{type(cause).__name__}: {cause}"
        done = sum(1 for name in libero_files() if (partial / name).is_file())
        kept = (
            f" {done} of {len(libero_files())} files are there already and are kept."
            if done
            else ""
        )
        offline = (
            "HF_HUB_OFFLINE is set: unset it."
            if constants.HF_HUB_OFFLINE
            else "Check the network (a proxy goes into HTTPS_PROXY) and run the command again."
        )
        raise AssetError(
            f"Downloading LIBERO's assets ({repo}) from the hub failed: "
            f"{type(error).__name__}: {reason.rstrip('.')}.{kept} {offline} {_OTHER_WAYS}"
        ) from error
