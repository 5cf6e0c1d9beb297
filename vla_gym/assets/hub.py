"""Download LIBERO's assets from a Hugging Face hub: only on request, resumable."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from vla_gym.assets.cache import cache_dir
from vla_gym.assets.install import libero_folder, put_in_place, writing
from vla_gym.assets.manifest import libero_files, missing_files, optional_files, shorten
from vla_gym.errors import AssetError

REPO_VARIABLE = "VLA_GYM_ASSETS_REPO"
#: The dataset that LeRobot's LIBERO environment downloads, at its commit of 2026-08.
HUB_REPO = "lerobot/libero-assets@0b3ea86be5fe169d0fd036ae63d1070ec09e90f6"
#: Size of that whole repository in bytes; the tasks load a part of it.
HUB_REPO_SIZE = 422_320_936


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
        AssetError: If the download fails, files are missing there, or the cache folder cannot be
            written.
    """
    from huggingface_hub import HfApi

    name, revision = hub_repo(repo)
    api = HfApi(endpoint=endpoint)
    partial = cache_dir() / f"{libero_folder().name}.partial"
    with writing():
        partial.mkdir(parents=True, exist_ok=True)
        try:
            # Asked first: a download goes on trying for long where there is no network at all.
            commit = str(api.dataset_info(name, revision=revision, timeout=15.0).sha)
            api.snapshot_download(
                name,
                repo_type="dataset",
                revision=commit,
                allow_patterns=[*libero_files(), *optional_files()],
                local_dir=partial,
            )
        except Exception as error:  # a hub, a proxy and a disk may fail in many ways
            reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            raise AssetError(
                f"Downloading LIBERO's assets ({name}@{revision}) from {api.endpoint} failed: "
                f"{type(error).__name__}: {reason}. What is there already is kept. Check the "
                "network (HTTPS_PROXY, HF_HUB_OFFLINE, HF_ENDPOINT for a mirror) and run the "
                "command again, or take the assets from a LIBERO checkout: vla-gym assets "
                "download --from-dir LIBERO."
            ) from error
        if missing := missing_files(partial):
            raise AssetError(
                f"The hub repository {name} lacks {len(missing)} of the {len(libero_files())} "
                f"files that LIBERO's tasks load ({shorten(missing)}): is it LIBERO's assets? The "
                f"usual one is {HUB_REPO}."
            )
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        return put_in_place(partial, f"{api.endpoint}/datasets/{name}@{commit}")
