"""The base of all model families: sizes, resolved from a preset and the fields that a job sets.

A family is a class of sizes, which computes parameters and operations, and a class of specs, which says what a job may
write. Both are in the family's own module in this folder; the module of the same name in `worker/models/` builds the network.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, cast

from pydantic import Field, model_validator

from octet.api_schemas.base import Contract, refusal
from octet.api_schemas.data.files import ANY_FILE, Files
from octet.api_schemas.inputs import METRICS, ImageInput, Task, TokenInput
from octet.api_schemas.models.shapes import Shapes

Size = Annotated[int, Field(ge=1, le=1_048_576)]


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a family beyond training on one rank or on data parallel ones. It has none that its sizes do not declare."""

    tensor: bool = False
    """Ranks may divide its layers, and with `sequence` the tokens between them; `divided_sizes` says by what."""
    context: bool = False
    """Ranks may divide the tokens of a sequence: its attention gathers keys and values."""
    pipeline: bool = False
    """Its `num_layers` blocks can be cut into stages."""
    expert: bool = False
    """It has mixtures, whose `num_experts` experts ranks may divide."""
    cuda_graphs: bool = False
    """Its passes read no value of the device, copy no numbers to it, have one shape (tests/worker/train/test_step_graph.py)."""
    flash_attention: bool = False
    """All its attention is flash attention's: without masks, and nothing is dropped."""
    fused_loss: bool = False
    """It predicts tokens, and its loss is ours."""
    pure_blocks: bool = False
    """Its class `Block` changes no norm's output in place, so that a compiled graph may rely on what wrote it."""
    gated_mlp: bool = False
    """Its class `MLP` computes down(silu(gate(x)) * up(x))."""
    draws_by_parameter: bool = False
    """Its initial values are known by parameter, so that no rank has to make the whole network."""
    users_code: bool = False
    """It runs code of the user's, which a pool's operator has to allow."""


class FamilySizes(Contract):
    """Every size of a network, resolved: no defaults are left to fill in.

    Counts are None where only the rank can count, because the network's code is not ours (`huggingface`).
    """

    declared: ClassVar[Capabilities] = Capabilities()

    @property
    def capabilities(self) -> Capabilities:
        """The abilities that the family declares, less those that an architecture of it lacks."""
        return self.declared

    @property
    @abstractmethod
    def task(self) -> Task:
        """The values that the network learns to predict."""

    @property
    @abstractmethod
    def takes(self) -> TokenInput | ImageInput:
        """The batches that the network reads."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values that an evaluation measures besides the loss; each is a mean over the same targets."""
        return METRICS[self.task]

    @property
    @abstractmethod
    def num_parameters(self) -> int | None:
        """Parameters of the network; tied ones count once."""

    @property
    @abstractmethod
    def num_block_weights(self) -> int | None:
        """Elements of the weight matrices inside the blocks, which a level converts."""

    @abstractmethod
    def flops_per_token(self, sequence_length: int) -> float | None:
        """FLOPs of the model for one token, forward and backward, without recomputation."""

    def parameters(self) -> Shapes | None:
        """Return the parameters in the order in which the network registers them; None if only a rank knows them."""
        return None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the network's own buffers."""
        return 0

    @property
    def divided_sizes(self) -> Mapping[str, int]:
        """The sizes that a tensor degree must divide, by field."""
        return {}

    def check(self) -> None:
        """Raise a `refusal` that names the field to change if the sizes do not fit each other."""


class UncountedSizes(FamilySizes):
    """Sizes of a network that is built in a rank alone, which then counts and reports its parameters."""

    @property
    def num_parameters(self) -> int | None:
        """Unknown here."""
        return None

    @property
    def num_block_weights(self) -> int | None:
        """Unknown here."""
        return None

    def flops_per_token(self, sequence_length: int) -> float | None:
        """Unknown here: a rank counts them from the network's linear layers."""
        return None


class FamilySpec(Contract):
    """A network as a job names it. A subclass has the fields; each has `preset`, None if the family has no presets."""

    family: str
    sizes_type: ClassVar[type[FamilySizes]]
    presets: ClassVar[Mapping[str, Any]] = {}
    architectures: ClassVar[Mapping[Task, tuple[str, ...]]] = {}
    """Values of `architecture`, by task, of a family that has such a field."""

    @property
    @abstractmethod
    def sizes(self) -> FamilySizes:
        """The sizes, as far as the spec alone says them."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The network's name in a table."""

    @property
    def files(self) -> str | None:
        """The absolute path of the folder that holds the network's configuration and weights; None without such files."""
        return None

    def read_sizes(self, files: Files = ANY_FILE) -> FamilySizes:
        """Return the sizes together with what the network's files say. Raises SpecConflict or OSError if those do not fit."""
        return self.sizes

    def check_weights(self, files: Files = ANY_FILE) -> None:
        """Raise SpecConflict or OSError if the network's files hold weights that a rank could not read."""


Sizes = TypeVar("Sizes", bound=FamilySizes, covariant=True)


class SizedSpec(FamilySpec, Generic[Sizes]):
    """A network by preset, by sizes, or by preset with some sizes changed. A subclass names the fields of its sizes."""

    optional_sizes: ClassVar[Mapping[str, str]] = {}
    """Sizes that default to another size: name to name of the other, for sizes set by neither preset nor job."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values of sizes set by neither preset nor job."""

    preset: str | None = None

    @property
    def sizes(self) -> Sizes:
        """The preset's sizes, overridden by the sizes that this spec sets."""
        return cast(Sizes, self.sizes_type.model_validate(self._merged()))

    @property
    def title(self) -> str:
        """The preset's name, or else the family's."""
        return self.preset or self.family

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
        self.sizes.check()
        return self

    def _merged(self) -> dict[str, Any]:
        return _merged_sizes(self)

    def _merge(self) -> dict[str, Any]:
        preset = dict(self.presets[self.preset]) if self.preset else {}
        own = dict(self)
        merged = {name: preset.get(name) if own[name] is None else own[name] for name in self.sizes_type.model_fields}
        merged |= self._derived(merged)
        others = {name: merged[source] for name, source in self.optional_sizes.items()} | dict(self.defaults)
        return {name: others.get(name) if value is None else value for name, value in merged.items()}

    def _derived(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return sizes that follow from others, unless the job sets them. sizes: from preset and job; None where unset."""
        return {}


@lru_cache(maxsize=256)
def _merged_sizes(spec: SizedSpec[Any]) -> dict[str, Any]:
    """Merge the sizes of a spec, which nobody may change. They are asked for three times while a job is checked."""
    return spec._merge()


def divisors(number: int) -> str:
    """List the divisors of a size, for a message."""
    found = [str(divisor) for divisor in range(1, min(number, 512) + 1) if number % divisor == 0]
    return ", ".join(found)
