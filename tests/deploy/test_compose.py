"""docker-compose.yml keeps its promises about users, networks, secrets and pools."""

import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from octet.api_schemas import PoolConfig

ROOT = Path(__file__).parent.parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
H100 = yaml.safe_load((ROOT / "docker-compose.h100.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WITH_GPUS = {**SERVICES, "node-h100": H100["services"]["node-h100"]}
NODES = {name: service for name, service in WITH_GPUS.items() if name.startswith("node-")}
RAY_SERVICES = {"dispatcher", "ray-head", *NODES} - {"node-h100"}
ONE_SHOT = {"prepare", "demo"}
PUBLISHED = {"api", "prometheus", "alertmanager", "grafana"}
SECRET_READERS = {
    "secret-api": {"api", "ingest", "prometheus", "demo"},
    "secret-database": {"postgres", "api", "ingest", "dispatcher"},
    "secret-grafana": {"grafana"},
    "secret-ray": RAY_SERVICES,
}


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """The mounts of a service, by target: what is mounted there, and if it is read-only."""
    parts = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", mount).split(":") for mount in service.get("volumes", [])]
    return {part[1]: (part[0], part[2:] == ["ro"]) for part in parts}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    if name == "prepare":  # gives each volume to its writer, then ends
        assert service["cap_add"] == ["CHOWN", "DAC_OVERRIDE", "FOWNER"]
        assert (service["network_mode"], service["restart"]) == ("none", "no")
    else:
        assert "cap_add" not in service
        assert service["user"].split(":")[0] not in {"0", "root", ""}
        assert service["restart"] == ("no" if name in ONE_SHOT else "unless-stopped")


@pytest.mark.parametrize("name", SERVICES)
def test_only_four_services_are_published_and_on_loopback_alone(name: str) -> None:
    ports = SERVICES[name].get("ports", [])
    assert (name in PUBLISHED) == bool(ports)
    assert all(port.startswith("127.0.0.1:") for port in ports)
    networks = SERVICES[name].get("networks", [])
    assert networks == ([] if name == "prepare" else ["inner", "edge"] if name in PUBLISHED else ["inner"])


def test_the_inner_network_has_no_way_out() -> None:
    assert COMPOSE["networks"] == {"inner": {"internal": True}, "edge": {}}


@pytest.mark.parametrize("name", sorted(set(SERVICES) - ONE_SHOT))
def test_a_service_that_stays_has_a_health_check_and_depends_on_nobody(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
    assert "depends_on" not in SERVICES[name]


@pytest.mark.parametrize("name", WITH_GPUS)
def test_images_are_pinned(name: str) -> None:
    image = WITH_GPUS[name]["image"]
    tag = image.partition(":")[2]
    assert re.match(r"v?\d+\.\d+", tag), f"{image}: pin the version"
    own = image.startswith("octet/")
    assert not own or SERVICES.get(name, {"pull_policy": "never"})["pull_policy"] == "never"


def test_each_image_of_ours_is_built_by_one_service() -> None:
    built = [service["image"] for service in SERVICES.values() if "build" in service]
    assert sorted(built) == sorted({service["image"] for service in SERVICES.values() if service["image"].startswith("octet/")})


def test_a_secret_is_mounted_by_its_readers_alone_and_written_by_prepare() -> None:
    for secret, readers in SECRET_READERS.items():
        found = {
            name: mount[1] for name, service in SERVICES.items() for mount in mounts(service).values() if mount[0] == secret
        }
        assert found == {"prepare": False} | dict.fromkeys(readers, True)
    assert {name for name in COMPOSE["volumes"] if name.startswith("secret-")} == set(SECRET_READERS)


@pytest.mark.parametrize("name", WITH_GPUS)
def test_no_secret_stands_in_an_environment(name: str) -> None:
    environment: dict[str, str] = WITH_GPUS[name].get("environment", {})
    secret = [key for key in environment if re.search(r"PASSWORD|TOKEN|KEY|DATABASE_URL", key)]
    assert all(environment[key].startswith("/secrets/") for key in secret)


@pytest.mark.parametrize("name", sorted(RAY_SERVICES))
def test_ray_asks_for_the_token(name: str) -> None:
    environment = SERVICES[name]["environment"]
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/secrets/ray/token"


def test_what_is_mounted_from_this_folder_exists_and_is_read_only() -> None:
    sources = {source: read_only for service in SERVICES.values() for source, read_only in mounts(service).values()}
    assert all((ROOT / source).exists() for source in sources if source.startswith("./"))
    assert all(read_only for source, read_only in sources.items() if source.startswith("./"))


@pytest.mark.parametrize(("path", "nodes"), [("pools.yaml", set(NODES) - {"node-h100"}), ("pools.h100.yaml", set(NODES))])
def test_each_pool_has_the_nodes_and_slots_that_it_promises(path: str, nodes: set[str]) -> None:
    pools = TypeAdapter(list[PoolConfig]).validate_python(yaml.safe_load((ROOT / "deploy/compose" / path).read_text()))
    offered: dict[tuple[str, str], dict[str, int]] = {}
    for name in nodes:
        options = dict(option.split("=", 1) for option in NODES[name]["command"] if option.startswith("--") and "=" in option)
        key, _, value = options["--labels"].partition("=")
        offered[key, value] = json.loads(options["--resources"].replace("${OCTET_GPUS:-8}", "8"))
        assert options["--address"] == SERVICES["dispatcher"]["environment"]["OCTET_RAY_ADDRESS"]
    assert {pool.node_label: {pool.slot_resource: pool.slots} for pool in pools} == offered


def test_the_gpu_node_is_a_cpu_node_with_gpus() -> None:
    node = WITH_GPUS["node-h100"]
    assert node["extends"] == {"file": "docker-compose.yml", "service": "node-cpu"}
    assert set(node) <= {"extends", "image", "build", "command", "environment", "shm_size", "ulimits", "deploy"}
    assert node["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    ]
    for name in ("api", "ingest", "dispatcher"):
        assert mounts(H100["services"][name]) == {"/etc/octet/pools.yaml": ("./deploy/compose/pools.h100.yaml", True)}


def test_prometheus_finds_the_dcgm_exporter_of_a_gpu_node() -> None:
    exporter = H100["services"]["dcgm-exporter"]
    assert exporter["networks"] == ["inner"]
    assert "ports" not in exporter
    assert re.search(r":\d+\.\d+\.\d+-", exporter["image"]), "pin the version"
    (group,) = yaml.safe_load((ROOT / "deploy/compose/dcgm.yml").read_text())
    assert group == {"targets": ["dcgm-exporter:9400"]}
    ((target, mount),) = mounts(H100["services"]["prometheus"]).items()
    assert mount == ("./deploy/compose/dcgm.yml", True)
    prometheus = yaml.safe_load((ROOT / "deploy/compose/prometheus.yml").read_text())
    (dcgm,) = [job for job in prometheus["scrape_configs"] if job["job_name"] == "dcgm"]
    (pattern,) = dcgm["file_sd_configs"][0]["files"]
    assert fnmatch(target, pattern)
    assert exporter["command"][1].endswith("dcp-metrics-included.csv"), "the list that has the profiling counters"


def test_api_dispatcher_and_nodes_see_the_same_folders() -> None:
    for name in ("api", "dispatcher"):
        environment = SERVICES[name]["environment"]
        assert mounts(SERVICES[name])[environment["OCTET_DATA_DIR"]] == ("jobs", False)
        assert environment["OCTET_POOLS_FILE"] in mounts(SERVICES[name])
    assert set(mounts(SERVICES["ingest"])) == {"/etc/octet/pools.yaml", "/secrets/api", "/secrets/database"}, (
        "and no files of jobs"
    )
    roots = SERVICES["api"]["environment"]["OCTET_DATA_ROOTS"].split(":")
    assert SERVICES["dispatcher"]["environment"]["OCTET_DATA_ROOTS"].split(":") == roots
    for name in set(NODES) - {"node-h100"}:
        assert mounts(SERVICES[name])["/var/lib/octet"] == ("jobs", False)
        assert mounts(SERVICES[name])["/data"] == mounts(SERVICES["api"])["/data"]
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert roots[0] in mounts(SERVICES["api"])
    assert re.search(rf"ln -s .*stdlib.* {re.escape(roots[1])} ", dockerfile), "the demo's text is in every image"


def test_images_start_from_the_slim_python_and_run_as_nobody_special() -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    stages = re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)[1:]
    bases = {stage.split()[2]: stage.split()[0] for stage in stages}
    assert [base for base in bases.values() if base not in bases] == ["python:3.11-slim-bookworm"]
    final = [stage for stage in stages if stage.split()[2] in {"control", "node"}]
    assert len(final) == 2
    assert all(re.findall(r"^USER (.+)$", stage, flags=re.MULTILINE) == ["10001:10001"] for stage in final)


def test_the_dockerfile_copies_only_what_dockerignore_lets_through() -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    copied = {
        source for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, flags=re.MULTILINE) for source in line.split()[:-1]
    }
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_prometheus_scrapes_in_compose_what_it_scrapes_beside_octet_serve() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose/prometheus.yml").read_text())
    local = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in compose["scrape_configs"]}
    for job in local["scrape_configs"]:
        if job["job_name"] in jobs:
            assert jobs[job["job_name"]].get("relabel_configs") == job.get("relabel_configs")
    assert {job["job_name"] for job in local["scrape_configs"]} == {"octet-api", "octet-rank", "dcgm"}
    assert set(jobs) == {"octet-api", "octet-rank", "dcgm", "octet-dispatcher"}, "`octet serve` has no dispatcher process"
    (dispatchers,) = jobs["octet-dispatcher"]["dns_sd_configs"]
    address = SERVICES["dispatcher"]["environment"]["OCTET_METRICS_ADDRESS"]
    assert address == f"0.0.0.0:{dispatchers['port']}"
    assert dispatchers["names"] == ["dispatcher"]
    (reporting,) = jobs["octet-api"]["dns_sd_configs"]
    assert reporting["names"] == ["api", "ingest"]
    for name in reporting["names"]:
        assert SERVICES[name]["environment"]["OCTET_INTERNAL_ADDRESS"] == f"0.0.0.0:{reporting['port']}"
    assert SERVICES["dispatcher"]["environment"]["OCTET_REPORT_URL"] == f"http://ingest:{reporting['port']}"
    credentials = {"type": "Bearer", "credentials_file": "/secrets/api/key"}
    assert jobs["octet-api"]["authorization"] == jobs["octet-rank"]["http_sd_configs"][0]["authorization"] == credentials


@pytest.mark.parametrize("script", ["prepare.sh", "postgres.sh"])
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["sh", "-n", str(ROOT / "deploy/compose" / script)], check=True, timeout=10)
