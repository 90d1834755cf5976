"""The RoBERTa family: a bidirectional encoder that predicts masked tokens; the head is tied to the embedding.

Liu et al. 2019, arXiv 1907.11692. Parameters are those of transformers' RobertaForMaskedLM.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from octet.api_schemas.base import refusal
from octet.api_schemas.inputs import Task, TokenInput
from octet.api_schemas.models.base import Capabilities, FamilySizes, Size, SizedSpec, divisors
from octet.api_schemas.models.shapes import ParameterShape, Shapes, linear, norm

PresetName = Literal["roberta-tiny", "roberta-base", "roberta-large"]
POSITIONS_BEFORE_FIRST = 2
"""Rows of the position table that transformers' RoBERTa keeps for padding and never uses otherwise."""


class RobertaSizes(FamilySizes):
    """Every size of a RoBERTa, resolved."""

    declared: ClassVar[Capabilities] = Capabilities(cuda_graphs=True, fused_loss=True)

    hidden_size: Size
    intermediate_size: Size
    num_layers: Size
    num_heads: Size
    vocab_size: Size
    max_sequence_length: Size
    mask_token: int

    @property
    def task(self) -> Task:
        """Predict the masked tokens."""
        return "masked_token"

    @property
    def takes(self) -> TokenInput:
        """Sequences of tokens, some of them masked."""
        return TokenInput(self.vocab_size, self.max_sequence_length, self.mask_token)

    @property
    def num_parameters(self) -> int:
        """Parameters of transformers' RobertaForMaskedLM; the tied head's weight counts once."""
        width = self.hidden_size
        embeddings = (self.vocab_size + self._num_positions + 1) * width + 2 * width  # one kind of segment; a LayerNorm
        biases_and_norms = self.num_layers * (9 * width + self.intermediate_size)
        head = width * width + 3 * width + self.vocab_size
        return embeddings + self.num_block_weights + biases_and_norms + head

    @property
    def num_block_weights(self) -> int:
        """Elements of the weight matrices inside the blocks, which a level converts."""
        return self.num_layers * (4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size)

    def parameters(self) -> Shapes:
        """Yield the parameters in the order in which the network registers them."""
        width, vocabulary = self.hidden_size, (self.vocab_size, self.hidden_size)
        embeddings, head = "network.roberta.embeddings", "network.lm_head"
        yield ParameterShape(f"{embeddings}.word_embeddings.weight", vocabulary, is_vocabulary=True)
        yield ParameterShape(f"{embeddings}.token_type_embeddings.weight", (1, width))
        yield from norm(f"{embeddings}.LayerNorm", width)
        yield ParameterShape(f"{embeddings}.position_embeddings.weight", (self._num_positions, width))
        for block in range(self.num_layers):
            name = f"network.roberta.encoder.layer.{block}"
            for layer in ("query", "key", "value"):
                yield from linear(f"{name}.attention.self.{layer}", width, width, block=block)
            yield from linear(f"{name}.attention.output.dense", width, width, block=block)
            yield from norm(f"{name}.attention.output.LayerNorm", width, block=block)
            yield from linear(f"{name}.intermediate.dense", self.intermediate_size, width, block=block)
            yield from linear(f"{name}.output.dense", width, self.intermediate_size, block=block)
            yield from norm(f"{name}.output.LayerNorm", width, block=block)
        yield ParameterShape(f"{head}.bias", (self.vocab_size,))
        yield from linear(f"{head}.dense", width, width)
        yield from norm(f"{head}.layer_norm", width)
        yield ParameterShape(
            f"{head}.decoder.weight", vocabulary, True, tied_to=f"{embeddings}.word_embeddings.weight", is_vocabulary=True
        )

    @property
    def buffer_bytes(self) -> int:
        """Two tables of positions, int64."""
        return 2 * 8 * self._num_positions

    @property
    def _num_positions(self) -> int:
        return self.max_sequence_length + POSITIONS_BEFORE_FIRST

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs for one token, forward and backward: 6 per parameter in a product, plus 12·L·D·T for attention.

        Formula: Chowdhery et al., PaLM (2022), appendix B. The head counts as a product for every token.
        """
        num_matmul_parameters = self.num_block_weights + (self.hidden_size + self.vocab_size) * self.hidden_size
        return 6.0 * num_matmul_parameters + 12.0 * self.num_layers * self.hidden_size * sequence_length

    def check(self) -> None:
        if self.hidden_size % self.num_heads:
            raise refusal(
                "num_heads",
                got=self.num_heads,
                allowed=f"a divisor of hidden_size {self.hidden_size}: {divisors(self.hidden_size)}",
                change="Change model.num_heads or model.hidden_size.",
            )
        if self.mask_token >= self.vocab_size:
            raise refusal(
                "mask_token",
                got=self.mask_token,
                allowed=f"below vocab_size, {self.vocab_size}",
                change="Change model.mask_token or model.vocab_size.",
            )


def roberta_sizes(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int, max_sequence_length: int) -> RobertaSizes:
    """Build the sizes from positional values, in the order in which tables list them. The last token is the mask."""
    return RobertaSizes(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        mask_token=vocab_size - 1,
    )


class RobertaSpec(SizedSpec[RobertaSizes]):
    """A RoBERTa by preset, by sizes, or by preset with some sizes changed. `roberta-tiny` reads bytes and a mask token."""

    sizes_type: ClassVar[type[FamilySizes]] = RobertaSizes
    presets: ClassVar[Mapping[str, RobertaSizes]] = {
        "roberta-tiny": roberta_sizes(128, 4, 4, 272, 256),
        "roberta-base": roberta_sizes(768, 12, 12, 50_265, 512),
        "roberta-large": roberta_sizes(1024, 24, 16, 50_265, 512),
    }

    family: Literal["roberta"] = "roberta"
    preset: PresetName | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = Field(default=None, description="default: the preset's, or 4 · hidden_size")
    num_layers: Size | None = None
    num_heads: Size | None = None
    vocab_size: Size | None = None
    max_sequence_length: Size | None = None
    mask_token: int | None = Field(
        default=None, ge=0, description="the token that hides others; default: the vocabulary's last"
    )

    def _derived(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """A changed width changes the MLP's, and a changed vocabulary moves the mask, unless the job sets them."""
        hidden_size, vocab_size = sizes["hidden_size"], sizes["vocab_size"]
        derived = {}
        if hidden_size is not None and self.intermediate_size is None:
            derived["intermediate_size"] = 4 * hidden_size
        if vocab_size is not None and self.mask_token is None:
            derived["mask_token"] = vocab_size - 1
        return derived
