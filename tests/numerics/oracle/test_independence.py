"""The oracle shares no code with what it checks: its modules import NumPy, ml_dtypes and the standard library alone.

Its tests reach the worker as a user does: through `worker`, never through a module within it. `held.py` reads torch's storage.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ORACLE = "tests.numerics.oracle"
ALLOWED_IN_ORACLE = {"numpy", "ml_dtypes"} | set(sys.stdlib_module_names)
ALLOWED_IN_TESTS = ALLOWED_IN_ORACLE | {"pytest", "torch", "octet.api_schemas"}
MODULES = sorted(FOLDER.glob("*.py"))


def imported(source: str) -> Iterator[str]:
    """The modules that a source imports; of `from octet.worker import a` also worker.a where that is one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."
            if node.module == "octet.worker":
                folder = FOLDER.parents[2] / "worker"
                yield from (f"octet.worker.{name.name}" for name in node.names if list(folder.glob(f"{name.name}*")))


def strangers(source: str, *, is_test: bool) -> list[str]:
    allowed = ALLOWED_IN_TESTS if is_test else ALLOWED_IN_ORACLE
    return [
        name
        for name in imported(source)
        if name.split(".")[0] not in allowed
        and ".".join(name.split(".")[:2]) not in allowed
        and not f"{name}.".startswith(f"{ORACLE}.")
        and not (is_test and name in ("octet.worker", "tests.kit.ranks"))
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_nothing_that_is_checked(path: Path) -> None:
    assert strangers(path.read_text(), is_test=path.stem.startswith("test_") or path.stem == "held") == []


@pytest.mark.parametrize(
    ("source", "is_test", "found"),
    [
        ("import torch", False, ["torch"]),
        ("from octet.worker import initialize", False, ["octet.worker"]),
        ("from tests.numerics.measure import sqnr_db", False, ["tests.numerics.measure"]),
        ("from octet.worker.optim.rules.adam import Adam", True, ["octet.worker.optim.rules.adam"]),
        ("from octet.worker import kernels", True, ["octet.worker.kernels"]),
        ("from . import formats", True, ["."]),
    ],
)
def test_the_rule_sees_what_it_forbids(source: str, is_test: bool, found: list[str]) -> None:
    assert strangers(source, is_test=is_test) == found
