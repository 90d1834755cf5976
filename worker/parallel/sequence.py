"""Sequence parallelism: between the layers of a block, each rank of the tensor axis has some tokens of every sequence.

Tokens are split before the first block that the model repeats and joined after the last one, so that positions, masks, the
final norm and the loss see all of them. Between two stages of a pipeline each rank sends its own tokens. Inside a block, norms,
dropout and the residual stream work on this rank's tokens. A module that holds column and row layers, as attention or an MLP,
gets all tokens: its input is gathered, and its row layer leaves each rank its tokens of the sum (`tokens.py`). What is applied
to some of the tokens has gradients of these, which are added up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from octet.worker.common.wrap import wrap
from octet.worker.mesh import Axis
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.model import Part, TensorRole
from octet.worker.parallel.rank_random import RankRandom
from octet.worker.parallel.tensor_layers import RowForward, add_up_gradients
from octet.worker.parallel.tokens import ColumnInput, join_tokens, row_output, split_tokens

COLUMN_ROLES: tuple[TensorRole, ...] = ("column", "column of 3")
LAYER_ROLES: tuple[TensorRole, ...] = (*COLUMN_ROLES, "row")
"""Roles of layers inside of blocks, around which tokens are gathered and added up."""


def check_sequence(model: nn.Module, roles: Mapping[str, TensorRole]) -> None:
    """Raise ValueError for a model whose layers, divided by these roles, do not leave whole modules between them."""
    blocks = {name for name, module in model.named_modules() if module in set(repeated_blocks(model))}
    if not blocks:
        raise ValueError(
            "sequence is set and the model repeats no blocks; allowed: models with an nn.ModuleList or nn.Sequential of alike "
            "blocks, in which ranks divide the tokens. Leave sequence out."
        )
    layers = {name: role for name, role in roles.items() if role in LAYER_ROLES}
    parents = {name: name.rpartition(".")[0] for name in layers}
    for name, parent in parents.items():
        if not any(parent.startswith(f"{block}.") for block in blocks):
            raise ValueError(
                f"sequence is set and {name} is divided outside of a module of a block; allowed: layers in modules of repeated "
                "blocks, as attention and MLP. Leave sequence out, or the layer out of the plan."
            )
        if {role == "row" for other, role in layers.items() if parents[other] == parent} != {True, False}:
            raise ValueError(
                f"sequence is set and {parent} has column layers or row layers alone; allowed: modules with both, which take "
                "and return the tokens of a block. Leave sequence out, or change the plan."
            )


def divide_tokens(model: nn.Module, roles: Mapping[str, TensorRole], axis: Axis, runs: Sequence[Part] = ()) -> None:
    """Let the ranks of the axis divide the tokens inside the blocks of a model whose layers they have divided already.

    runs: the runs of blocks that this rank computes in one go, where a pipeline divides the model.
    """
    parents: dict[str, list[nn.Module]] = {}
    for name, role in roles.items():
        layer, parent = model.get_submodule(name), name.rpartition(".")[0]
        if role in COLUMN_ROLES:
            parents.setdefault(parent, []).append(layer)
        elif role == "row":
            wrap(layer, RowTokensForward(axis))
            if (bias := layer._parameters.get("bias")) is not None and bias.requires_grad:
                bias.register_hook(lambda gradient: axis.sum_(gradient.clone()))
    for parent, layers in parents.items():
        model.get_submodule(parent).register_forward_pre_hook(_Gathered(ColumnInput(layers, axis)), with_kwargs=True)
    gathered = {part for parent in parents for part in model.get_submodule(parent).modules()}
    blocks = repeated_blocks(model)
    for block in blocks:
        for module in block.modules():
            if module not in gathered:
                add_up_gradients(module, axis)
    random = RankRandom(axis.device, axis.rank)
    ends = [([model.get_submodule(f"blocks.{index}") for index in run.blocks], run.is_first, run.is_last) for run in runs]
    for run, is_first, is_last in ends or [(blocks, True, True)]:
        run[0].register_forward_pre_hook(_Split(axis, random, is_first=is_first))
        run[-1].register_forward_hook(_Joined(axis, random, is_last=is_last))


class RowTokensForward(RowForward):
    """Leaves each rank its tokens of the sum."""

    def add_up(self, partial: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of all ranks' parts."""
        return row_output(partial, self.module, self.axis.axis)


class _Gathered:
    """A hook that gathers the input of a module of column layers: its first argument, or `hidden_states`."""

    def __init__(self, input: ColumnInput) -> None:
        self.input = input

    def __call__(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (self.input(arguments[0]), *arguments[1:]), options
        return arguments, options | {"hidden_states": self.input(options["hidden_states"])}


class _Split:
    """A hook of a run's first block: its input becomes this rank's tokens, and random numbers this rank's."""

    def __init__(self, axis: Axis, random: RankRandom, *, is_first: bool) -> None:
        """is_first: of the whole model. Any other takes this rank's tokens already, from the stage before."""
        self.axis, self.random, self.is_first = axis, random, is_first

    def __call__(self, block: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if not arguments:
            raise ValueError(
                f"{type(block).__name__} was called without positional arguments; allowed with sequence: blocks whose first "
                "argument are the activations. Leave sequence out."
            )
        self.random.enter(is_training=block.training)
        return (split_tokens(arguments[0], self.axis), *arguments[1:]) if self.is_first else arguments


class _Joined:
    """A hook of a run's last block: its output becomes that of all tokens."""

    def __init__(self, axis: Axis, random: RankRandom, *, is_last: bool) -> None:
        """is_last: of the whole model. Any other gives this rank's tokens to the next stage."""
        self.axis, self.random, self.is_last = axis, random, is_last

    def __call__(self, block: nn.Module, _arguments: tuple[Any, ...], output: Any) -> Tensor:
        self.random.leave()
        if not isinstance(output, Tensor):
            raise ValueError(
                f"{type(block).__name__} returned a {type(output).__name__}; allowed with sequence: blocks that return the "
                "activations alone. Leave sequence out."
            )
        return join_tokens(output, self.axis) if self.is_last else output
