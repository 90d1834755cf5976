"""The Llama family: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases, a head separate from the embedding."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from octet.api_schemas.base import refusal
from octet.api_schemas.inputs import Task, TokenInput
from octet.api_schemas.models.base import Capabilities, FamilySizes, Size, SizedSpec, divisors
from octet.api_schemas.models.shapes import ParameterShape, Shapes, linear, norm

PresetName = Literal["llama-tiny", "llama-1b", "llama-3b", "llama-8b", "llama-70b"]


class LlamaSizes(FamilySizes):
    """Every size of a Llama, resolved, with transformers' names."""

    declared: ClassVar[Capabilities] = Capabilities(
        tensor=True,
        context=True,
        pipeline=True,
        cuda_graphs=True,
        flash_attention=True,
        fused_loss=True,
        pure_blocks=True,
        gated_mlp=True,
        draws_by_parameter=True,
    )

    hidden_size: Size
    intermediate_size: Size
    num_layers: Size
    num_heads: Size
    num_key_value_heads: Size
    vocab_size: Size
    max_sequence_length: Size
    rope_theta: float = Field(gt=0)
    tie_embeddings: bool

    @property
    def head_size(self) -> int:
        """Elements of one head's queries, keys and values."""
        return self.hidden_size // self.num_heads

    @property
    def task(self) -> Task:
        """Predict each next token."""
        return "next_token"

    @property
    def takes(self) -> TokenInput:
        """Sequences of tokens."""
        return TokenInput(self.vocab_size, self.max_sequence_length, keeps_documents_apart=True)

    @property
    def divided_sizes(self) -> dict[str, int]:
        """Heads of keys and values, which query heads are a multiple of, the MLP's features and tokens."""
        names = ("num_key_value_heads", "intermediate_size", "vocab_size")
        return {name: getattr(self, name) for name in names}

    @property
    def num_parameters(self) -> int:
        """Parameters of the Llama; a tied head counts once."""
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return embeddings + norms + self.num_block_weights

    @property
    def num_block_weights(self) -> int:
        """Elements of the weight matrices inside the blocks, which a level converts."""
        key_value_width = self.num_key_value_heads * self.head_size
        attention = self.hidden_size * (2 * self.hidden_size + 2 * key_value_width)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def parameters(self) -> Shapes:
        """Yield the parameters in the order in which the network registers them."""
        width, inner, vocabulary = self.hidden_size, self.intermediate_size, (self.vocab_size, self.hidden_size)
        key_value_width = self.num_key_value_heads * self.head_size
        yield ParameterShape("token_embedding.weight", vocabulary, divided_dim=0, is_vocabulary=True)
        for block in range(self.num_layers):
            name = f"blocks.{block}"
            yield from norm(f"{name}.attention_norm", width, bias=False, block=block)
            for layer, outputs in (("query", width), ("key", key_value_width), ("value", key_value_width)):
                yield from linear(f"{name}.attention.{layer}", outputs, width, bias=False, divided_dim=0, block=block)
            yield from linear(f"{name}.attention.output", width, width, bias=False, divided_dim=1, block=block)
            yield from norm(f"{name}.mlp_norm", width, bias=False, block=block)
            for layer in ("gate", "up"):
                yield from linear(f"{name}.mlp.{layer}", inner, width, bias=False, divided_dim=0, block=block)
            yield from linear(f"{name}.mlp.down", width, inner, bias=False, divided_dim=1, block=block)
        yield from norm("final_norm", width, bias=False)
        tied_to = "token_embedding.weight" if self.tie_embeddings else None
        yield ParameterShape("head.weight", vocabulary, True, 0, tied_to=tied_to, is_vocabulary=True)

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs for one token, forward and backward: 6 per parameter in a product, plus 12·L·D·T for attention.

        Formula: Chowdhery et al., PaLM (2022), appendix B. Causal attention is counted in full, as in the paper. The head
        counts as a product; an embedding lookup does not.
        """
        num_matmul_parameters = self.num_block_weights + self.vocab_size * self.hidden_size
        return 6.0 * num_matmul_parameters + 12.0 * self.num_layers * self.hidden_size * sequence_length

    def check(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise refusal(
                "num_heads",
                got=self.num_heads,
                allowed=f"a divisor of hidden_size / 2, {self.hidden_size // 2} (heads rotate pairs): "
                f"{divisors(self.hidden_size // 2)}",
                change="Change model.num_heads or model.hidden_size.",
            )
        if self.num_heads % self.num_key_value_heads:
            raise refusal(
                "num_key_value_heads",
                got=self.num_key_value_heads,
                allowed=f"a divisor of num_heads {self.num_heads}: {divisors(self.num_heads)}",
                change="Change model.num_key_value_heads.",
            )


def llama_sizes(
    width: tuple[int, int], num_layers: int, heads: tuple[int, int], vocab_size: int, max_sequence_length: int, *, tied: bool
) -> LlamaSizes:
    """Build the sizes. width: residual stream, MLP. heads: query heads, key-value heads."""
    return LlamaSizes(
        hidden_size=width[0],
        intermediate_size=width[1],
        num_layers=num_layers,
        num_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        rope_theta=10_000.0 if vocab_size <= 256 else 500_000.0,
        tie_embeddings=tied,
    )


class LlamaSpec(SizedSpec[LlamaSizes]):
    """A Llama by preset, by sizes, or by preset with some sizes changed. Presets have the sizes of Llama 3.2 and 3.1."""

    sizes_type: ClassVar[type[FamilySizes]] = LlamaSizes
    presets: ClassVar[Mapping[str, LlamaSizes]] = {
        "llama-tiny": llama_sizes((128, 352), 4, (4, 2), 256, 256, tied=True),
        "llama-1b": llama_sizes((2048, 8192), 16, (32, 8), 128_256, 131_072, tied=True),
        "llama-3b": llama_sizes((3072, 8192), 28, (24, 8), 128_256, 131_072, tied=True),
        "llama-8b": llama_sizes((4096, 14_336), 32, (32, 8), 128_256, 131_072, tied=False),
        "llama-70b": llama_sizes((8192, 28_672), 80, (64, 8), 128_256, 131_072, tied=False),
    }
    optional_sizes: ClassVar[Mapping[str, str]] = {"num_key_value_heads": "num_heads"}
    defaults: ClassVar[Mapping[str, object]] = {"rope_theta": 10_000.0, "tie_embeddings": False}

    family: Literal["llama"] = "llama"
    preset: PresetName | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_layers: Size | None = None
    num_heads: Size | None = None
    num_key_value_heads: Size | None = Field(default=None, description="default: num_heads")
    vocab_size: Size | None = None
    max_sequence_length: Size | None = None
    rope_theta: float | None = Field(default=None, gt=0, description="base of the rotary frequencies; default: 10000")
    tie_embeddings: bool | None = Field(default=None, description="use the embedding's weight for the head; default: false")
