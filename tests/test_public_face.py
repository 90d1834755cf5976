"""The public package `octet`: its names, where they come from, and what importing it loads."""

import subprocess
import sys

import pytest

import client
import octet
import worker


def test_the_public_names() -> None:
    assert octet.__all__ == [
        "AveragedModel",
        "Client",
        "OctetArguments",
        "carry_model_state",
        "export",
        "fp8_statistics",
        "initialize",
        "load_pretrained",
        "memory_report",
        "parallelize",
        "plain_state_dict",
        "prepare_trainer",
    ]
    assert dir(octet) == octet.__all__


def test_each_name_comes_from_its_own_package() -> None:
    assert octet.Client is client.Client
    for name in set(octet.__all__) - {"Client"}:
        assert getattr(octet, name) is getattr(worker, name)


def test_an_unknown_name_is_refused_with_the_public_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'initialise'; public: AveragedModel, Client, OctetArguments"):
        octet.initialise  # noqa: B018  only the access is tested


@pytest.mark.parametrize(
    ("statement", "must_not_load"),
    [
        ("import octet", {"torch", "httpx", "ray", "pydantic"}),
        ("from octet import Client", {"torch", "ray", "typer", "worker"}),
        ("from octet import initialize", {"httpx", "ray", "client", "service"}),
    ],
)
def test_importing_loads_only_what_the_name_needs(statement: str, must_not_load: set[str]) -> None:
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not must_not_load & set(loaded)
