"""One example job works everywhere: README shows the file in `examples/`, and every deployment lets jobs read its text."""

from pathlib import Path

import pytest
import yaml

from octet.api_schemas import JobSpec
from octet.client.job_file import check_spec, load_job_file
from tests.docs.blocks import ROOT, blocks

EXAMPLE = "examples/gpt-tiny.yaml"


def spec() -> JobSpec:
    return check_spec(load_job_file(str(ROOT / EXAMPLE)), EXAMPLE)


def test_the_readme_shows_the_file_as_it_is() -> None:
    assert blocks("README.md", "yaml") == [(ROOT / EXAMPLE).read_text()]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_job(path: Path) -> None:
    check_spec(load_job_file(str(path)), path.name)


def test_the_compose_stack_lets_jobs_read_its_text() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert spec().data.path in services["api"]["environment"]["OCTET_DATA_ROOTS"].split(":")
    assert spec().resources.pool in {pool["name"] for pool in yaml.safe_load((ROOT / "deploy/compose/pools.yaml").read_text())}


def test_kubernetes_lets_jobs_read_its_text() -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/api.yaml").read_text()))
    (container,) = documents[0]["spec"]["template"]["spec"]["containers"]
    values = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert spec().data.path in values["OCTET_DATA_ROOTS"].split(":")


def test_its_text_is_in_every_image() -> None:
    """Debian's slim images remove /usr/share/doc except the copyright files, which the licences require."""
    assert spec().data.selects("libc6/copyright")
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert "FROM python:3.11-slim-bookworm AS base" in dockerfile
    assert not [line for line in dockerfile.splitlines() if "rm " in line and "/usr/share/doc" in line]
