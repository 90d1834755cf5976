"""Wrappers nest in one order, are listed, copied and taken off; one module assigns `forward`."""

import ast
import copy
import inspect
import io
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.worker import fuse_loss, initialize, keep_activations_in_fp8
from octet.worker.common.wrap import Nesting, Wrapper, count_wrappers, unwrap, wrap, wrapper_of, wrappers_of
from octet.worker.prepare.blocks import checkpoint_blocks
from tests.kit.families import FAMILIES, batch_of

WORKER = Path(__file__).parents[3] / "worker"
CALLS: list[str] = []


class _Recorded(Wrapper):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(type(self).__name__)
        return self.run(*args, **kwargs)


class Autocast(_Recorded):
    nesting = Nesting.AUTOCAST


class Checkpoint(_Recorded):
    nesting = Nesting.CHECKPOINT


class Layer(_Recorded):
    nesting = Nesting.LAYER


class Block(nn.Module):
    def forward(self, hidden: Tensor, scale: float = 2.0) -> Tensor:
        return hidden * scale


def calls_of(block: nn.Module) -> list[str]:
    CALLS.clear()
    assert block(torch.ones(2), scale=3.0).tolist() == [3.0, 3.0]
    return list(CALLS)


@pytest.mark.parametrize("order", list(permutations((Autocast, Checkpoint, Layer))))
def test_wrappers_nest_alike_in_any_order_of_calls(order: tuple[type[_Recorded], ...]) -> None:
    block = Block()
    for kind in order:
        wrap(block, kind(), as_object=kind is Autocast)
    assert calls_of(block) == ["Autocast", "Checkpoint", "Layer"]
    assert wrapper_of(block, Checkpoint) is wrappers_of(block)[1]
    assert list(inspect.signature(wrappers_of(block)[0]).parameters) == ["hidden", "scale"]


def test_what_a_user_assigned_is_called_innermost_and_is_there_again() -> None:
    block = Block()
    own = lambda hidden, scale: 3 * hidden  # noqa: E731
    block.forward = own
    for kind in (Layer, Autocast):
        wrap(block, kind())
    assert calls_of(block) == ["Autocast", "Layer"]
    unwrap(block)
    assert block.forward is own


def test_copies_and_pickles_have_wrappers_of_their_own() -> None:
    block = Block()
    for kind in (Layer, Autocast):
        wrap(block, kind())
    buffer = io.BytesIO()
    torch.save(block, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(block), torch.load(buffer, weights_only=False)):
        assert calls_of(twin) == ["Autocast", "Layer"]
        assert all(wrapper.module is twin for wrapper in wrappers_of(twin))


def test_a_report_counts_the_wrappers_that_a_model_has_when_it_is_printed() -> None:
    model, _ = initialize(FAMILIES["llama"](), opt_level="O2")
    assert "forward   by AutocastForward: 1 Llama, 1 Block" in str(model.octet_report)
    assert "forward   by SavingForward" not in str(model.octet_report)
    keep_activations_in_fp8(model)
    fuse_loss(model)
    lines = str(model.octet_report).splitlines()
    assert "  forward   by SavingForward: 1 Block" in lines
    assert [line.split()[2] for line in lines if line.startswith("  forward")] == [
        "AutocastForward:",
        "SavingForward:",
        "DeferredHead:",
        "GatedForward:",
        "NormForward:",
    ]


def test_an_unwrapped_model_computes_as_its_classes_do() -> None:
    """On a CPU wrappers change no value, so all of it can be compared."""
    model, _ = initialize(FAMILIES["gpt"](), opt_level="O2")
    checkpoint_blocks(model, "full")
    expected = model.loss(batch_of("gpt")).loss
    unwrap(model)
    assert count_wrappers(model) == {}
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model.loss(batch_of("gpt")).loss, expected)


def test_one_module_assigns_forward() -> None:
    found = {path.relative_to(WORKER).as_posix() for path in WORKER.rglob("*.py") if any(_assigns_forward(path.read_text()))}
    assert found == {"common/wrap.py"}


def _assigns_forward(source: str) -> list[ast.AST]:
    """The statements that assign or delete an attribute `forward`, by any of Python's ways."""
    found: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "forward" and isinstance(node.ctx, ast.Store | ast.Del):
            found.append(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            found += [node for argument in node.args if isinstance(argument, ast.Constant) and argument.value == "forward"]
    return found
