"""The real pack: found, checked, installed from folders; `auto` and its one warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from vla_gym.assets import pack as pack_module
from vla_gym.assets import resolve_asset_pack
from vla_gym.assets.command import status
from vla_gym.assets.install import install_from_dir, libero_folder, verify_pack
from vla_gym.assets.lite.generate import GENERATORS
from vla_gym.assets.manifest import best_root, libero_files, optional_files
from vla_gym.cli import main as cli
from vla_gym.errors import AssetError, AssetWarning
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model

ROOT = Path(__file__).resolve().parents[2]
MESH = "stable_scanned_objects/plate/visual/model_vis.msh"
COUNT = len(libero_files())


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLA_GYM_LIBERO_ASSETS", raising=False)
    monkeypatch.setattr(pack_module, "_warned", pack_module.threading.Event())
    return tmp_path / "cache"


def fake_assets(folder: Path) -> Path:
    for name in libero_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("<mujoco/>")
    return folder


# --- finding --------------------------------------------------------------------------------------


def test_manifest_names_what_the_lite_pack_imitates():
    assert MESH in libero_files()
    assert set(GENERATORS) <= set(libero_files())
    assert all((sha is not None) == name.endswith(".xml") for name, sha in libero_files().items())
    assert not set(optional_files()) & set(libero_files())


def test_incomplete_folder(own_cache, tmp_path):
    root = fake_assets(tmp_path / "assets")
    (root / MESH).unlink()
    with pytest.raises(AssetError, match=rf"lacks 1 of {COUNT} files \({MESH}\)"):
        resolve_asset_pack(root)


def test_checkout_is_found_and_digest_follows_its_files(own_cache, tmp_path, monkeypatch):
    root = fake_assets(tmp_path / "LIBERO" / "libero" / "libero" / "assets")
    monkeypatch.setenv("VLA_GYM_LIBERO_ASSETS", str(tmp_path / "LIBERO"))
    pack = resolve_asset_pack("libero")
    assert (pack.name, pack.root) == ("libero", root)
    assert resolve_asset_pack(tmp_path / "LIBERO") == pack
    (root / "stable_hope_objects" / "unused.obj").write_text("no task loads it")
    assert resolve_asset_pack("libero") == pack
    digests = {pack.digest}
    (root / "articulated_objects/flat_stove.xml").write_text("<mujoco />")
    digests.add(resolve_asset_pack("libero").digest)
    (root / MESH).write_text("another size")
    digests.add(resolve_asset_pack("libero").digest)
    (root / optional_files()[0]).write_text("a texture more")
    digests.add(resolve_asset_pack("libero").digest)
    assert len(digests) == 4


def test_auto_takes_lite_with_one_warning(own_cache, tmp_path):
    with pytest.warns(AssetWarning, match=r"lite pack.*vla-gym assets download \(at most 422 MB\)"):
        assert resolve_asset_pack("auto").name == "lite"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_asset_pack("auto") == resolve_asset_pack("lite")
        install_from_dir(fake_assets(tmp_path / "assets"))
        assert resolve_asset_pack("auto") == resolve_asset_pack("libero")
    assert not list(own_cache.glob("*.partial")), "something was downloaded"


def test_auto_says_why_a_configured_folder_is_not_used(own_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GYM_LIBERO_ASSETS", str(tmp_path / "typo"))
    with pytest.warns(AssetWarning, match="VLA_GYM_LIBERO_ASSETS=.*typo does not exist"):
        resolve_asset_pack("auto")


# --- installing -----------------------------------------------------------------------------------


def test_from_dir(own_cache, tmp_path):
    source = fake_assets(tmp_path / "LIBERO" / "libero" / "libero" / "assets")
    (source / "unused.obj").write_text("")
    root = install_from_dir(tmp_path / "LIBERO")
    assert root == libero_folder() and not (root / "unused.obj").exists()
    assert resolve_asset_pack("libero").digest == resolve_asset_pack(source).digest
    assert (root.stat().st_mode & 0o777) == 0o755
    (root / MESH).write_text("damaged")
    assert verify_pack(root)[0] == [f"1 files have changed: {MESH}"]
    install_from_dir(source)  # replaces it
    assert verify_pack(root)[0] == []
    assert [p.name for p in own_cache.iterdir()] == ["libero-assets"]


def test_bad_sources_leave_nothing(own_cache, tmp_path):
    source = fake_assets(tmp_path / "assets")
    (source / MESH).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0")
    with pytest.raises(AssetError, match="git-LFS pointers.*git lfs pull"):
        install_from_dir(source)
    (source / MESH).unlink()
    with pytest.raises(AssetError, match=f"lacks 1 of the {COUNT} files"):
        install_from_dir(source)
    with pytest.raises(AssetError, match="nowhere"):
        install_from_dir(tmp_path / "nowhere")
    assert not own_cache.exists()


def test_a_failed_install_keeps_the_old_pack(own_cache, tmp_path):
    source = fake_assets(tmp_path / "assets")
    install_from_dir(source)
    digest = resolve_asset_pack("libero").digest
    (source / MESH).unlink()
    with pytest.raises(AssetError):
        install_from_dir(source)
    assert resolve_asset_pack("libero").digest == digest


def test_unwritable_cache(tmp_path, monkeypatch):
    source = fake_assets(tmp_path / "assets")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(AssetError, match="cannot be written.*VLA_GYM_CACHE"):
        install_from_dir(source)


# --- the command ----------------------------------------------------------------------------------


def test_status_path_and_verify(own_cache, tmp_path, capsys):
    assert cli.main(["assets"]) == 0
    text = capsys.readouterr().out
    assert "lite: ready" in text and "libero: absent" in text
    assert "vla-gym assets download" in text and "assets='auto' means lite here" in text
    assert cli.main(["assets", "path"]) == 2
    assert "libero-assets does not exist" in capsys.readouterr().err
    assert cli.main(["assets", "path", "--pack", "lite"]) == 0
    assert capsys.readouterr().out.strip() == str(resolve_asset_pack("lite").root)

    fake_assets(tmp_path / "assets")
    assert cli.main(["assets", "download", "--from-dir", str(tmp_path / "assets")]) == 0
    assert f"ready, {COUNT} files" in capsys.readouterr().out
    assert cli.main(["assets", "status", "--json"]) == 0
    lite, libero = json.loads(capsys.readouterr().out)
    assert (lite["state"], libero["state"]) == ("ready", "ready")
    assert libero["source"] == str(tmp_path / "assets")
    assert cli.main(["assets", "verify"]) == 0
    assert f"{COUNT} files with their checksums" in capsys.readouterr().out
    (libero_folder() / MESH).write_text("oops")
    assert cli.main(["assets", "verify"]) == 1
    assert f"problem: 1 files have changed: {MESH}" in capsys.readouterr().out
    (libero_folder() / MESH).unlink()
    assert "lacks 1 of" in status()[1]["reason"]
    assert cli.main(["assets", "verify", "--pack", "lite"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--force"],
        ["verify", "--repo", "a/b"],
        ["download", "--from-dir", "x", "--repo", "a/b"],
    ],
)
def test_options_that_do_not_go_together(own_cache, capsys, arguments):
    assert cli.main(["assets", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_downloads_by_itself(own_cache):
    """Neither importing nor `libero` nor `auto` may touch the hub library."""
    code = (
        "import sys, warnings\nwarnings.simplefilter('ignore')\n"
        "from vla_gym.assets import resolve_asset_pack\n"
        "resolve_asset_pack('auto')\n"
        "try:\n    resolve_asset_pack('libero')\nexcept FileNotFoundError: pass\n"
        "sys.exit('huggingface_hub' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60)
    assert run.returncode == 0


# --- the real meshes ------------------------------------------------------------------------------


@pytest.mark.libero_assets
def test_real_pack_holds_libero_s_own_mjcf(libero_assets_dir):
    root, missing = best_root(libero_assets_dir)
    assert missing == []
    problems, remarks = verify_pack(root)
    assert problems == []
    assert not any("MJCF" in remark for remark in remarks)


@pytest.mark.libero_assets
@pytest.mark.slow
def test_listed_files_are_all_that_scenes_need(own_cache, libero_assets_dir):
    """A pack of the listed files alone compiles: one scene of each kind of room."""
    install_from_dir(libero_assets_dir)
    for suite, task_id in (("goal", 0), ("object", 0), ("90", 0), ("90", 50), ("90", 80)):
        assert load_task_model(get_task(suite, task_id), "libero").assets.name == "libero"
