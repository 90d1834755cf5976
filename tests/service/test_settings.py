"""Settings that are unsafe or cannot work are refused."""

import hashlib
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from octet.api_schemas import PoolConfig
from octet.api_schemas.tracking import MlflowTracker, TrackersSpec
from octet.service.processes.startup import check_users
from octet.service.settings import Settings

KEY = "a key that is long enough"


def refused(**values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Settings(**values)  # type: ignore[arg-type]
    return str(caught.value)


def test_the_defaults_serve_this_machine_without_a_key(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert settings.is_loopback
    assert settings.effective_database_url == f"sqlite:///{tmp_path}/octet.db"
    assert settings.effective_report_url == "http://127.0.0.1:8000"
    assert [pool.name for pool in settings.pools] == ["cpu"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "octet.example"])
def test_another_address_than_loopback_needs_a_key_and_data_roots(tmp_path: Path, host: str) -> None:
    assert "no API key is configured" in refused(data_dir=tmp_path, host=host)
    assert "OCTET_DATA_ROOTS" in refused(data_dir=tmp_path, host=host, api_keys=(KEY,))
    assert not Settings(data_dir=tmp_path, host=host, api_keys=(KEY,), data_roots=("/data",)).is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_has_several_names(tmp_path: Path, host: str) -> None:
    assert Settings(data_dir=tmp_path, host=host).is_loopback


def test_a_short_key_is_refused_and_no_key_is_ever_shown(tmp_path: Path) -> None:
    message = refused(data_dir=tmp_path, api_keys=("secret",))
    assert "fewer than 16" in message
    assert "secret" not in message
    assert KEY not in repr(Settings(data_dir=tmp_path, api_keys=(KEY,)))


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# for the demo\n{KEY}\n\n")
    monkeypatch.setenv("OCTET_API_KEYS", "another key, one that is long; and a third one here".replace(";", ","))
    settings = Settings(data_dir=tmp_path, api_keys_file=file, api_keys=("given directly, in code",))
    assert len(settings.tenants_by_key_hash) == 2
    assert len(Settings(data_dir=tmp_path, api_keys=()).tenants_by_key_hash) == 0
    monkeypatch.setenv("OCTET_API_KEYS", f"{KEY},{KEY}2")
    assert len(Settings(data_dir=tmp_path).tenants_by_key_hash) == 2


def test_a_key_is_its_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\nresearch:{KEY}2  \nresearch: {KEY}3\n")
    settings = Settings(data_dir=tmp_path, api_keys_file=file)
    assert [tenant for _, tenant in settings.tenants_by_key_hash] == ["default", "research", "research"]
    assert [key for key, _ in settings.tenants_by_key_hash] == [
        hashlib.sha256(f"{KEY}{number}".encode()).digest() for number in ("", 2, 3)
    ]
    monkeypatch.setenv("OCTET_API_KEYS", f"{KEY}, team-a:{KEY}2")
    assert [tenant for _, tenant in Settings(data_dir=tmp_path).tenants_by_key_hash] == ["default", "team-a"]
    for entry in (f"re search:{KEY}", f"Research:{KEY}", f"{'x' * 33}:{KEY}", f":{KEY}"):
        message = refused(data_dir=tmp_path, api_keys=(entry,))
        assert "up to 32 of a-z" in message
        assert KEY not in message


def test_folders_in_the_environment_are_separated_like_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTET_DATA_ROOTS", os.pathsep.join(["/data", "/more"]))
    assert Settings(data_dir=tmp_path).readable_roots == (Path("/data"), Path("/more"))


def test_object_stores_in_the_environment_are_separated_by_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings(data_dir=tmp_path).store_access.prefixes == ()
    monkeypatch.setenv("OCTET_DATA_STORES", "s3://corpus/, gs://images/train")
    access = Settings(data_dir=tmp_path, data_cache_bytes=5).store_access
    assert access.prefixes == ("s3://corpus", "gs://images/train")
    assert (access.cache_folder, access.cache_bytes) == (str(tmp_path / "data-cache"), 5)
    assert "a::s3://b is not protocol" in refused(data_dir=tmp_path, data_stores=("zip://a::s3://b",))
    monkeypatch.setenv("OCTET_EXPORT_STORES", "s3://models/octet, file:///srv/models")
    assert Settings(data_dir=tmp_path).store_access.export_prefixes == ("s3://models/octet", "file:///srv/models")
    assert "a::s3://b is not protocol" in refused(data_dir=tmp_path, export_stores=("zip://a::s3://b",))


def test_pools_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("pools:\n- {name: h100, node_label: [pool, h100], slots: 8, accelerator: cuda}\n")
    assert Settings(data_dir=tmp_path, pools_file=file).pools[0].accelerator == "cuda"
    file.write_text("- {name: h100, slotz: 8}")
    shown = refused(data_dir=tmp_path, pools_file=file)
    assert "pools.yaml' is no list of pools: pool 1 has no node_label; add it; pool 1 has no slots; add it" in shown
    assert "pool 1 has the unknown field slotz; allowed: name, " in shown
    file.write_text("{")
    assert "cannot be read as YAML" in refused(data_dir=tmp_path, pools_file=file)


def test_pools_that_cannot_be(tmp_path: Path) -> None:
    pool = PoolConfig(name="cpu", node_label=("pool", "cpu"), slots=1)
    assert "no pool is configured" in refused(data_dir=tmp_path, pools=())
    assert "got twice: cpu" in refused(data_dir=tmp_path, pools=(pool, pool))


def test_a_data_folder_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "not a folder" in refused(data_dir=file / "data")


def test_a_heartbeat_that_cannot_keep_its_lease(tmp_path: Path) -> None:
    assert "a third of lease_s" in refused(data_dir=tmp_path, lease_s=5)


def test_the_url_for_workers_is_a_url(tmp_path: Path) -> None:
    assert "url" in refused(data_dir=tmp_path, report_url="control-plane:8000")
    settings = Settings(data_dir=tmp_path, report_url="http://control-plane:8000/")
    assert settings.effective_report_url == "http://control-plane:8000"
    everywhere = Settings(data_dir=tmp_path, host="::", port=1, api_keys=(KEY,), data_roots=("/data",))
    assert everywhere.effective_report_url == "http://[::1]:1"


def test_trackers_of_every_job_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTET_TRACKERS", '{"mlflow": {"online": true}}')
    assert Settings(data_dir=tmp_path).trackers == TrackersSpec(mlflow=MlflowTracker(online=True))
    assert "trackers.comet" in refused(data_dir=tmp_path, trackers={"comet": {}})


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    assert "Extra inputs" in refused(data_dir=tmp_path, prot=1)


def test_users_of_tenants_need_warm_processes_and_are_never_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = {"user": {"uid": 20_001, "gid": 20_001}}
    pool = {"name": "cpu", "node_label": ("octet-pool", "cpu"), "slots": 1, "tenants": {"vision": user}}
    settings = Settings(data_dir=tmp_path, pools=(pool,))
    vision = settings.pools[0].of_tenant("vision").user
    assert settings.store_access_of(vision).cache_folder == f"{tmp_path}/data-cache-20001"
    assert settings.store_access_of(None) == settings.store_access
    assert "OCTET_WARM_IDLE_S" in refused(data_dir=tmp_path, pools=(pool,), warm_idle_s=0)
    assert "greater than or equal to 1" in refused(
        data_dir=tmp_path, pools=({**pool, "tenants": {"a": {"user": {"uid": 0, "gid": 1}}}},)
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=r"pool cpu runs ranks as users .* has to run as root; it runs as user 1000"):
        check_users(settings)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    tmp_path.chmod(0o700)
    with pytest.raises(ValueError, match=r"do not reach the data folder at .*Run: chmod o\+x "):
        check_users(settings.model_copy(update={"data_dir": tmp_path / "data"}))
