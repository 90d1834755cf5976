"""What every family of models has in common: sizes, resolved from a preset and the fields that a job sets itself.

A family is a class of sizes (what they come to: parameters, operations) and a class of specs (what a job may write), in a
module of its own beside this one; `worker/models/` has the module of the same name that builds it.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from api_schemas.base import Contract, refusal

Size = Annotated[int, Field(ge=1, le=1_048_576)]


class FamilySizes(Contract):
    """Every size of a network, resolved: nothing is left to default."""

    metrics: ClassVar[tuple[str, ...]]
    """The names of what an evaluation measures besides the loss; means over the same targets."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of the network; tied ones count once."""

    @property
    @abstractmethod
    def num_block_weights(self) -> int:
        """Elements of the weight matrices inside the blocks: what a level converts."""

    @abstractmethod
    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of the model for one token, forward and backward, nothing recomputed."""

    def check(self) -> None:
        """Refuse sizes that do not fit each other, with a `refusal` for the field to change."""


class FamilySpec(Contract):
    """A network by preset, by sizes, or by preset with some sizes changed. A subclass names the fields of its sizes."""

    sizes_type: ClassVar[type[FamilySizes]]
    presets: ClassVar[Mapping[str, Any]]
    optional_sizes: ClassVar[Mapping[str, str]] = {}
    """Sizes that equal another one where neither preset nor job gives them."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of sizes that neither preset nor job gives."""

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
    """The divisors of a size, for a message."""
    found = [str(divisor) for divisor in range(1, min(number, 512) + 1) if number % divisor == 0]
    return ", ".join(found)
