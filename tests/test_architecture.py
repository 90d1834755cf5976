"""Import rules hold: what each part may import, and what an import may load. import-linter checks the rest (`make lint`)."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.source import parse

ROOT = Path(__file__).parent.parent
ALLOWED_IN_KERNELS = {"torch", "triton"} | set(sys.stdlib_module_names)


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path.read_text())):
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
        if name.split(".")[0] not in ALLOWED_IN_KERNELS and not f"{name}.".startswith("octet.worker.kernels.")
    ]
    assert strangers == []


_NO_TORCH = ["torch", "triton", "transformers", "ray"]
_NO_SERVICE = ["fastapi", "sqlalchemy"]
_NOT_IN_A_SERVER = ["numpy", "pandas", "pyarrow", "alembic"]


@pytest.mark.system
@pytest.mark.parametrize(
    "imports",
    [
        {
            "import octet": ["torch", "httpx", "ray", "pydantic"],
            "import octet.api_schemas": ["torch", "ray", "httpx", *_NO_SERVICE],
            "from octet import Client": ["torch", "ray", "typer", "octet.worker"],
            "import octet.client": ["torch", "ray", "typer", *_NO_SERVICE],
            "import octet.client.cli": ["torch", "ray", "plotext", *_NO_SERVICE],
            "import octet.service.app": [*_NO_TORCH, *_NOT_IN_A_SERVER],
            "import octet.service.processes.embedded": [*_NO_TORCH, *_NOT_IN_A_SERVER],
        },
        {
            "import octet.worker": ["torch", "ray"],
            "import octet.worker.rank.main": ["torch", "ray", *_NO_SERVICE],
            "import octet.worker.rank.supervisor": ["torch", "triton", *_NO_SERVICE],
        },
    ],
    ids=["user-and-service", "worker"],
)
def test_importing_loads_no_stranger(imports: dict[str, list[str]]) -> None:
    """One process runs the imports in turn: each may load no stranger, and neither may those before it."""
    assert strangers_after(imports) == {}


@pytest.mark.system
def test_a_rank_that_trains_loads_no_compiler(spec_document: dict[str, object], tmp_path: Path) -> None:
    """torch loads it for an optimizer, and DTensor for a gradient of ours: together as long as all the rest of a start."""
    (tmp_path / "job.json").write_text(json.dumps(spec_document | {"precision": {"level": "O2"}}))
    arguments = [str(tmp_path / "job.json"), "--job-dir", str(tmp_path / "run")]
    compilers = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy"]
    program = {
        "from octet import initialize": ["httpx", "ray", "octet.client", "octet.service"],
        "import octet.worker.train.loop": ["ray", *_NO_SERVICE],
        f"from octet.worker.rank.main import main; assert main({arguments!r}) == 0": ["ray", *compilers],
    }
    assert strangers_after(program) == {}
    assert (tmp_path / "run" / "summary.json").exists()


def strangers_after(program: dict[str, list[str]]) -> dict[str, list[str]]:
    """Run the statements in one new process. Return, by statement, the loaded modules of those that it must not load."""
    lines = ["import sys, json", "found = {}"]
    for statement, must_not_load in program.items():
        lines += [statement, f"found[{statement!r}] = sorted(set({must_not_load!r}) & set(sys.modules))"]
    lines.append("print(json.dumps({statement: strangers for statement, strangers in found.items() if strangers}))")
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    found: dict[str, list[str]] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_the_reading_list_is_ten_files() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = [ROOT / name for name in re.findall(r"^\d+\. `([^`]+)`", page, re.MULTILINE)]
    assert len(files) == 10
    assert [file for file in files if not file.is_file()] == []


def test_no_modules_of_the_runtime_import_each_other() -> None:
    """Imports under TYPE_CHECKING and inside functions count: whoever reads one module has to read the other."""
    assert circles(imports_within("worker")) == []


def test_no_contracts_import_each_other() -> None:
    assert circles(imports_within("api_schemas")) == []


def imports_within(package: str) -> dict[str, set[str]]:
    """The modules of a package, by their names in it, with those of its modules that each imports. Packages are left out."""
    paths = [path for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    names = {".".join(path.relative_to(ROOT / package).with_suffix("").parts): path for path in paths}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        imported = set()
        for node in ast.walk(parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[name] = {other.removeprefix(f"octet.{package}.") for other in imported} & (names.keys() - {name})
    return found


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the import cycles: sets of modules in which each module reaches all others by imports."""
    reached = {name: reachable(name, imports) for name in imports}
    sets = {frozenset(other for other in reached[name] if name in reached[other]) for name in imports}
    return [set(circle) for circle in sets if len(circle) > 1]


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    to_visit = [start]
    while to_visit:
        for name in imports[to_visit.pop()] - found:
            found.add(name)
            to_visit.append(name)
    return found


def test_a_circle_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str]()}
    assert circles(imports) == [{"a", "b", "c"}]
