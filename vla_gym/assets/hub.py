"""Download LIBERO's assets from a Hugging Face hub: only on request, resumable, checked."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from vla_gym.assets.install import exclusive, libero_folder, put_in_place
from vla_gym.assets.manifest import (
    libero_files,
    missing_files,
    optional_files,
    present_files,
    shorten,
)
from vla_gym.errors import AssetError

REPO_VARIABLE = "VLA_GYM_ASSETS_REPO"
#: The dataset that LeRobot's LIBERO environment downloads, at its commit of 2026-08.
HUB_REPO = "lerobot/libero-assets@0b3ea86be5fe169d0fd036ae63d1070ec09e90f6"
#: Size of that whole repository in bytes; the tasks load a part of it.
HUB_REPO_SIZE = 422_320_936
_SPARE_BYTES = 100_000_000


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


def download(repo: str | None = None, *, endpoint: str | None = None) -> Path:
    """Download the assets into the cache folder and make them the ``libero`` pack.

    What is there already is kept in ``libero-assets.partial`` if something fails, so the next
    attempt fetches only the rest. Mirrors, proxies, tokens and the offline mode are those of
    huggingface_hub.

    Args:
        repo: See :func:`hub_repo`.
        endpoint: The hub's address; default: ``HF_ENDPOINT``, else huggingface.co.

    Returns:
        The pack's folder.

    Raises:
        AssetError: If the hub cannot be reached, lacks files, or sent wrong ones; if another
            process is at it; if the disk is full or the cache folder cannot be written.
    """
    from huggingface_hub import HfApi

    name, revision = hub_repo(repo)
    wanted = [*libero_files(), *optional_files()]
    with exclusive() as parent:
        partial = parent / f"{libero_folder().name}.partial"
        api = HfApi(endpoint=endpoint)
        try:
            commit = str(api.dataset_info(name, revision=revision, timeout=15.0).sha)
            _check_space(parent)
            api.snapshot_download(
                name,
                repo_type="dataset",
                revision=commit,
                allow_patterns=wanted,
                local_dir=partial,
            )
            entries = api.list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
            tree = {entry.path: entry for entry in entries}
        except AssetError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename:
                raise  # the disk, not the network
            raise AssetError(_failure(error, name, revision)) from error
        if missing := missing_files(partial):
            raise AssetError(
                f"The hub repository {name} at {commit} lacks {len(missing)} of the "
                f"{len(libero_files())} files that LIBERO's tasks load ({shorten(missing)}): "
                f"is it LIBERO's assets? The usual one is {HUB_REPO}."
            )
        if wrong := [path for path in present_files(partial) if not _is_right(partial, tree, path)]:
            for path in wrong:
                (partial / path).unlink()
            raise AssetError(
                f"{len(wrong)} files from {api.endpoint} do not have the checksums that the hub "
                f"states ({shorten(wrong)}). They were deleted: run the command again. If that "
                "does not help, a proxy or mirror changes them."
            )
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        source = f"{api.endpoint}/datasets/{name}"
        return put_in_place(partial, {"source": source, "commit": commit})


def _is_right(folder: Path, tree: dict[str, Any], path: str) -> bool:
    """Tell whether a file has the checksum that the hub states: of git, or SHA-256 if large."""
    entry, data = tree[path], (folder / path).read_bytes()
    if entry.lfs is not None:
        return bool(hashlib.sha256(data).hexdigest() == entry.lfs.sha256)
    blob = b"blob %d\0" % len(data) + data
    return bool(hashlib.sha1(blob, usedforsecurity=False).hexdigest() == entry.blob_id)


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _SPARE_BYTES:
        raise AssetError(
            f"{folder} has {free / 1e6:.0f} MB free: make room or point the environment variable "
            "VLA_GYM_CACHE elsewhere."
        )


def _failure(error: Exception, repo: str, revision: str) -> str:
    """Return one line about whatever the hub library raised that says what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
        return (
            f"The hub at {constants.ENDPOINT} has no dataset {repo} at {revision}: check --repo "
            f"and {REPO_VARIABLE}. The usual one is {HUB_REPO}."
        )
    reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    advice = "Check the network (a proxy goes into HTTPS_PROXY) and run the command again."
    if constants.HF_HUB_OFFLINE:
        advice = "HF_HUB_OFFLINE is set: unset it."
    return (
        f"Downloading LIBERO's assets ({repo}) from the hub failed: {type(error).__name__}: "
        f"{reason}. What is there already is kept. {advice} Or set HF_ENDPOINT to a mirror, or "
        "take the assets from a LIBERO checkout: vla-gym assets download --from-dir LIBERO (or "
        "--from-tar FILE)."
    )
