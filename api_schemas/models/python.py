"""A user's own network, which a function of the user's builds in the rank's process.

Its code is imported nowhere else: the control plane checks names and sizes alone. Pools run it only if their operator says so
(`PoolConfig.allows_entrypoints`).
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from octet.api_schemas.base import refusal
from octet.api_schemas.inputs import ImageInput, Task, TokenInput
from octet.api_schemas.models.base import Capabilities, FamilySizes, FamilySpec, Size, UncountedSizes

Entrypoint = Annotated[
    str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$", max_length=512, description="package.module:function")
]
ArgumentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


class PythonSizes(UncountedSizes):
    """The inputs and classes that a job declares for a user's network. null: not declared."""

    declared: ClassVar[Capabilities] = Capabilities(users_code=True)

    reads: Literal["tokens", "images"]
    vocab_size: Size | None
    max_sequence_length: Size | None
    image_size: Size | None
    num_channels: Size
    num_classes: Size | None

    @property
    def task(self) -> Task:
        """The nearest of our tasks; the network alone says what it learns."""
        return "image_class" if self.reads == "images" else "next_token"

    @property
    def takes(self) -> TokenInput | ImageInput:
        """Tokens or images, by `reads`."""
        if self.reads == "tokens":
            return TokenInput(self.vocab_size, self.max_sequence_length)
        assert self.image_size is not None
        assert self.num_classes is not None
        return ImageInput(self.image_size, self.num_channels, self.num_classes, tokens_per_image=1)

    @property
    def metrics(self) -> tuple[str, ...]:
        """None: an evaluation measures the loss alone."""
        return ()


class PythonSpec(FamilySpec):
    """The network that `entrypoint(**arguments)` returns. `docs/own-models.md` says what it has to be."""

    sizes_type: ClassVar[type[FamilySizes]] = PythonSizes

    family: Literal["python"] = "python"
    preset: None = None
    entrypoint: Entrypoint
    arguments: dict[ArgumentName, JsonValue] = Field(default_factory=dict, max_length=128)
    reads: Literal["tokens", "images"] = "tokens"
    vocab_size: Size | None = Field(default=None, description="checked against the data; null: any")
    max_sequence_length: Size | None = Field(default=None, description="checked against the data; null: any")
    image_size: Size | None = None
    num_channels: Size = 3
    num_classes: Size | None = None

    @model_validator(mode="after")
    def _sizes_are_of_what_it_reads(self) -> Self:
        of_images, of_tokens = ("image_size", "num_classes"), ("vocab_size", "max_sequence_length")
        reads_images = self.reads == "images"
        for name in of_images:
            if reads_images and getattr(self, name) is None:
                raise refusal(name, got=None, allowed="an integer: the model reads images", change=f"Set model.{name}.")
        for name in of_tokens if reads_images else of_images:
            if (value := getattr(self, name)) is not None:
                allowed = f"no {name}: the model reads {self.reads}"
                raise refusal(name, got=value, allowed=allowed, change=f"Remove model.{name}, or change model.reads.")
        return self

    @property
    def title(self) -> str:
        """The function's name."""
        return self.entrypoint

    @property
    def sizes(self) -> PythonSizes:
        """The sizes that the job says."""
        return PythonSizes.model_validate({name: getattr(self, name) for name in PythonSizes.model_fields})
