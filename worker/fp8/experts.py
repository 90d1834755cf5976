"""Experts of a mixture that lie in one parameter (E, N, K), as a list of linear layers, which a level converts as any others.

transformers holds the experts of a layer in `gate_up_proj` and `down_proj`, and multiplies them by `grouped_mm`. Here each
matrix becomes a linear layer: its codes, scale, gradient, optimizer states and random numbers are those of any other, so a
mixture has the bits of separate layers. Tokens are sorted by expert, and each layer multiplies its run of them. An expert
without tokens keeps its scales, and its gradient is zero.

In a plain state dict the matrices are stacked again under the parameter's name, and split when they are loaded.
The router stays as it is. Shape suffixes: T tokens, S pairs of a token and an expert, E experts.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from octet.api_schemas.precision import PrecisionSpec
from octet.worker.common.wrap import Nesting, Wrapper, wrap, wrapper_of, wrappers_of
from octet.worker.fp8.casts import TRAINABLE_DTYPES
from octet.worker.fp8.layout import conv1d_of
from octet.worker.fp8.stored import is_exact
from octet.worker.fp8.weight import Entry, is_float8_weight

_MARKS = frozenset(("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated"))
"""Attributes that transformers' `use_experts_implementation` gives a class of experts, by which it computes any of them."""


class Stack(NamedTuple):
    """One tensor of a plain state dict, and the names of the tensors that it is stacked of, by expert."""

    name: str
    parts: tuple[str, ...]


class ReplacedStack(nn.Parameter):
    """A stacked parameter that its model has no more. An optimizer that was made of it would skip it, and train no expert."""

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        """Raise RuntimeError."""
        raise RuntimeError(
            f"a parameter of shape {tuple(self.shape)} is asked for its gradient, but its experts are parameters of their own "
            "since octet.initialize; allowed: an optimizer that initialize got, or that was made of model.parameters() after "
            "it. Pass the optimizer to initialize, or make it later."
        )


class ExpertLinears(nn.ModuleList):
    """The linear layers of one stacked parameter, by expert."""

    def forward(self, input_SK: Tensor, counts: list[int]) -> Tensor:
        """Multiply runs of rows by the weights of their experts. counts: rows of each expert, in the order of the rows."""
        runs = zip(self, input_SK.split(counts), counts, strict=True)
        # An expert without rows gets a gradient, of zeros, as each rank expects of every parameter.
        outputs = [expert(run) for expert, run, count in runs if count or torch.is_grad_enabled() or not len(input_SK)]
        return torch.cat(outputs)


class ExpertsForward(Wrapper):
    """Computes the experts of a layer as transformers does, by linear layers."""

    nesting = Nesting.LAYER

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum over the experts of each token, in the shape of `hidden_states`, (T, K).

        top_k_index, top_k_weights: the experts of each token and their weights, (T, experts of a token). The host waits for
        the number of tokens of each expert.
        """
        module: Any = self.module
        num_top_k = top_k_index.shape[-1]
        expert_S, order_S = top_k_index.reshape(-1).sort(stable=True)
        counts = torch.bincount(expert_S, minlength=module.num_experts).tolist()
        input_SK = hidden_states[order_S // num_top_k]
        up: ExpertLinears = module.gate_up_proj if module.has_gate else module.up_proj
        wide = up(input_SK, counts)
        down: ExpertLinears = module.down_proj
        output_SK = down(module._apply_gate(wide) if module.has_gate else module.act_fn(wide), counts)
        weighted_SK = output_SK * top_k_weights.reshape(-1)[order_S].unsqueeze(-1)
        # Brought back into the order of the tokens, so that the sum is repeated to the bit on any device.
        in_order = weighted_SK[order_S.argsort()].view(*top_k_index.shape, output_SK.shape[-1])
        return in_order.sum(-2).to(hidden_states.dtype)


def unstack_experts(model: nn.Module, precision: PrecisionSpec, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Hold each stacked expert of a model as a linear layer of its own, for a level that multiplies in FP8.

    Nothing happens at other levels, and a second time.

    The optimizer follows, with its states; any other that holds a stack raises when it steps. Raises ValueError, before
    anything is changed, where the optimizer holds states of a stack in few bits.
    """
    if precision.storage.gemm != "fp8":
        return
    found = [module for module in model.modules() if _is_stack_of_experts(module)]
    if optimizer is not None:
        _check_states(optimizer, found)
    for module in found:
        replaced: dict[Tensor, list[nn.Parameter]] = {}
        for name in _stacked(module):
            _unstack(module, name, replaced)
        wrap(module, ExpertsForward())
        module.register_state_dict_post_hook(_stack_saved)
        module.register_load_state_dict_pre_hook(_split_loaded)
        if optimizer is not None:
            _follow(optimizer, replaced)
        for stacked in replaced:
            if type(stacked) is nn.Parameter:
                stacked.__class__ = ReplacedStack


