"""The parameters of a network by name and shape, without the network: what a plan adds up."""

from collections.abc import Iterator
from typing import NamedTuple


class ParameterShape(NamedTuple):
    """A parameter under the name that the network registers it with.

    is_linear: the weight of a linear layer, (out, in). divided_dim: the dimension by which tensor ranks cut it; None where each
    holds it whole. block: the index of the repeated block that it lies in; None outside of blocks. tied_to: the name of the
    parameter that this is, unless a pipeline keeps the two on different ranks. expert: the index of the expert that it belongs
    to, and the number of experts of the mixture, where each is a layer of its own. is_vocabulary: the weight of a language
    model's embedding or head, with a row for each token.
    """

    name: str
    shape: tuple[int, ...]
    is_linear: bool = False
    divided_dim: int | None = None
    block: int | None = None
    tied_to: str | None = None
    expert: tuple[int, int] | None = None
    is_vocabulary: bool = False

    @property
    def layer(self) -> str:
        """The name of the layer that holds it."""
        return self.name.rpartition(".")[0]


Shapes = Iterator[ParameterShape]


def linear(
    layer: str,
    out_features: int,
    in_features: int,
    *,
    bias: bool = True,
    divided_dim: int | None = None,
    block: int | None = None,
) -> Shapes:
    """Yield the weight of a linear layer and its bias, which ranks divide with the outputs."""
    yield ParameterShape(f"{layer}.weight", (out_features, in_features), True, divided_dim, block)
    if bias:
        yield ParameterShape(f"{layer}.bias", (out_features,), False, 0 if divided_dim == 0 else None, block)


def norm(layer: str, width: int, *, bias: bool = True, block: int | None = None) -> Shapes:
    """Yield the parameters of a LayerNorm, or without a bias of an RMSNorm."""
    yield ParameterShape(f"{layer}.weight", (width,), block=block)
    if bias:
        yield ParameterShape(f"{layer}.bias", (width,), block=block)
