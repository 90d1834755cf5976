"""The manifests are valid against the schemas, locked down, and consistent with the pools, compose stack and rules."""

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from octet.api_schemas import PoolConfig
from tests.kit.schemas import assert_fits_kubernetes, violation
from tests.kit.waiting import LONG_S

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
CUSTOM_KINDS = {
    "RayCluster": "raycluster",
    "ServiceMonitor": "prometheus-operator",
    "ScrapeConfig": "prometheus-operator",
    "PrometheusRule": "prometheus-operator",
}
"""The schema file of each kind that Kubernetes itself does not define (schemas/README.md)."""
SECRETS = {"octet-api-keys": {"keys", "prometheus"}, "octet-database": {"url"}, "octet-ray-token": {"auth_token"}}

Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    files = [name for name in KUSTOMIZATION["resources"] if name.endswith(".yaml")]
    return [document for name in files for document in yaml.safe_load_all((FOLDER / name).read_text())]


def name_of(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


MANIFESTS = {name_of(manifest): manifest for manifest in manifests()}
RAY: Manifest = MANIFESTS["RayCluster/octet"]["spec"]
GROUPS: dict[str, Manifest] = {group["groupName"]: group for group in RAY["workerGroupSpecs"]}
PODS: dict[str, Manifest] = {
    "api": MANIFESTS["Deployment/octet-api"]["spec"]["template"],
    "ingest": MANIFESTS["Deployment/octet-ingest"]["spec"]["template"],
    "dispatcher": MANIFESTS["Deployment/octet-dispatcher"]["spec"]["template"],
    "head": RAY["headGroupSpec"]["template"],
    **{name: group["template"] for name, group in GROUPS.items()},
}


def containers(pod: str) -> Iterator[Manifest]:
    yield from PODS[pod]["spec"]["containers"]


def environment(pod: str) -> dict[str, str]:
    return {entry["name"]: entry["value"] for container in containers(pod) for entry in container.get("env", [])}


def test_every_file_is_a_resource() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "pools.yaml"}
    assert files == {name for name in KUSTOMIZATION["resources"] if name.endswith(".yaml")}
    assert KUSTOMIZATION["configMapGenerator"] == [{"name": "octet-pools", "files": ["pools.yaml"]}]


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name.split("/")[0] not in CUSTOM_KINDS])
def test_a_manifest_fits_the_schema_of_kubernetes(name: str) -> None:
    assert_fits_kubernetes(MANIFESTS[name])


def problem(manifest: Manifest) -> str:
    """List the errors of a custom resource against the schema of its kind."""
    schema = json.loads((Path(__file__).parent / f"schemas/{CUSTOM_KINDS[manifest['kind']]}.schema.json").read_text())
    return violation(manifest, schema)


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name.split("/")[0] in CUSTOM_KINDS])
def test_a_custom_resource_fits_the_schema_of_its_operator(name: str) -> None:
    assert problem(MANIFESTS[name]) == ""
    spoilt = copy.deepcopy(MANIFESTS[name])
    spoilt["spec"]["replicaz"] = 1
    assert problem(spoilt)


