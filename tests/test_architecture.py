"""Import rules hold: what each part may import, and what an import may load. import-linter checks the rest (`make lint`)."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED_IN_KERNELS = {"torch", "triton"} | set(sys.stdlib_module_names)


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_kernels_import_only_torch_triton_and_the_standard_library() -> None:
    files = list((ROOT / "worker" / "kernels").rglob("*.py"))
    assert files
    strangers = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imported_names(path)
        if name.split(".")[0] not in ALLOWED_IN_KERNELS and not f"{name}.".startswith("worker.kernels.")
    ]
    assert strangers == []


@pytest.mark.parametrize(
    ("module", "must_not_load"),
    [
        ("api_schemas", ["torch", "ray", "fastapi", "sqlalchemy", "httpx"]),
        ("service.app", ["torch", "triton", "transformers", "ray"]),
        ("service.processes.embedded", ["torch", "triton", "transformers", "ray"]),
        ("client", ["torch", "ray", "fastapi", "sqlalchemy", "typer"]),
        ("client.cli", ["torch", "ray", "fastapi", "sqlalchemy"]),
        ("worker", ["torch", "ray"]),
        ("worker.main", ["torch", "ray", "fastapi", "sqlalchemy"]),
        ("worker.supervisor", ["torch", "triton", "fastapi", "sqlalchemy"]),
        ("worker.train", ["ray", "fastapi", "sqlalchemy"]),
    ],
)
def test_importing_loads_no_stranger(module: str, must_not_load: list[str]) -> None:
    program = f"import sys, {module}; print(*sorted(set({must_not_load!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_the_reading_list_is_ten_files_of_1500_lines() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = [ROOT / name for name in re.findall(r"^\d+\. `([^`]+)`", page, re.MULTILINE)]
    assert len(files) == 10
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1500
