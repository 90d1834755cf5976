"""Read whole parameters of a model that ranks divide: the one reader of `plain_state_dict`, `export` and state dicts.

A parameter at a time is gathered, as precisely as the ranks hold it: from pieces of its master weight or residual (ZeRO), from
its shards (tensor degree), or as it is. Each call is a collective; every rank gets the result.
"""

from weakref import ref

from torch import Tensor, nn

from octet.worker.fp8.weight import Float8Weight
from octet.worker.parallel.tensor import TensorShards
from octet.worker.parallel.zero import ShardedStates
from octet.worker.prepare.export_state_dict import OwnParameters, set_reader


class WholeParameters:
    """Reads parameters over the ranks that hold them. Does not keep what it reads from alive."""

    def __init__(self, sharded: ShardedStates | None, shards: TensorShards) -> None:
        self._sharded, self._shards = None if sharded is None else ref(sharded), ref(shards)

    def values(self, parameter: Tensor) -> Tensor:
        """Return a parameter's values: fp32 of codes, else in its dtype."""
        sharded = None if self._sharded is None else self._sharded()
        own = OwnParameters().values(parameter) if sharded is None else sharded.values(parameter)
        return self._joined(parameter, own)

    def codes(self, weight: Float8Weight) -> Tensor:
        """Return a weight's codes."""
        sharded = None if self._sharded is None else self._sharded()
        return self._joined(weight, weight.codes.detach() if sharded is None else sharded.codes(weight))

    def _joined(self, parameter: Tensor, own: Tensor) -> Tensor:
        shards = self._shards()
        cut = None if shards is None else shards.cuts.get(parameter)
        if shards is None or cut is None:
            return own
        return cut.join(list(shards.axis.start_gather(own.contiguous()).wait()))


def read_over_ranks(model: nn.Module, sharded: ShardedStates | None, shards: TensorShards) -> None:
    """Let a model that ranks divide be read whole."""
    if sharded is not None or shards.cuts:
        set_reader(model, WholeParameters(sharded, shards))
