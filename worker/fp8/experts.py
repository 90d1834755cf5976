"""Experts of a mixture that lie in one parameter (E, N, K), as a list of linear layers, which a level converts as any others.

transformers holds the experts of a layer in `gate_up_proj` and `down_proj`, and multiplies them by `grouped_mm`. Here each
matrix becomes a linear layer (`stacks.py`). Tokens are sorted by expert, and all layers multiply their runs in one op
(`grouped.py`), or one after another where they cannot. An expert without tokens keeps its scales, and its gradient is zero.

The router stays as it is. Shape suffixes: T tokens, S pairs of a token and an expert, E experts.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octet.api_schemas.precision import PrecisionSpec
from octet.worker.common.wrap import Nesting, Wrapper, wrapper_of, wrappers_of
from octet.worker.fp8.casts import TRAINABLE_DTYPES
from octet.worker.fp8.grouped import Exchange, are_grouped, grouped_linear
from octet.worker.fp8.layout import conv1d_of
from octet.worker.fp8.stacks import Replaced, StackedLinears, split_parameter, unstack

_MARKS = frozenset(("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated"))
"""Attributes that transformers' `use_experts_implementation` gives a class of experts, by which it computes any of them."""


class ExpertLinears(StackedLinears):
    """The linear layers of one stacked parameter, by expert; None for an expert that another rank holds."""

    @property
    def held(self) -> dict[int, Any]:
        """The layers that are here, by expert."""
        return {int(name): layer for name, layer in self._modules.items() if layer is not None}

    def __init__(self) -> None:
        super().__init__()
        self.exchange = Exchange()

    @property
    def first(self) -> Any:
        """One of the layers here."""
        return next(iter(self.held.values()))

    @property
    def are_grouped(self) -> bool:
        """True if the products of all experts here are computed together."""
        return are_grouped([*self.held.values()])

    @property
    def take_codes(self) -> bool:
        """True if an operand of all experts here can come in codes, made with the scales of the tensor at hand."""
        return self.are_grouped and not self.first.input_scaling.has_window

    def forward(self, input_SK: Tensor, counts: list[int]) -> Tensor:
        """Multiply runs of rows by the weights of their experts. counts: rows of each, in the order of the rows."""
        if self.are_grouped:
            return grouped_linear([*self.held.values()], input_SK, counts, self.exchange)
        runs = zip(self.held.values(), input_SK.split(counts), counts, strict=True)
        # An expert without rows gets a gradient, of zeros, as each rank expects of every parameter.
        outputs = [expert(run) for expert, run, count in runs if count or torch.is_grad_enabled() or not len(input_SK)]
        return torch.cat(outputs)


class ExpertsForward(Wrapper):
    """Computes the experts of a layer as transformers does, by linear layers."""

    nesting = Nesting.LAYER
    num_rows: Sequence[int] = ()
    """Rows of each expert in the last forward pass."""

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum over the experts of each token, in the shape of `hidden_states`, (T, K).

        top_k_index, top_k_weights: the experts of each token and their weights, (T, experts of a token). The host waits for
        the number of tokens of each expert.
        """
        num_top_k = top_k_index.shape[-1]
        expert_S, order_S = top_k_index.reshape(-1).sort(stable=True)
        output_SK = self.of_experts(hidden_states[order_S // num_top_k], expert_S)
        weighted_SK = output_SK * top_k_weights.reshape(-1)[order_S].unsqueeze(-1)
        # Brought back into the order of the tokens, so that the sum is repeated to the bit on any device.
        in_order = weighted_SK[order_S.argsort()].view(*top_k_index.shape, output_SK.shape[-1])
        return in_order.sum(-2).to(hidden_states.dtype)

    def of_experts(self, input_SK: Tensor, expert_S: Tensor) -> Tensor:
        """Return the output of each row's expert, (S, K). expert_S: the experts of the rows, ascending."""
        module: Any = self.module
        self.num_rows = torch.bincount(expert_S, minlength=module.num_experts).tolist()
        return self.multiply(input_SK, self.num_rows)

    def multiply(self, input_SK: Tensor, counts: list[int]) -> Tensor:
        """Apply the experts that are here to runs of rows. counts: rows of each."""
        module: Any = self.module
        wide = self.up(input_SK, counts)
        output_SK: Tensor = self.down(module._apply_gate(wide) if module.has_gate else module.act_fn(wide), counts)
        return output_SK

    @property
    def up(self) -> ExpertLinears:
        """The layers that read the tokens."""
        linears: ExpertLinears = self.module.get_submodule(_stacked(self.module)[0])  # type: ignore[assignment]
        return linears

    @property
    def down(self) -> ExpertLinears:
        """The layers that write the output."""
        linears: ExpertLinears = self.module.get_submodule("down_proj")  # type: ignore[assignment]
        return linears


def unstack_experts(model: nn.Module, precision: PrecisionSpec, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Hold each stacked expert of a model as a linear layer of its own, for a level that multiplies in FP8.

    Nothing happens at other levels, and a second time.

    The optimizer follows, as in `stacks.unstack`.
    """
    if precision.storage.gemm != "fp8":
        return
    found = [module for module in model.modules() if _is_stack_of_experts(module)]
    unstack(found, _take_apart, ExpertsForward, optimizer)


def expert_stacks(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters (E, N, K) that hold the experts of a model's layers; none where they are unstacked."""
    found = [module for module in model.modules() if _is_stack_of_experts(module)]
    return [module.get_parameter(name) for module in found for name in _stacked(module)]


def experts_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the layers of experts that were unstacked, by name: the expert of each, and the number in its mixture."""
    stacks = ((name, linears) for name, linears in model.named_modules() if isinstance(linears, ExpertLinears))
    return {f"{name}.{expert}": (expert, len(linears)) for name, linears in stacks for expert in linears.held}


def mixtures_of(model: nn.Module) -> dict[str, ExpertsForward]:
    """Return what computes the experts of a model's layers, by the name of the module that holds them."""
    found = {name: wrapper_of(module, ExpertsForward) for name, module in model.named_modules()}
    return {name: forward for name, forward in found.items() if forward is not None}


def has_experts(model: nn.Module) -> bool:
    """Return True for a model with experts that were unstacked. The host waits for the device in each of their passes."""
    return bool(mixtures_of(model))


def expert_loads(mixtures: Iterable[ExpertsForward]) -> list[tuple[float, float]]:
    """Return, for each mixture, the rows of the expert with fewest and of that with most, over the mean, last pass."""
    passes = [forward.num_rows for forward in mixtures if sum(forward.num_rows)]
    return [(min(rows) * len(rows) / sum(rows), max(rows) * len(rows) / sum(rows)) for rows in passes]


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


def _take_apart(module: nn.Module, replaced: Replaced) -> None:
    for name in _stacked(module):
        _unstack(module, name, replaced)


def _unstack(module: nn.Module, name: str, replaced: Replaced) -> None:
    """Put a list of linear layers in the place of a stacked parameter, and of its biases."""
    attributes: Any = module
    weights = split_parameter(module, name, replaced)
    biases: list[Any] = [None] * len(weights)
    if attributes.has_bias:
        biases = split_parameter(module, f"{name}_bias", replaced)
    linears = ExpertLinears()
    for weight, bias in zip(weights, biases, strict=True):
        if attributes.is_transposed:
            linear = conv1d_of(weight, bias)
        else:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight, linear.bias = weight, bias
        linears.append(linear.train(module.training))
    setattr(module, name, linears.train(module.training))
