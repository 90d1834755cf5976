"""The chart passes Helm's lint, renders valid manifests for other values too, and deploy/kubernetes is what it renders."""

import copy
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from deploy.helm import render
from octet.api_schemas import PoolConfig
from octet.api_schemas.quotas import Quotas
from tests.deploy.test_kubernetes import CUSTOM_KINDS, problem
from tests.kit.schemas import assert_fits_kubernetes

pytestmark = pytest.mark.system
"""`make test-system` installs Helm's library, 240 MB; `make test` does not."""

OTHER_POOL = {
    "name": "l40s",
    "accelerator": "cuda",
    "image": "registry.example:5000/octet-node:0.1.0-cu126",
    "minComputeCapability": [8, 9],
    "memoryPerDeviceBytes": 51539607552,
    "minNodes": 1,
    "maxNodes": 2,
    "slotsPerNode": 4,
    "threadsPerWorker": 4,
    "allowsEntrypoints": True,
    "tenants": {"vision": {"share": 2.5, "slots": 4}, "speech": {"jobs": 2, "slot_hours_per_month": 500}},
    "scratch": "32Gi",
    "resources": {
        "requests": {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "256Gi", "nvidia.com/gpu": "4"},
    },
}
OTHERS: dict[str, Any] = {
    "images": {"control": "registry.example/octet-control@sha256:" + 64 * "0"},
    "imagePullSecrets": [{"name": "registry"}],
    "planner": False,
    "secrets": {"apiKeys": "my-keys"},
    "dataStores": ["s3://corpus/books"],
    "exportStores": ["s3://models/octet", "gs://models"],
    "storage": {"className": "shared", "data": "5Ti"},
    "monitoring": {"namespace": "observability", "docsUrl": "https://docs.example.com/operations.html"},
    "quotas": {"priorities": {"submitter": 60}, "tenants": {"vision": {"storage_bytes": 2000000000000, "retention_days": 30}}},
    "pools": [OTHER_POOL],
}