SPOILT: dict[str, Callable[[Manifest], object]] = {
    "RayCluster/octet": lambda spec: spec["workerGroupSpecs"][0]["resources"].update(octet_slot_cpu=2),
    "ServiceMonitor/octet-api": lambda spec: spec["endpoints"][0].update(port=8000),
    "ScrapeConfig/octet-rank": lambda spec: spec["httpSDConfigs"][0].update(refresh_interval="5s"),
    "PrometheusRule/octet": lambda spec: spec["groups"][0]["rules"][0].update(expression="up"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_custom_resource_does_not_fit(name: str) -> None:
    spoilt = copy.deepcopy(MANIFESTS[name])
    SPOILT[name](spoilt["spec"])
    assert problem(spoilt)


@pytest.mark.parametrize("name", PODS)
def test_a_pod_template_fits_the_schema_of_kubernetes(name: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **PODS[name], "metadata": {"name": name, **PODS[name]["metadata"]}}
    assert_fits_kubernetes(pod)


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_no_more_rights_than_it_needs(name: str) -> None:
    pod = PODS[name]["spec"]["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] == 10001
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert name == "head" or PODS[name]["spec"]["automountServiceAccountToken"] is False  # the head's autoscaler needs a token
    for container in containers(name):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("name", PODS)
def test_volumes_are_mounted_and_come_from_here_or_from_the_secrets_that_are_documented(name: str) -> None:
    volumes = {volume["name"]: volume for volume in PODS[name]["spec"]["volumes"]}
    assert {mount["name"] for container in containers(name) for mount in container["volumeMounts"]} == set(volumes)
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume:
            assert f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}" in MANIFESTS
        elif "secret" in volume:
            keys = {item["key"] for item in volume["secret"].get("items", [])}
            assert keys <= SECRETS[volume["secret"]["secretName"]]
        elif "configMap" in volume:
            assert volume["configMap"]["name"] == "octet-pools"
        else:
            assert "sizeLimit" in volume["emptyDir"]


def test_no_manifest_holds_a_secret() -> None:
    assert not [name for name in MANIFESTS if name.startswith("Secret/")]
    secret = re.compile(r"PASSWORD|TOKEN|KEY|DATABASE_URL")
    values = [value for pod in PODS for key, value in environment(pod).items() if secret.search(key)]
    assert all(value.startswith("/secrets/") for value in values)


def test_images_are_ours_and_pinned() -> None:
    used = {container["image"] for pod in PODS for container in containers(pod)}
    (version,) = {service["image"].partition(":")[2] for service in COMPOSE.values() if service["image"].startswith("octet/")}
    assert used == {f"octet/control:{version}", f"octet/node:{version}", f"octet/node-cuda:{version}-cu130"}


def test_worker_groups_are_the_pools() -> None:
    pools = TypeAdapter(list[PoolConfig]).validate_python(yaml.safe_load((FOLDER / "pools.yaml").read_text()))
    assert [pool.name for pool in pools] == list(GROUPS)
    for pool in pools:
        group = GROUPS[pool.name]
        assert group["labels"] == dict([pool.node_label])
        slots_per_node = int(group["resources"][pool.slot_resource])
        assert slots_per_node * group["maxReplicas"] == pool.slots
        assert slots_per_node * pool.threads_per_worker <= int(group["resources"]["CPU"])
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        limits = next(containers(pool.name))["resources"]["limits"]
        assert (pool.accelerator == "cuda") == ("nvidia.com/gpu" in limits)
        assert limits.get("nvidia.com/gpu") == group["resources"].get("GPU")
        assert pool.accelerator == "cpu" or group["resources"]["GPU"] == str(slots_per_node)


def test_the_gpu_group_grows_from_nothing_because_the_dispatcher_says_what_the_queue_wants() -> None:
    assert RAY["enableInTreeAutoscaling"] is True
    assert (GROUPS["h100"]["minReplicas"], GROUPS["h100"]["replicas"]) == (0, 0)
    assert environment("dispatcher")["OCTET_AUTOSCALE"] == "true"


def test_ray_is_what_the_images_have_and_asks_for_the_token() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={RAY['rayVersion']}\n" in constraints
    assert RAY["authOptions"] == {"mode": "token", "secretName": "octet-ray-token"}
    assert environment("dispatcher")["RAY_AUTH_MODE"] == "token"
    assert environment("dispatcher")["RAY_AUTH_TOKEN_PATH"] == "/secrets/ray/auth_token"
    assert environment("dispatcher")["OCTET_RAY_ADDRESS"] == "octet-head-svc:6379"


@pytest.mark.parametrize("name", ["api", "ingest", "dispatcher"])
def test_a_process_is_configured_as_in_the_compose_stack(name: str) -> None:
    ours = {key for key in environment(name) if key.startswith("OCTET_")} - {"OCTET_AUTOSCALE"}
    assert ours == {key for key in COMPOSE[name]["environment"] if key.startswith("OCTET_")}
    assert next(containers(name))["command"] == COMPOSE[name]["command"]


def test_selectors_find_their_pods() -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}
    monitor = MANIFESTS["ServiceMonitor/octet-api"]["spec"]
    (expression,) = monitor["selector"]["matchExpressions"]
    assert expression == {"key": "app.kubernetes.io/name", "operator": "In", "values": ["octet-api", "octet-ingest"]}
    for name in ("api", "ingest"):
        for kind in (f"Deployment/octet-{name}", f"PodDisruptionBudget/octet-{name}"):
            assert MANIFESTS[kind]["spec"]["selector"]["matchLabels"].items() <= labels[name].items()
        service = MANIFESTS[f"Service/octet-{name}"]
        assert service["spec"]["selector"].items() <= labels[name].items()
        assert service["metadata"]["labels"][expression["key"]] in expression["values"]
        assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert MANIFESTS["Deployment/octet-dispatcher"]["spec"]["selector"]["matchLabels"].items() <= labels["dispatcher"].items()


def test_prometheus_reaches_the_metrics_of_every_dispatcher() -> None:
    (port,) = next(containers("dispatcher"))["ports"]
    assert environment("dispatcher")["OCTET_METRICS_ADDRESS"] == f"0.0.0.0:{port['containerPort']}"
    service = MANIFESTS["Service/octet-dispatcher"]
    assert service["spec"]["selector"].items() <= PODS["dispatcher"]["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None", "one target for each pod, not one for all"
    monitor = MANIFESTS["ServiceMonitor/octet-dispatcher"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == [port["name"] for port in service["spec"]["ports"]]
    allowed = MANIFESTS["NetworkPolicy/octet-dispatcher"]["spec"]["ingress"]
    assert [rule["ports"] for rule in allowed if "ports" in rule] == [[{"port": port["name"]}]]


def test_prometheus_scrapes_here_what_it_scrapes_elsewhere() -> None:
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    ranks = next(job for job in jobs if job["job_name"] == "octet-rank")
    scrape = MANIFESTS["ScrapeConfig/octet-rank"]["spec"]
    spelled = {"sourceLabels": "source_labels", "targetLabel": "target_label", "replacement": "replacement"}
    assert [{spelled[key]: value for key, value in rule.items()} for rule in scrape["relabelings"]] == ranks["relabel_configs"]
    assert scrape["httpSDConfigs"][0]["url"].endswith("/internal/v1/prometheus/targets")
    authorizations = [scrape["httpSDConfigs"][0]["authorization"]]
    authorizations += [endpoint["authorization"] for endpoint in MANIFESTS["ServiceMonitor/octet-api"]["spec"]["endpoints"]]
    for authorization in authorizations:
        assert authorization["credentials"]["key"] in SECRETS[authorization["credentials"]["name"]]


def test_alerts_are_the_rules_of_prometheus() -> None:
    """The runbook is named by its place in the repository; the chart's monitoring.docsUrl makes a link of it."""
    text = (ROOT / "deploy/prometheus/rules/octet.yml").read_text().replace("{{ $externalURL }}/user/", "docs/")
    assert MANIFESTS["PrometheusRule/octet"]["spec"] == yaml.safe_load(text)


def test_the_pod_that_fills_the_data_claim_has_the_rights_of_the_others() -> None:
    pod = yaml.safe_load((FOLDER / "examples/fill-data.yaml").read_text())
    assert_fits_kubernetes(pod)
    assert pod["spec"]["securityContext"] == PODS["api"]["spec"]["securityContext"]
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"] == next(containers("api"))["securityContext"]
    assert container["image"] == next(containers("ingest"))["image"]
    (volume,) = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": "octet-data"}
    assert MANIFESTS["PersistentVolumeClaim/octet-data"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_every_dashboard_is_in_the_config_map() -> None:
    folder = ROOT / "deploy" / "grafana"
    (generator,) = yaml.safe_load((folder / "kustomization.yaml").read_text())["configMapGenerator"]
    dashboards = sorted(folder.glob("dashboards/*.json"))
    assert sorted(generator["files"]) == [path.relative_to(folder).as_posix() for path in dashboards]
    assert generator["options"]["labels"] == {"grafana_dashboard": "1"}
    assert sum(path.stat().st_size for path in dashboards) < 900_000, "a ConfigMap holds one MiB"


def test_kustomize_renders_all_of_it() -> None:
    if shutil.which("kubectl") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("missing: kubectl")
        pytest.skip("missing: kubectl, whose kustomize renders the manifests")
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
        env=os.environ | {"HOME": "/tmp"},
    )
    assert rendered.returncode == 0, rendered.stderr
    documents = list(yaml.safe_load_all(rendered.stdout))
    assert {name_of(document) for document in documents} >= set(MANIFESTS) | {"ConfigMap/octet-dashboards"}
    assert {document["metadata"].get("namespace", "octet") for document in documents} == {"octet"}
    assert not re.search(r"image: octet/[a-z-]+$", rendered.stdout, flags=re.MULTILINE), "an image without its tag"
    for document in documents:
        if document["kind"] in CUSTOM_KINDS:
            assert problem(document) == ""
        else:
            assert_fits_kubernetes(document)
