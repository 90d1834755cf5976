"""Context parallelism: ranks divide the tokens of each sequence. `models/context.py` has the attention and its collectives."""

from torch import nn

from octet.worker.mesh import Axis
from octet.worker.models.context import CausalAttention, ContextPart
from octet.worker.parallel.strategy import Division, Strategy, check_compiled, check_loss_scaling


class ContextParallel(Strategy):
    """Parameters stay whole: the ranks are replicas that average gradients, as data ranks are."""

    axis = "context"

    def check(self, division: Division) -> None:
        """Refuse models that scale their losses, and compiled ones."""
        check_loss_scaling(division.model, "a context degree")
        check_compiled(division.model, "a context degree")

    def apply(self, division: Division) -> None:
        """Let the model's attention gather the keys and values of all ranks."""
        divide_sequences(division.model, division.axes.context)


def divide_sequences(model: nn.Module, axis: Axis) -> None:
    """Let a model of ours read this rank's tokens of each sequence. Raises ValueError for another model."""
    attentions = [module for module in model.modules() if isinstance(module, CausalAttention)]
    if not attentions or not hasattr(model, "context"):
        raise ValueError(
            f"{type(model).__name__} cannot divide sequences over {axis.size} ranks; allowed: gpt and llama, whose attention "
            "gathers keys and values. Change the model, or set the context degree to 1."
        )
    part = ContextPart(axis)
    model.context = part  # type: ignore[assignment]
    for attention in attentions:
        attention.context = part
