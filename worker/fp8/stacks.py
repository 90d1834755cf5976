"""Hold the matrices that a module keeps in one parameter as linear layers of their own, which a level converts as any others.

`experts.py` does so for the experts of a mixture, `attention.py` for torch's own attention. Each matrix has its codes, scale,
gradient, optimizer states and random numbers then, so the module has the bits of separate layers. In a plain state dict the
matrices are joined again under the parameter's name, and split when they are loaded.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from octet.worker.common.wrap import Wrapper, wrap
from octet.worker.fp8.stored import is_exact
from octet.worker.fp8.weight import Entry, is_float8_weight

Replaced = dict[Tensor, list[nn.Parameter]]
"""By the parameter that its module has no more: the parameters of its matrices."""


class Stack(NamedTuple):
    """One tensor of a plain state dict, and the names of the tensors that it is joined of.

    is_flat: (matrices x rows, columns), else (matrices, rows, columns). is_divided: other ranks hold the rest of the matrices.
    """

    name: str
    parts: tuple[str, ...]
    is_flat: bool = False
    is_divided: bool = False

    def joined(self, tensors: Iterable[Tensor]) -> Tensor:
        """Join the tensors of the parts."""
        return torch.cat(list(tensors)) if self.is_flat else torch.stack(list(tensors))

    def split(self, joined: Tensor) -> tuple[Tensor, ...]:
        """Return views of the parts."""
        return joined.chunk(len(self.parts)) if self.is_flat else joined.unbind()

    def fits(self, joined: Tensor) -> bool:
        """Return True for a tensor of as many matrices."""
        return len(joined) % len(self.parts) == 0 if self.is_flat else len(joined) == len(self.parts)


class ReplacedStack(nn.Parameter):
    """A stacked parameter that its model has no more. An optimizer that was made of it would skip it, and train no matrix."""

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        """Raise RuntimeError."""
        raise RuntimeError(
            f"a parameter of shape {tuple(self.shape)} is asked for its gradient, but its matrices are parameters of their own "
            "since octet.initialize; allowed: an optimizer that initialize got, or that was made of model.parameters() after "
            "it. Pass the optimizer to initialize, or make it later."
        )


class StackedLinears(nn.ModuleList):
    """The linear layers of one stacked parameter, under the name that `suffixes` completes to those of weight and bias."""

    is_flat: ClassVar[bool] = False
    suffixes: ClassVar[dict[str, str]] = {"weight": "", "bias": "_bias"}


def unstack(
    modules: list[nn.Module],
    take_apart: Callable[[nn.Module, Replaced], None],
    wrapper: type[Wrapper],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Put linear layers in the place of the stacked parameters of modules, which compute by a wrapper from then on.

    The optimizer follows, with its states; any other that holds a stack raises when it steps. Raises ValueError, before
    anything is changed, where the optimizer holds states of a stack in few bits.
    """
    if optimizer is not None:
        _check_states(optimizer, modules)
    for module in modules:
        replaced: Replaced = {}
        take_apart(module, replaced)
        wrap(module, wrapper())
        module.register_state_dict_post_hook(_stack_saved)
        module.register_load_state_dict_pre_hook(_split_loaded)
        if optimizer is not None:
            _follow(optimizer, replaced)
        for stacked in replaced:
            if type(stacked) is nn.Parameter:
                stacked.__class__ = ReplacedStack


def split_parameter(module: nn.Module, name: str, replaced: Replaced, num_rows: int | None = None) -> list[nn.Parameter]:
    """Take a parameter out of a module. Returns one for each matrix, with memory of its own.

    num_rows: of each matrix, where they lie one below the other.
    """
    stacked = module.get_parameter(name)
    delattr(module, name)
    cut = (lambda tensor: tensor) if num_rows is None else (lambda tensor: tensor.unflatten(0, (-1, num_rows)))
    parts = [nn.Parameter(part.clone(), requires_grad=stacked.requires_grad) for part in cut(stacked.detach())]
    if stacked.grad is not None:
        for part, gradient in zip(parts, cut(stacked.grad), strict=True):
            part.grad = gradient.clone()
    replaced[stacked] = parts
    return parts


def stacks_of(model: nn.Module, prefix: str = "") -> Iterator[Stack]:
    """Yield the tensors of a plain state dict that are joined of the layers' own."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, child in module._modules.items():
            if isinstance(child, StackedLinears):
                stacked = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
                held = {index: layer for index, layer in child._modules.items() if layer is not None}
                for own, suffix in child.suffixes.items():
                    if all(getattr(layer, own, None) is not None for layer in held.values()):
                        parts = tuple(f"{stacked}.{index}.{own}" for index in held)
                        yield Stack(stacked + suffix, parts, child.is_flat, is_divided=len(held) < len(child))


def stack_entries(model: nn.Module, state: MutableMapping[str, Any], prefix: str = "") -> None:
    """Put stacks in the place of their parts in a state dict of values, where it has them."""
    for stack in stacks_of(model, prefix):
        if stack.parts[0] in state:
            state[stack.name] = stack.joined(state.pop(part) for part in stack.parts)


def _stack_saved(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Give a plain state dict the plain names. What is written into a stack is written into weights of codes."""
    if is_exact():
        return
    stack_entries(module, state, prefix)
    for stack in stacks_of(module, prefix):
        stacked = state.get(stack.name)
        if stacked is None or stacked.requires_grad or stacked.is_inference():
            continue
        for part, values in zip(stack.parts, stack.split(stacked), strict=True):
            layer, _, own = part.removeprefix(prefix).rpartition(".")
            weight = module.get_submodule(layer)._parameters.get(own)
            if is_float8_weight(weight) and weight.state.read_whole is None:
                weight.state.entries.append(Entry(weight, values, owner=stacked))


def _split_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Split the stacks of a state dict; one of another number of matrices is named among the errors."""
    for stack in stacks_of(module, prefix):
        stacked = state.pop(stack.name, None)
        if stacked is not None and not stack.fits(stacked):
            rest[-1].append(
                f"size mismatch for {stack.name}: copying a param with shape {stacked.shape} from checkpoint, the current "
                f"model has {len(stack.parts)} matrices there."
            )
        elif stacked is not None:
            state.update(zip(stack.parts, stack.split(stacked), strict=True))


def _check_states(optimizer: torch.optim.Optimizer, found: list[nn.Module]) -> None:
    """Refuse states of a stack that are not torch's own."""
    torchs_own = type(optimizer).__module__.startswith("torch.")
    for module in found:
        if not torchs_own and any(optimizer.state.get(parameter) for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"the optimizer, a {type(optimizer).__name__}, has stepped experts that lie in one tensor; allowed: one of "
                "torch, or one that has not stepped. Call initialize before the first step."
            )


def _follow(optimizer: torch.optim.Optimizer, replaced: dict[Tensor, list[nn.Parameter]]) -> None:
    """Give an optimizer the parts in the place of what they were split from, in its groups and states."""
    for group in optimizer.param_groups:
        group["params"] = [part for held in group["params"] for part in replaced.get(held, [held])]
    for stacked, parts in replaced.items():
        state = optimizer.state.pop(stacked, {})
        for index, part in enumerate(parts if state else ()):
            optimizer.state[part] = {name: _own(value, stacked, parts, index) for name, value in state.items()}


def _own(value: Any, stacked: Tensor, parts: list[nn.Parameter], index: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape != stacked.shape:
        return value.clone()
    return value.view(len(parts), *parts[index].shape)[index].clone()
