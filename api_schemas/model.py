"""Which network to train: a preset, or sizes in transformers' words, or a preset with some sizes changed."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from api_schemas.base import Contract, refusal

Size = Annotated[int, Field(ge=1, le=1_048_576)]
PresetName = Literal["gpt-tiny", "gpt-mini", "gpt-125m", "gpt-350m", "gpt-1.3b", "gpt-6.7b"]


class ModelSizes(Contract):
    """Every size of a GPT, resolved: nothing is left to default."""

    hidden_size: Size
    num_layers: Size
    num_heads: Size
    vocab_size: Size
    max_sequence_length: Size

    @property
    def num_parameters(self) -> int:
        """Parameters of the GPT: tied embedding, learned positions, biases, two LayerNorms a block and a last one."""
        width = self.hidden_size
        block = 12 * width * width + 13 * width
        return self.vocab_size * width + self.max_sequence_length * width + self.num_layers * block + 2 * width

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of one token, forward and backward: 6 for each parameter in a product, 12·L·D·T for attention's own.

        Chowdhery et al., PaLM (2022), appendix B. Causal attention is counted whole, as there. The tied head counts as the
        product that it is, learned positions do not.
        """
        num_matmul_parameters = self.num_parameters - self.max_sequence_length * self.hidden_size
        return 6.0 * num_matmul_parameters + 12.0 * self.num_layers * self.hidden_size * sequence_length

    @property
    def num_block_weights(self) -> int:
        """Elements of the weight matrices inside the blocks: what a level converts."""
        return 12 * self.hidden_size * self.hidden_size * self.num_layers


def _sizes(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int, max_sequence_length: int) -> ModelSizes:
    return ModelSizes(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
    )


PRESETS: dict[str, ModelSizes] = {
    "gpt-tiny": _sizes(128, 4, 4, 256, 256),
    "gpt-mini": _sizes(256, 6, 8, 256, 512),
    "gpt-125m": _sizes(768, 12, 12, 50_304, 1024),
    "gpt-350m": _sizes(1024, 24, 16, 50_304, 1024),
    "gpt-1.3b": _sizes(2048, 24, 16, 50_304, 2048),
    "gpt-6.7b": _sizes(4096, 32, 32, 50_304, 2048),
}


class ModelSpec(Contract):
    """A GPT by preset, by sizes, or by preset with some sizes changed."""

    family: Literal["gpt"] = "gpt"
    preset: PresetName | None = None
    hidden_size: Size | None = None
    num_layers: Size | None = None
    num_heads: Size | None = None
    vocab_size: Size | None = None
    max_sequence_length: Size | None = None

    @model_validator(mode="after")
    def _complete_and_consistent(self) -> Self:
        missing = [name for name, value in self._merged().items() if value is None]
        if missing:
            raise refusal(
                missing[0],
                got=None,
                allowed=f"a preset ({', '.join(PRESETS)}), or every size",
                change=f"Set model.preset, or set {', '.join(f'model.{name}' for name in missing)}.",
            )
        sizes = self.sizes
        if sizes.hidden_size % sizes.num_heads:
            raise refusal(
                "num_heads",
                got=sizes.num_heads,
                allowed=f"a divisor of hidden_size {sizes.hidden_size}: {_divisors(sizes.hidden_size)}",
                change="Change model.num_heads or model.hidden_size.",
            )
        return self

    def _merged(self) -> dict[str, int | None]:
        preset = PRESETS[self.preset].model_dump() if self.preset else {}
        return {name: getattr(self, name) or preset.get(name) for name in ModelSizes.model_fields}

    @property
    def sizes(self) -> ModelSizes:
        """The preset's sizes with this spec's own on top."""
        return ModelSizes.model_validate(self._merged())


def _divisors(number: int) -> str:
    found = [str(divisor) for divisor in range(1, min(number, 512) + 1) if number % divisor == 0]
    return ", ".join(found)
