"""Split a model into the stages of a pipeline: the modules of each stage, and calls of one stage.

A gpt or llama of ours computes a part by its own `forward`. An `nn.Sequential` is divided between its children. Any other model
is divided between the entries of a list of blocks: modules registered before the list belong to the first stage, those behind
it to the last one, and those without parameters to all. Its `forward` takes the input of the first stage or the output of the
stage before, leaves out modules that are None, and finds in the list the blocks of its stage alone. This is the form in which
models are divided by hand for `torch.distributed.pipelining`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.models.model import Losses, Part, TrainedModel
from octet.worker.parallel.batches import Inputs

FIRST, LAST = ("token_embedding", "position_embedding"), ("final_norm", "head")
"""Modules of our language models that only the first stage, and only the last stage, needs."""


class ModelSplit(ABC):
    """A whole model's modules by stage, and calls of one stage. blocks, first, last: names of modules."""

    def __init__(self, model: Any, blocks: Sequence[str], first: Sequence[str], last: Sequence[str]) -> None:
        self.model, self.blocks, self.first, self.last = model, tuple(blocks), tuple(first), tuple(last)
        self.is_running = False
        """True while the model is called for one of its stages."""

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the outputs of stages, in a language model of ours."""
        return getattr(self.model, "residual_dtype", torch.float32)

    def names(self, part: Part) -> list[str]:
        """Return the names of the modules that a stage holds."""
        own = [self.blocks[index] for index in part.blocks]
        return [*(self.first if part.is_first else ()), *own, *(self.last if part.is_last else ())]

    def absent(self, parts: Iterable[Part]) -> list[str]:
        """Return the names of the modules that a rank with these stages lacks."""
        kept = {name for part in parts for name in self.names(part)}
        return [name for name in (*self.blocks, *self.first, *self.last) if name not in kept]

    def output(self, part: Part, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        """Return the output of a stage. inputs: of the model, for the first stage; hidden: the output of the stage before."""
        with self.within(part):
            return self._called(part, inputs, hidden)

    def loss(self, part: Part, batch: Mapping[str, Tensor], hidden: Tensor | None) -> Losses:
        """Return the losses of a batch by the model's own `loss`, in the last stage."""
        with self.within(part):
            found: Losses = self.model.loss(batch, part=part, hidden_BTD=hidden)
            return found

    @abstractmethod
    def hidden_shape(self, inputs: Inputs) -> tuple[int, ...] | None:
        """Return the shape of the output of any stage but the last for these inputs; None where only a pass shows it."""

    def attach(self) -> None:  # noqa: B027 - most models need nothing
        """Follow calls of the model, in which this rank has its own stages alone from now on."""

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Inside, passes of the stage run, forward or backward."""
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before

    @contextmanager
    def showing(self, part: Part) -> Iterator[None]:
        """Inside, a backward pass of the stage runs, which may call parts of the model again."""
        with self.within(part):
            yield

    @abstractmethod
    def _called(self, part: Part, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        """Call the model for a stage, inside of `within`."""


class FamilySplit(ModelSplit):
    """The split of a language model of ours."""

    def __init__(self, model: Any) -> None:
        blocks = [f"blocks.{index}" for index in range(len(model.blocks))]
        super().__init__(model, blocks, [name for name in FIRST if hasattr(model, name)], LAST)

    def hidden_shape(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the shape of the hidden state of all tokens, (B, T, D)."""
        tokens_BT = inputs if isinstance(inputs, Tensor) else inputs["tokens"]
        return (*tokens_BT.shape, self.model.sizes.hidden_size)

    def _called(self, part: Part, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        tokens, documents = (inputs, None) if isinstance(inputs, Tensor) else (inputs["tokens"], inputs.get("documents"))
        output: Tensor = self.model(tokens, documents, part=part, hidden_BTD=hidden)
        return output


class BlockListSplit(ModelSplit):
    """The split of somebody's own model, whose stages see their own modules and no others."""

    def __init__(self, model: nn.Module, holder: str) -> None:
        """holder: the name of the list of blocks; empty for an nn.Sequential, whose children are the blocks."""
        self.holder = model.get_submodule(holder)
        self._part: Part | None = None
        self._held: tuple[Any, Any] | None = None
        """The modules of the model and of the list that the rank holds, while others are shown."""
        around: tuple[list[str], list[str]] = ([], [])
        if holder:
            names = list(model._modules)
            for index, name in enumerate(names):
                child = model._modules[name]
                if child is not None and name != holder and any(True for _ in child.parameters()):
                    around[index > names.index(holder)].append(name)
        prefix = f"{holder}." if holder else ""
        super().__init__(model, [f"{prefix}{key}" for key in self.holder._modules], *around)

    def hidden_shape(self, inputs: Inputs) -> None:
        """Return None: only a pass through the model shows it."""

    def attach(self) -> None:
        """Show a stage its own modules in the model's `forward`. Other hooks of the model see all that the rank holds."""
        self.model.register_forward_pre_hook(self._show)
        self.model.register_forward_hook(self._hide, prepend=True, always_call=True)

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Inside, the stage's passes run."""
        before, self._part = self._part, part
        try:
            with super().within(part):
                yield
        finally:
            self._part = before

    @contextmanager
    def showing(self, part: Part) -> Iterator[None]:
        """Inside, the model has the modules of the stage alone."""
        with self.within(part):
            self._show()
            try:
                yield
            finally:
                self._hide()

    def _show(self, *_call: Any) -> None:
        part = self._part
        if part is None or self._held is not None:
            return
        names = [self.blocks[index] for index in part.blocks]
        own = {name.rpartition(".")[2]: self.model.get_submodule(name) for name in names}
        of_others = {*(() if part.is_first else self.first), *(() if part.is_last else self.last)}
        of_model = self.model._modules
        self._held = of_model, self.holder._modules
        vars(self.model)["_modules"] = {name: None if name in of_others else child for name, child in of_model.items()}
        vars(self.holder)["_modules"] = own

    def _hide(self, *_call: Any) -> None:
        if self._held is not None:
            vars(self.holder)["_modules"] = self._held[1]
            vars(self.model)["_modules"] = self._held[0]
            self._held = None

    def _called(self, part: Part, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        output: Tensor = self.model(inputs if hidden is None else hidden)
        return output


def split_of(model: nn.Module, blocks: str | None = None) -> ModelSplit:
    """Return the split of a whole model. blocks: the list of blocks of a model that is neither ours nor a sequence.

    Raises ValueError for a model that cannot be divided.
    """
    if isinstance(model, TrainedModel):
        sizes = getattr(model, "sizes", None)
        if sizes is None or not sizes.capabilities.pipeline:
            raise ValueError(_refusal(model, "whose parts are not computed apart"))
        if blocks is not None:
            raise ValueError(
                f"blocks is {blocks!r} and the model a {type(model).__name__}, which knows its own; allowed: blocks for models "
                "that are not ours. Leave it out."
            )
        return FamilySplit(model)
    if blocks is None:
        if not isinstance(model, nn.Sequential):
            raise ValueError(_refusal(model, "and blocks is not set"))
        if not _is_plain_sequence(model):
            raise ValueError(_refusal(model, "whose forward is its own"))
        return BlockListSplit(model, "")
    holder = model._modules.get(blocks)
    if not isinstance(holder, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        found = [name for name, child in model.named_children() if isinstance(child, (nn.ModuleList, nn.ModuleDict))]
        raise ValueError(
            f"blocks is {blocks!r}, {'no module of the model' if holder is None else f'a {type(holder).__name__}'}; allowed: "
            "the name of an nn.ModuleList, nn.ModuleDict or nn.Sequential that the model holds itself"
            f"{', here ' * bool(found)}{' or '.join(found)}. Change blocks."
        )
    if model._parameters:
        raise ValueError(
            f"the model holds parameter {next(iter(model._parameters))!r} itself, which belongs to no stage; allowed: "
            f"parameters in modules that are registered before or behind {blocks}. Put it into one."
        )
    return BlockListSplit(model, blocks)


def _is_plain_sequence(model: nn.Sequential) -> bool:
    """Return True if it calls its children one after the other; one that `initialize` has changed does, too."""
    return type(model).forward is nn.Sequential.forward


def _refusal(model: nn.Module, why: str) -> str:
    return (
        f"pipeline is set and the model a {type(model).__name__}, {why}; allowed: a gpt or llama of ours, an nn.Sequential, or "
        "a model with a list of blocks, named by blocks, whose forward leaves out modules that are None. Change the model's "
        "forward so and pass blocks, or use zero_stage=3, which divides the weights of any model with repeated blocks."
    )
