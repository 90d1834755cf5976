"""The elements of a model's parameter that a parameter of the optimizer holds."""

from typing import NamedTuple

from octet.api_schemas.formats import MIN_QUANTIZED_ELEMENTS


class Origin(NamedTuple):
    """The elements that a parameter of the optimizer holds: all of a model's parameter, or a piece of it.

    shard, num_shards: where the model's parameter is one of equal shards of a parameter that ranks share (`sharding.py`).
    """

    parameter_index: int
    first_element: int
    num_elements: int
    """Elements of the model's parameter."""
    shard: int = 0
    num_shards: int = 1
    matrix_shape: tuple[int, ...] = ()
    """The shape of the model's parameter, where its rule needs the whole matrix (`MatrixRule`)."""

    @property
    def first_draw(self) -> int:
        """The number of the first element in the random stream. A shard counts as consecutive elements: none draws twice."""
        return self.shard * self.num_elements + self.first_element


def is_small(origin: Origin) -> bool:
    """Return True if a parameter's states are fp32 because the whole is small, however ranks divide it."""
    return origin.num_elements * origin.num_shards < MIN_QUANTIZED_ELEMENTS
