"""Import rules hold: what each part may import, and what an import may load. import-linter checks the rest (`make lint`)."""

import ast
import json
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


_RANK = """
import sys
from worker.main import main
assert main([sys.argv[1], "--job-dir", sys.argv[2]]) == 0
print(*sorted({"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "ray"} & set(sys.modules)))
"""


def test_a_rank_that_trains_loads_no_compiler(spec_document: dict[str, object], tmp_path: Path) -> None:
    """torch loads it for an optimizer, and DTensor for a gradient of ours: together as long as all the rest of a start."""
    (tmp_path / "job.json").write_text(json.dumps(spec_document | {"precision": {"level": "O2"}}))
    program = [sys.executable, "-c", _RANK, str(tmp_path / "job.json"), str(tmp_path / "run")]
    result = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == ""


def test_the_reading_list_is_ten_files_of_1500_lines() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = [ROOT / name for name in re.findall(r"^\d+\. `([^`]+)`", page, re.MULTILINE)]
    assert len(files) == 10
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1500
