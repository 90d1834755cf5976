"""Files and functions stay within the budgets of the style guide, and every module says what it is for."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("api_schemas", "service", "worker", "client", "octet", "benchmarks")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 100
MAX_DOCSTRING_LINES = 15


def sources() -> list[Path]:
    return sorted(
        path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "migrations/versions" not in path.as_posix()
    )


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_file_is_within_its_budgets(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    num_lines = len(text.splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{num_lines} lines; allowed: {MAX_FILE_LINES}. Split it by what it does."
    assert list(over_long_functions(tree)) == []
    if tree.body:
        docstring = ast.get_docstring(tree)
        assert docstring, "a module opens with what it is for"
        assert len(docstring.splitlines()) <= MAX_DOCSTRING_LINES, "the module docstring is longer than 15 lines"


def over_long_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            is_kernel = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
            allowed = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
            if num_lines > allowed:
                yield f"{node.name}: {num_lines} lines; allowed: {allowed}"
