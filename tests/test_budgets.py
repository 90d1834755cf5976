"""Coupling and length stay within the budgets of CONTRIBUTING.md: imports of the loop, private names, functions, docstrings."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.kit.source import parse

ROOT = Path(__file__).parent.parent
PACKAGES = ("api_schemas", "service", "worker", "client", "octet", "benchmarks", "deploy")
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100
LONG_FUNCTIONS = {"worker/parallel/parallelize.py: parallelize": 71}
"""The functions that are longer. The list may only shrink, and no function may have more than 80 lines."""
MAX_DOCSTRING_LINES = 15
LOOP = "worker/train/loop.py"
MAX_IMPORTS_OF_THE_LOOP = 20
"""The loop is like torchtitan's trainer: it declares its parts, and the parts do the work."""
OF_TORCH_OR_PYTHON = {
    *("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks"),  # of torch.nn.Module
    *("_version", "_scaled_mm"),  # of tensors and torch
    *("_replace", "_asdict", "_fields", "_exit"),  # of named tuples and os
}


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each of our modules, by path. The links in `octet/` and written migrations are left out."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = sorted({path.resolve().relative_to(ROOT.resolve()).as_posix() for path in paths})
    return {name: parse((ROOT / name).read_text()) for name in names if "migrations/versions" not in name}


def test_the_house_is_within_its_budgets() -> None:
    offenders = [*long_functions(), *docstrings(), *imports_of_the_loop(), *private_reads()]
    assert not offenders, "\n" + "\n".join(offenders)


def long_functions() -> Iterator[str]:
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                is_kernel = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
                default = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
                allowed = LONG_FUNCTIONS.get(f"{path}: {node.name}", default)
                if num_lines > allowed:
                    yield f"{path}: {node.name} has {num_lines} lines; allowed: {allowed}. Split it by what it does."


def docstrings() -> Iterator[str]:
    for path, tree in modules().items():
        docstring = ast.get_docstring(tree)
        if tree.body and not docstring:
            yield f"{path}: no docstring. Open the module with what it is for."
        elif docstring and len(docstring.splitlines()) > MAX_DOCSTRING_LINES:
            yield f"{path}: its docstring has {len(docstring.splitlines())} lines; allowed: {MAX_DOCSTRING_LINES}"


def imports_of_the_loop() -> Iterator[str]:
    found: set[str] = set()
    for node in ast.walk(modules()[LOOP]):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("octet."):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if is_module(name) else node.module or "" for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("octet.")}
    if len(found) > MAX_IMPORTS_OF_THE_LOOP:
        yield f"{LOOP} imports {len(found)} of our modules; allowed: {MAX_IMPORTS_OF_THE_LOOP}: {', '.join(sorted(found))}"


def is_module(name: str) -> bool:
    path = ROOT / name.removeprefix("octet.").replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_TORCH_OR_PYTHON


def private_names(tree: ast.Module) -> tuple[set[str], dict[str, list[int]]]:
    """Return the private names that a module defines, and those that it reads from others with the lines."""
    defined: set[str] = set()
    read: dict[str, list[int]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            defined |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            read[node.attr].append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(("octet.", "benchmarks.", "deploy.")):
            for alias in node.names:
                if is_private(alias.name):
                    read[alias.name].append(node.lineno)
    return {name for name in defined if is_private(name)}, {name: read[name] for name in read if name not in defined}


def private_reads() -> Iterator[str]:
    """Yield private names that are read outside the module that defines them."""
    found = {path: private_names(tree) for path, tree in modules().items()}
    ours = {name for defined, _ in found.values() for name in defined}
    for path, (_, read) in found.items():
        for name in sorted(read.keys() & ours):
            yield f"{path}: reads {name} of another module, lines {read[name]}. Give it a public name there."
