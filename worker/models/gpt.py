"""A GPT: learned positions, pre-LayerNorm blocks, causal attention, a 4x GELU MLP, and a head tied to the embedding.

Plain PyTorch modules that know nothing of precision: a level converts the `nn.Linear`s from outside
(`octet.worker.initialize`). Initial values are GPT-2's (Radford et al. 2019): N(0, 0.02), and 0.02
/ sqrt(2 * num_layers) for layers that write to the residual stream.

Shape suffixes: B sequences, T tokens, D hidden, H heads, V vocabulary.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from octet.api_schemas import ANY_FILE, Files, GPTSizes, GPTSpec
from octet.worker.models.context import CausalAttention
from octet.worker.models.documents import Spans, document_spans, positions_in_documents
from octet.worker.models.initial import Constant, Initial, Normal, draw_parameters
from octet.worker.models.language import LanguageModel, checked_length
from octet.worker.models.model import Part, TensorRole


class Attention(CausalAttention):
    """Causal multi-head attention; queries, keys and values come from one linear layer."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.head_size = sizes.hidden_size // sizes.num_heads
        self.qkv = nn.Linear(sizes.hidden_size, 3 * sizes.hidden_size)
        self.output = nn.Linear(sizes.hidden_size, sizes.hidden_size)

    def forward(self, hidden_BTD: Tensor, spans: Spans | None = None) -> Tensor:
        query, key, value = (
            part_BTD.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part_BTD in self.qkv(hidden_BTD).chunk(3, dim=-1)
        )
        mixed_BHTd = self.attend(query, key, value, spans)
        return self.output(mixed_BHTd.transpose(1, 2).flatten(-2))


class MLP(nn.Sequential):
    """Two linear layers with a GELU (tanh form, as GPT-2) between them."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.hidden_size, 4 * sizes.hidden_size)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * sizes.hidden_size, sizes.hidden_size)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.hidden_size)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.hidden_size)
        self.mlp = MLP(sizes)

    def forward(self, hidden_BTD: Tensor, spans: Spans | None = None) -> Tensor:
        hidden_BTD = hidden_BTD + self.attention(self.attention_norm(hidden_BTD), spans)
        return hidden_BTD + self.mlp(self.mlp_norm(hidden_BTD))


class GPT(LanguageModel):
    """Maps tokens to logits of the next token."""

    def __init__(self, sizes: GPTSizes, seed: int = 0) -> None:
        super().__init__()
        sizes.check()
        self.sizes = sizes
        self.token_embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.position_embedding = nn.Embedding(sizes.max_sequence_length, sizes.hidden_size)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.final_norm = nn.LayerNorm(sizes.hidden_size)
        self.head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        draw_parameters(self, self.initial, seed)

    def forward(
        self,
        tokens_BT: Tensor,
        documents_BD: Tensor | None = None,
        *,
        part: Part | None = None,
        hidden_BTD: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, V), of a shard of the vocabulary, or of this rank's tokens, where ranks divide them.

        documents_BD: as `documents.py` describes; None for one document in each sequence.
        part: compute only this part; any but the last returns the hidden state (B, T, D), fp32. hidden_BTD: what the part
        before has returned.
        """
        part = part or Part(range(len(self.blocks)))
        num_tokens = checked_length(tokens_BT, self.sizes.max_sequence_length)
        if documents_BD is None:
            positions, spans = torch.arange(num_tokens, device=tokens_BT.device), None
        else:
            positions = positions_in_documents(documents_BD, num_tokens)
            spans = document_spans(documents_BD, self.own_ranges(num_tokens))
        if hidden_BTD is None:
            tokens_BT, positions = self.own_tokens(tokens_BT), self.own_tokens(positions)
            hidden_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions)
        for index in part.blocks:
            hidden_BTD = self.blocks[index](hidden_BTD, spans)
        return self.head(self.final_norm(hidden_BTD)) if part.is_last else hidden_BTD

    @property
    def tensor_plan(self) -> Mapping[str, TensorRole]:
        """Attention by heads, the MLP by its inner features, embedding and head by tokens."""
        return {
            "token_embedding": "embedding",
            "blocks.*.attention.qkv": "column of 3",
            "blocks.*.mlp.up": "column",
            "blocks.*.attention.output": "row",
            "blocks.*.mlp.down": "row",
            "head": "head",
        }

    @property
    def num_parameters(self) -> int:
        """Number of parameters; the tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def initial(self, name: str, num_dims: int) -> Initial:
        """Return the initial values of a parameter by its name."""
        if name.endswith("bias"):
            return Constant(0.0)
        if "norm" in name:
            return Constant(1.0)
        writes_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        return Normal(0.02 / math.sqrt(2 * self.sizes.num_layers) if writes_residual else 0.02)


def build(spec: GPTSpec, seed: int, _files: Files = ANY_FILE) -> GPT:
    """Build the GPT that a job asks for, with random values."""
    return GPT(spec.sizes, seed)
