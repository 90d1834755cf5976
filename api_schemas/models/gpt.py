"""The GPT family: learned positions, pre-LayerNorm blocks, a 4x GELU MLP, a head tied to the embedding."""

from typing import ClassVar, Literal

from octet.api_schemas.base import refusal
from octet.api_schemas.inputs import Task, TokenInput
from octet.api_schemas.models.base import Capabilities, FamilySizes, Size, SizedSpec, divisors
from octet.api_schemas.models.shapes import ParameterShape, Shapes, linear, norm

PresetName = Literal[
    "gpt-tiny", "gpt-mini", "gpt-125m", "gpt-350m", "gpt-760m", "gpt-1.3b", "gpt-2.7b", "gpt-6.7b", "gpt-13b", "gpt-175b"
]


class GPTSizes(FamilySizes):
    """Every size of a GPT, resolved: no defaults are left to fill in."""

    declared: ClassVar[Capabilities] = Capabilities(
        tensor=True,
        context=True,
        pipeline=True,
        cuda_graphs=True,
        flash_attention=True,
        fused_loss=True,
        pure_blocks=True,
        draws_by_parameter=True,
    )

    hidden_size: Size
    num_layers: Size
    num_heads: Size
    vocab_size: Size
    max_sequence_length: Size

    def check(self) -> None:
        if self.hidden_size % self.num_heads:
            raise refusal(
                "num_heads",
                got=self.num_heads,
                allowed=f"a divisor of hidden_size {self.hidden_size}: {divisors(self.hidden_size)}",
                change="Change model.num_heads or model.hidden_size.",
            )

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
        """Heads and tokens; the MLP's features follow from the heads."""
        return {"num_heads": self.num_heads, "vocab_size": self.vocab_size}

    @property
    def num_parameters(self) -> int:
        """Number of parameters: tied embedding, learned positions, biases, two LayerNorms per block and a final one."""
        width = self.hidden_size
        block = 12 * width * width + 13 * width
        return self.vocab_size * width + self.max_sequence_length * width + self.num_layers * block + 2 * width

    @property
    def num_block_weights(self) -> int:
        """Elements of the weight matrices inside the blocks, which a level converts."""
        return 12 * self.hidden_size * self.hidden_size * self.num_layers

    def parameters(self) -> Shapes:
        """Yield the parameters in the order in which the network registers them."""
        width, vocabulary = self.hidden_size, (self.vocab_size, self.hidden_size)
        yield ParameterShape("token_embedding.weight", vocabulary, divided_dim=0, is_vocabulary=True)
        yield ParameterShape("position_embedding.weight", (self.max_sequence_length, width))
        for block in range(self.num_layers):
            name = f"blocks.{block}"
            yield from norm(f"{name}.attention_norm", width, block=block)
            yield from linear(f"{name}.attention.qkv", 3 * width, width, divided_dim=0, block=block)
            yield from linear(f"{name}.attention.output", width, width, divided_dim=1, block=block)
            yield from norm(f"{name}.mlp_norm", width, block=block)
            yield from linear(f"{name}.mlp.up", 4 * width, width, divided_dim=0, block=block)
            yield from linear(f"{name}.mlp.down", width, 4 * width, divided_dim=1, block=block)
        yield from norm("final_norm", width)
        yield ParameterShape("head.weight", vocabulary, True, 0, tied_to="token_embedding.weight", is_vocabulary=True)

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs for one token, forward and backward: 6 per parameter in a product, plus 12·L·D·T for attention.

        Formula: Chowdhery et al., PaLM (2022), appendix B. Causal attention is counted in full, as in the paper. The tied
        head counts as a product; learned positions do not count.
        """
        num_matmul_parameters = self.num_parameters - self.max_sequence_length * self.hidden_size
        return 6.0 * num_matmul_parameters + 12.0 * self.num_layers * self.hidden_size * sequence_length


def gpt_sizes(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int, max_sequence_length: int) -> GPTSizes:
    """Build the sizes from positional values, in the order in which tables list them."""
    return GPTSizes(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
    )


class GPTSpec(SizedSpec[GPTSizes]):
    """A GPT by preset, by sizes, or by preset with some sizes changed.

    From 125m on, presets have the widths and depths of GPT-3 (Brown et al. 2020, table 2.1); 13b has width 5120 in place of
    5140, which 40 heads do not divide into multiples of 16.
    """

    sizes_type: ClassVar[type[FamilySizes]] = GPTSizes
    presets: ClassVar[dict[str, GPTSizes]] = {
        "gpt-tiny": gpt_sizes(128, 4, 4, 256, 256),
        "gpt-mini": gpt_sizes(256, 6, 8, 256, 512),
        "gpt-125m": gpt_sizes(768, 12, 12, 50_304, 1024),
        "gpt-350m": gpt_sizes(1024, 24, 16, 50_304, 1024),
        "gpt-760m": gpt_sizes(1536, 24, 16, 50_304, 2048),
        "gpt-1.3b": gpt_sizes(2048, 24, 16, 50_304, 2048),
        "gpt-2.7b": gpt_sizes(2560, 32, 32, 50_304, 2048),
        "gpt-6.7b": gpt_sizes(4096, 32, 32, 50_304, 2048),
        "gpt-13b": gpt_sizes(5120, 40, 40, 50_304, 2048),
        "gpt-175b": gpt_sizes(12_288, 96, 96, 50_304, 2048),
    }

    family: Literal["gpt"] = "gpt"
    preset: PresetName | None = None
    hidden_size: Size | None = None
    num_layers: Size | None = None
    num_heads: Size | None = None
    vocab_size: Size | None = None
    max_sequence_length: Size | None = None