def expert_stacks(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters (E, N, K) that hold the experts of a model's layers; none where they are unstacked."""
    found = [module for module in model.modules() if _is_stack_of_experts(module)]
    return [module.get_parameter(name) for module in found for name in _stacked(module)]


def has_experts(model: nn.Module) -> bool:
    """Return True for a model with experts that were unstacked. The host waits for the device in each of their passes."""
    return any(wrapper_of(module, ExpertsForward) is not None for module in model.modules())


def stacks_of(model: nn.Module, prefix: str = "") -> Iterator[Stack]:
    """Yield the tensors of a plain state dict that are stacked of the experts' own."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, child in module._modules.items():
            if isinstance(child, ExpertLinears):
                stacked = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
                for own, suffix in (("weight", ""), ("bias", "_bias")):
                    if getattr(child[0], own, None) is not None:
                        yield Stack(stacked + suffix, tuple(f"{stacked}.{index}.{own}" for index in range(len(child))))


def stack_entries(model: nn.Module, state: MutableMapping[str, Any], prefix: str = "") -> None:
    """Put stacks in the place of their parts in a state dict of values, where it has them."""
    for stack in stacks_of(model, prefix):
        if stack.parts[0] in state:
            state[stack.name] = torch.stack([state.pop(part) for part in stack.parts])


def _stack_saved(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Give a plain state dict the names of transformers. What is written into a stack is written into weights of codes."""
    if is_exact():
        return
    stack_entries(module, state, prefix)
    for name, linears in module._modules.items():
        stacked = state.get(prefix + name)
        if not isinstance(linears, ExpertLinears) or stacked is None or stacked.requires_grad or stacked.is_inference():
            continue
        for linear, values in zip(linears, stacked, strict=True):
            weight = linear._parameters.get("weight")
            if is_float8_weight(weight) and weight.state.read_whole is None:
                weight.state.entries.append(Entry(weight, values, owner=stacked))


def _split_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Split the stacks of a state dict; one of another number of experts is named among the errors."""
    for stack in stacks_of(module, prefix):
        stacked = state.pop(stack.name, None)
        if stacked is not None and len(stacked) != len(stack.parts):
            rest[-1].append(
                f"size mismatch for {stack.name}: copying a param with shape {stacked.shape} from checkpoint, the current "
                f"model has {len(stack.parts)} experts."
            )
        elif stacked is not None:
            state.update(zip(stack.parts, stacked.unbind(), strict=True))


def _is_stack_of_experts(module: nn.Module) -> bool:
    """Return True for experts that transformers computes by its own rules for stacks, and that nobody has changed."""
    if not vars(module).keys() >= _MARKS or not hasattr(type(module), "_apply_gate"):
        return False
    attributes: Any = module
    biases = {f"{name}_bias" for name in _stacked(module)} if attributes.has_bias else set()
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    is_observed = any(hooks for attribute, hooks in vars(module).items() if "_hooks" in attribute and hooks)
    return (
        parameters.keys() == {*_stacked(module), *biases}
        and all(parameters[name].dim() == 3 and parameters[name].dtype in TRAINABLE_DTYPES for name in _stacked(module))
        and attributes.has_bias >= attributes.is_transposed  # a Conv1D has a bias
        and not is_observed
        and ("forward" not in vars(module) or bool(wrappers_of(module)))
    )


def _stacked(module: nn.Module) -> tuple[str, str]:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"


def _unstack(module: nn.Module, name: str, replaced: dict[Tensor, list[nn.Parameter]]) -> None:
    """Put a list of linear layers in the place of a stacked parameter, and of its biases."""
    attributes: Any = module
    weights = _split(module, name, replaced)
    biases: list[Any] = [None] * len(weights)
    if attributes.has_bias:
        biases = _split(module, f"{name}_bias", replaced)
    linears = ExpertLinears()
    for weight, bias in zip(weights, biases, strict=True):
        if attributes.is_transposed:
            linear = conv1d_of(weight, bias)
        else:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight, linear.bias = weight, bias
        linears.append(linear.train(module.training))
    setattr(module, name, linears.train(module.training))


def _split(module: nn.Module, name: str, replaced: dict[Tensor, list[nn.Parameter]]) -> list[nn.Parameter]:
    """Take a parameter out of a module. Returns one for each expert, with memory of its own."""
    stacked = module.get_parameter(name)
    delattr(module, name)
    parts = [nn.Parameter(part.clone(), requires_grad=stacked.requires_grad) for part in stacked.detach()]
    if stacked.grad is not None:
        for part, gradient in zip(parts, stacked.grad, strict=True):
            part.grad = gradient.clone()
    replaced[stacked] = parts
    return parts


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
            optimizer.state[part] = {name: _own(value, stacked, index) for name, value in state.items()}


def _own(value: Any, stacked: Tensor, index: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value[index] if value.shape == stacked.shape else value).clone()
