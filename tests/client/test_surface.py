"""The public names of `client`. Importing it is cheap and loads no other layer."""

import subprocess
import sys

from octet import client


def test_exported_names() -> None:
    assert client.__all__ == sorted(client.__all__)
    assert {name for name in vars(client) if name[0].isupper()} == set(client.__all__)


def test_every_error_is_an_octet_error_and_in_the_tree() -> None:
    from octet.client import errors

    assert errors.__doc__ is not None
    for name in set(client.__all__) - {"Client"}:
        assert issubclass(getattr(client, name), client.OctetError)
        assert name in errors.__doc__


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_client_loads_neither_the_command_line_nor_other_layers() -> None:
    assert not loaded_after("import octet.client") & {
        "typer",
        "yaml",
        "octet.client.terminal",
        "torch",
        "ray",
        "octet.service",
        "octet.worker",
    }


def test_the_command_line_loads_no_server_before_it_serves() -> None:
    loaded = loaded_after("import octet.client.cli; octet.client.cli.build_app()")
    assert not loaded & {"octet.service", "octet.worker", "torch", "ray", "fastapi", "sqlalchemy"}