def documents(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, text in render.rendered(values).items():
        if name.endswith(".yaml"):
            yield from filter(None, yaml.safe_load_all(text))


def by_name(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in documents(values)}


def test_helm_has_no_complaint() -> None:
    report = render.chart_module().lint(render.CHART, strict=True, kube_version="v1.32.0")
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


def test_the_manifests_for_kustomize_are_the_charts() -> None:
    for name, text in render.kustomize_files().items():
        assert (render.KUBERNETES / name).read_text() == text, f"deploy/kubernetes/{name} is old: run `make snapshots`"


@pytest.mark.parametrize("values", [{}, OTHERS], ids=["defaults", "others"])
def test_what_it_renders_fits_the_schemas(values: dict[str, Any]) -> None:
    for document in documents(values):
        if document["kind"] in CUSTOM_KINDS:
            assert problem(document) == ""
        else:
            assert_fits_kubernetes(document)


def test_values_arrive_where_they_belong() -> None:
    found = by_name(OTHERS)
    (api,) = found["Deployment/octet-api"]["spec"]["template"]["spec"]["containers"]
    assert api["image"] == OTHERS["images"]["control"]
    assert {"name": "OCTET_DATA_STORES", "value": "s3://corpus/books"} in api["env"]
    assert {"name": "OCTET_EXPORT_STORES", "value": "s3://models/octet,gs://models"} in api["env"]
    assert {"name": "OCTET_RUNBOOKS_URL", "value": OTHERS["monitoring"]["docsUrl"]} in api["env"]
    assert found["Deployment/octet-api"]["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert found["PersistentVolumeClaim/octet-data"]["spec"]["storageClassName"] == "shared"
    monitor = found["ServiceMonitor/octet-api"]["spec"]["endpoints"][0]
    assert monitor["authorization"]["credentials"]["name"] == "my-keys"
    assert "observability" in str(found["NetworkPolicy/octet-ray"])
    rules = [rule for group in found["PrometheusRule/octet"]["spec"]["groups"] for rule in group["rules"]]
    links = [rule["annotations"]["runbook_url"] for rule in rules if "alert" in rule]
    assert links
    assert all(link.startswith("https://docs.example.com/operations.html#octet") for link in links)


def test_a_pool_and_its_nodes_are_one_value() -> None:
    found = by_name(OTHERS)
    written = yaml.safe_load(found["ConfigMap/octet-pools"]["data"]["pools.yaml"])
    (pool,) = TypeAdapter(list[PoolConfig]).validate_python(written)
    (group,) = found["RayCluster/octet"]["spec"]["workerGroupSpecs"]
    assert (pool.name, pool.slots, pool.allows_entrypoints) == ("l40s", 8, True)
    assert pool.memory_per_device_bytes == 51539607552
    assert group["labels"] == dict([pool.node_label])
    assert group["resources"] == {"CPU": "32", "GPU": "4", pool.slot_resource: "4"}
    assert group["template"]["spec"]["containers"][0]["image"] == OTHER_POOL["image"]


def test_quotas_are_a_file_of_both_processes() -> None:
    found = by_name(OTHERS)
    written = yaml.safe_load(found["ConfigMap/octet-pools"]["data"]["quotas.yaml"])
    assert Quotas.model_validate(written) == Quotas.model_validate(OTHERS["quotas"])
    for name in ("api", "dispatcher"):
        (container,) = found[f"Deployment/octet-{name}"]["spec"]["template"]["spec"]["containers"]
        assert {"name": "OCTET_QUOTAS_FILE", "value": "/etc/octet/quotas.yaml"} in container["env"]
    assert "quotas.yaml" not in by_name({})["ConfigMap/octet-pools"]["data"]


@pytest.mark.parametrize(("values", "image", "planner"), [({}, "node", None), (OTHERS, "control", "false")])
def test_api_and_dispatcher_plan_if_they_have_pytorch(values: dict[str, Any], image: str, planner: str | None) -> None:
    images = yaml.safe_load((render.CHART / "values.yaml").read_text())["images"] | values.get("images", {})
    found = by_name(values)
    for name in ("api", "dispatcher"):
        (container,) = found[f"Deployment/octet-{name}"]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == images[image]
        assert next((each["value"] for each in container["env"] if each["name"] == "OCTET_PLANNER"), None) == planner


def test_another_pool_means_other_pods() -> None:
    annotations = [
        by_name(values)["Deployment/octet-api"]["spec"]["template"]["metadata"]["annotations"] for values in ({}, OTHERS)
    ]
    assert annotations[0] != annotations[1]


def test_without_monitoring_no_operator_is_needed() -> None:
    kinds = {document["kind"] for document in documents({"monitoring": {"enabled": False, "dashboards": False}})}
    assert kinds & set(CUSTOM_KINDS) == {"RayCluster"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pool": []}, "pool"),
    ({"images": {"control": "octet/control"}}, "control"),
    ({"monitoring": {"docsUrl": "docs/operations.md"}}, "docsUrl"),
    ({"pools": [{**copy.deepcopy(OTHER_POOL), "accelerator": "rocm"}]}, "accelerator"),
    ({"storage": {"jobs": "1TB"}}, "jobs"),
]


@pytest.mark.parametrize(("values", "field"), WRONG, ids=[field for _, field in WRONG])
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(Exception, match=field):
        render.rendered(values)


def test_the_package_is_complete(tmp_path: Path) -> None:
    with render.chart_module().Chart.load(render.CHART) as chart:
        path = chart.save(tmp_path)
    with tarfile.open(path) as package:
        names = set(package.getnames())
    assert {
        "octet/Chart.yaml",
        "octet/files/octet.yml",
        "octet/files/dashboards/octet-job.json",
        "octet/templates/api.yaml",
    } <= names


def test_its_version_is_ours() -> None:
    import tomllib

    version = tomllib.loads((render.ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = yaml.safe_load((render.CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == version
