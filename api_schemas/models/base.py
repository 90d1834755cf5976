"""The base of all model families: sizes, resolved from a preset and the fields that a job sets.

A family is a class of sizes, which computes parameters and operations, and a class of specs, which says what a job may
write. Both are in the family's own module in this folder; the module of the same name in `worker/models/` builds the network.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from api_schemas.base import Contract, refusal

Size = Annotated[int, Field(ge=1, le=1_048_576)]


class FamilySizes(Contract):
    """Every size of a network, resolved: no defaults are left to fill in."""

    metrics: ClassVar[tuple[str, ...]]
    """Names of the values that an evaluation measures besides the loss; each is a mean over the same targets."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of the network; tied ones count once."""

    @property
    @abstractmethod
    def num_block_weights(self) -> int:
        """Elements of the weight matrices inside the blocks, which a level converts."""

    @abstractmethod
    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of the model for one token, forward and backward, without recomputation."""

    def check(self) -> None:
        """Raise a `refusal` that names the field to change if the sizes do not fit each other."""


class FamilySpec(Contract):
    """A network by preset, by sizes, or by preset with some sizes changed. A subclass names the fields of its sizes."""

    sizes_type: ClassVar[type[FamilySizes]]
    presets: ClassVar[Mapping[str, Any]]
    optional_sizes: ClassVar[Mapping[str, str]] = {}
    """Sizes that default to another size: name to name of the other, for sizes set by neither preset nor job."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values of sizes set by neither preset nor job."""

    family: str
    preset: str | None = None

    @model_validator(mode="after")
    def _complete_and_consistent(self) -> Self:
        missing = [name for name, value in self._merged().items() if value is None]
        if missing:
            raise refusal(
                missing[0],
                got=None,
                allowed=f"a preset ({', '.join(self.presets)}), or every size",
                change=f"Set model.preset, or set {', '.join(f'model.{name}' for name in missing)}.",
            )
        self._resolved().check()
        return self

    def _merged(self) -> dict[str, Any]:
        preset = self.presets[self.preset].model_dump() if self.preset else {}
        names = self.sizes_type.model_fields
        merged = {name: preset.get(name) if getattr(self, name) is None else getattr(self, name) for name in names}
        others = {name: merged[source] for name, source in self.optional_sizes.items()} | dict(self.defaults)
        return {name: others.get(name) if value is None else value for name, value in merged.items()}

    def _resolved(self) -> FamilySizes:
        return self.sizes_type.model_validate(self._merged())


def divisors(number: int) -> str:
    """List the divisors of a size, for a message."""
    found = [str(divisor) for divisor in range(1, min(number, 512) + 1) if number % divisor == 0]
    return ", ".join(found)
