"""Find the blocks that a model repeats."""

from collections.abc import Iterator

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the children of its outermost lists whose children are alike.

    A list of stages of different shapes, as Swin's, is searched for the lists inside.
    """
    return list(_blocks(model))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and children and _are_alike(children):
        yield from children
        return
    for child in children:
        yield from _blocks(child)


def _are_alike(modules: list[nn.Module]) -> bool:
    """Return True if modules are of one class, hold modules with matrices, and have parameters of the same shapes."""
    kinds = {
        (type(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())) for module in modules
    }
    has_matrices = any(parameter.dim() > 1 for part in modules[0].children() for parameter in part.parameters())
    return len(kinds) == 1 and has_matrices
