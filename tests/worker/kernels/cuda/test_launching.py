"""A launch that Triton has made once is made again without it, and only where nothing that it specializes on has changed."""

import ast
import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octet.worker.kernels.cuda import launching
from octet.worker.kernels.cuda.launching import Launcher, PreparedLaunch

X = torch.zeros(64)


class Compiled:
    function, packed_metadata = 7, (8,)

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)


class Device:
    def get_current_device(self) -> int:
        return X.get_device()

    def get_current_stream(self, device: int) -> int:
        return 100 + device


def add_one(x, num_elements, BLOCK):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def by_triton() -> Iterator[list[Compiled]]:
    """Yield the list of kernels that Triton's own launch returns, in order."""
    made: list[Compiled] = []

    def run(_kernel: Any, *_arguments: Any, **options: Any) -> Compiled:
        assert options["grid"] == (5,)
        assert options["num_warps"] == 8
        made.append(Compiled())
        return made[-1]

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(driver, "_active", Device()),
        mock.patch.dict(launching.COMPILED, clear=True),
    ):
        yield made


@pytest.fixture
def launch() -> Launcher:
    return Launcher(JITFunction(add_one), num_warps=8)


def test_a_second_launch_runs_the_compiled_kernel(by_triton: list[Compiled], launch: Launcher) -> None:
    other = torch.ones(64)
    launch(5, X, 64, None)
    launch(6, other, 64, None)
    [compiled] = by_triton
    [(*head, first, second, third)] = compiled.runs
    hooks = triton.knobs.runtime
    assert head == [6, 1, 1, 100 + X.get_device(), 7, (8,), None, hooks.launch_enter_hook, hooks.launch_exit_hook]
    assert first is other
    assert (second, third) == (64, None)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_launch_is_made_on_the_device_of_its_tensors(
    by_triton: list[Compiled], launch: Launcher, monkeypatch: pytest.MonkeyPatch, is_prepared: bool
) -> None:
    present = [3]  # the tensors are on 1

    @contextmanager
    def on(index: int) -> Iterator[None]:
        present.append(index)
        yield
        present.pop()

    monkeypatch.setattr(Device, "get_current_device", lambda _self: present[-1])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(Tensor, "get_device", lambda _self: 1)
    make = PreparedLaunch(launch, 5, 64, None, num_given=1) if is_prepared else lambda x: launch(5, x, 64, None)
    for _ in range(2):
        make(X)
    [compiled] = by_triton
    assert [run[3] for run in compiled.runs] == [101]
    assert present == [3]


@pytest.mark.parametrize(
    "arguments", [(X, 63, None), (X, 64, "silu"), (X.half(), 64, None), (X[1:], 64, None), (X, 64.0, None)]
)
def test_other_arguments_go_through_triton(
    by_triton: list[Compiled], launch: Launcher, arguments: tuple[Tensor, Any, Any]
) -> None:
    launch(5, X, 64, None)
    launch(5, *arguments)
    assert len(by_triton) == 2
    assert by_triton[0].runs == []


def test_two_kernels_share_nothing(by_triton: list[Compiled], launch: Launcher) -> None:
    launch(5, X, 64, None)
    Launcher(JITFunction(add_one), num_warps=8)(5, X, 64, None)
    assert len(by_triton) == 2


def test_a_hook_sees_each_launch(by_triton: list[Compiled], launch: Launcher) -> None:
    launch(5, X, 64, None)
    with mock.patch.object(triton.knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print])):
        launch(5, X, 64, None)
    assert len(by_triton) == 2


def test_a_prepared_launch_runs_the_compiled_kernel(by_triton: list[Compiled], launch: Launcher) -> None:
    prepared = PreparedLaunch(launch, 5, 64, None, num_given=1)
    prepared(X)
    other = torch.ones(64)
    prepared(other)
    [compiled] = by_triton
    [(num_programs, *_, first, second, third)] = compiled.runs
    assert (num_programs, second, third) == (5, 64, None)
    assert first is other


def test_a_prepared_launch_of_unaligned_memory_that_it_is_given_goes_through_triton(
    by_triton: list[Compiled], launch: Launcher
) -> None:
    prepared = PreparedLaunch(launch, 5, 64, num_given=2)
    prepared(X, None)
    prepared(X[1:], None)
    prepared(X, X[1:])
    assert len(by_triton) == 3
    assert by_triton[0].runs == []


def test_a_hook_sees_each_prepared_launch(by_triton: list[Compiled], launch: Launcher) -> None:
    prepared = PreparedLaunch(launch, 5, 64, None, num_given=1)
    prepared(X)
    with mock.patch.object(triton.knobs.runtime, "launch_exit_hook", SimpleNamespace(calls=[print])):
        prepared(X)
    assert len(by_triton) == 2


def test_shapes_without_end_do_not_fill_the_memory(by_triton: list[Compiled], launch: Launcher) -> None:
    with mock.patch.object(launching, "MOST_KNOWN", 4):
        for num_elements in range(9):
            launch(5, X, num_elements, None)
    assert len(launching.COMPILED) <= 4


def launches_by_grid(source: str, kernels: set[str]) -> list[int]:
    """Return the lines that launch by Triton's own `kernel[grid]`: of a named kernel, or by a grid that is a tuple.

    A built-in type is no kernel: `dict[str, int]()` makes an empty dictionary.
    """
    called = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    subscripts = [node for node in called if isinstance(node, ast.Subscript)]
    return [
        node.lineno
        for node in subscripts
        if ast.unparse(node.value).rpartition(".")[2] in kernels
        or (isinstance(node.slice, ast.Tuple) and not hasattr(builtins, ast.unparse(node.value)))
    ]


def kernels_in(source: str) -> set[str]:
    """Return the names of the functions that `triton.jit` compiles."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)}


@pytest.mark.system
def test_only_the_launcher_launches_by_triton() -> None:
    """Triton launches on the current device, wherever the tensors are."""
    sources = {path: path.read_text() for path in Path(launching.__file__).parents[2].rglob("*.py")}
    kernels = set().union(*map(kernels_in, sources.values()))
    assert len(kernels) > 50
    found = {path.name: lines for path, source in sources.items() if (lines := launches_by_grid(source, kernels))}
    assert list(found) == ["launching.py"]
    assert len(found["launching.py"]) == 1


@pytest.mark.parametrize("line", ["a_kernel[grid](x)", "module.a_kernel[n](x, num_warps=4)", "other[(1,)](x)"])
def test_a_launch_by_grid_is_seen(line: str) -> None:
    assert launches_by_grid(line, {"a_kernel"}) == [1]
    assert launches_by_grid("TABLE[kind](x); a_kernel(x)[0]; dict[str, int]()", {"a_kernel"}) == []
