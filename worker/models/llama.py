"""A Llama: rotary positions, pre-RMSNorm blocks, causal attention with grouped queries, a SwiGLU MLP, no biases.

Plain PyTorch modules that know nothing of precision: a level converts the `nn.Linear`s from outside
(`octet.worker.initialize`). Rotation pairs element i of a head with element i + d/2, as
transformers' Llama does (Su et al. 2021, arXiv 2104.09864). RMSNorm follows Zhang and Sennrich
(2019), SwiGLU Shazeer (2020). Initial values are N(0, 0.02), and 0.02 / sqrt(2 * num_layers) for
layers that write to the residual stream.

Shape suffixes: B sequences, T tokens, D hidden, H heads, d elements of a head, V vocabulary.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas import ANY_FILE, Files
from octet.api_schemas.models.llama import LlamaSizes, LlamaSpec
from octet.worker.models.context import CausalAttention
from octet.worker.models.documents import Spans, document_spans, positions_in_documents
from octet.worker.models.initial import Constant, Initial, Normal, draw_parameters
from octet.worker.models.language import LanguageModel, checked_length
from octet.worker.models.model import Part, TensorRole


class Attention(CausalAttention):
    """Causal attention; each head of keys and values serves a group of query heads."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.head_size = sizes.head_size
        key_value_width = sizes.num_key_value_heads * sizes.head_size
        self.query = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False)
        self.key = nn.Linear(sizes.hidden_size, key_value_width, bias=False)
        self.value = nn.Linear(sizes.hidden_size, key_value_width, bias=False)
        self.output = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False)

    def forward(self, hidden_BTD: Tensor, turns: tuple[Tensor, Tensor], spans: Spans | None = None) -> Tensor:
        query_BHTd, key_BHTd, value_BHTd = (
            layer(hidden_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed_BHTd = self.attend(rotate(query_BHTd, turns), rotate(key_BHTd, turns), value_BHTd, spans)
        return self.output(mixed_BHTd.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(hidden_BTD)) * self.up(hidden_BTD))


class Block(nn.Module):
    """Attention and MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden_size, eps=1e-5)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.hidden_size, eps=1e-5)
        self.mlp = MLP(sizes)

    def forward(self, hidden_BTD: Tensor, turns: tuple[Tensor, Tensor], spans: Spans | None = None) -> Tensor:
        hidden_BTD = hidden_BTD + self.attention(self.attention_norm(hidden_BTD), turns, spans)
        return hidden_BTD + self.mlp(self.mlp_norm(hidden_BTD))


class Llama(LanguageModel):
    """Maps tokens to logits of the next token."""

    def __init__(self, sizes: LlamaSizes, seed: int = 0) -> None:
        super().__init__()
        sizes.check()
        self.sizes = sizes
        self.token_embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.final_norm = nn.RMSNorm(sizes.hidden_size, eps=1e-5)
        self.head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        if sizes.tie_embeddings:
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
        spans = None
        if hidden_BTD is None:
            hidden_BTD = self.token_embedding(self.own_tokens(tokens_BT))
        turns = rotation(num_tokens, self.sizes.head_size, self.sizes.rope_theta, hidden_BTD.device)
        if documents_BD is not None:
            positions_BT = positions_in_documents(documents_BD, num_tokens)
            spans = document_spans(documents_BD, self.own_ranges(num_tokens))
            turns = (turns[0][positions_BT][:, None], turns[1][positions_BT][:, None])
        turns = (self.own_tokens(turns[0], -2), self.own_tokens(turns[1], -2))
        for index in part.blocks:
            hidden_BTD = self.blocks[index](hidden_BTD, turns, spans)
        return self.head(self.final_norm(hidden_BTD)) if part.is_last else hidden_BTD

    @property
    def tensor_plan(self) -> Mapping[str, TensorRole]:
        """Attention by heads of keys and values, the MLP by its inner features, embedding and head by tokens."""
        columns = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
        return {
            "token_embedding": "embedding",
            **{f"blocks.*.{name}": "column" for name in columns},
            "blocks.*.attention.output": "row",
            "blocks.*.mlp.down": "row",
            "head": "head",
        }

    def initial(self, name: str, num_dims: int) -> Initial:
        """Return the initial values of a parameter by its name and number of dimensions."""
        if num_dims < 2:
            return Constant(1.0)
        writes_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        return Normal(0.02 / math.sqrt(2 * self.sizes.num_layers) if writes_residual else 0.02)


def rotation(num_tokens: int, head_size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, fp32 (T, d), of the angle that turns each pair at position t: t · theta^(-2i / d)."""
    frequencies = theta ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angles_Td = torch.outer(torch.arange(num_tokens, device=device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles_Td.cos(), angles_Td.sin()


def rotate(heads_BHTd: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + d/2) of a head by the angle of its position. The dtype stays.

    turns: cosines and sines, (T, d), or (B, 1, T, d) where sequences differ in their positions.
    """
    cosines, sines = turns
    first, second = heads_BHTd.float().chunk(2, dim=-1)
    turned = heads_BHTd.float() * cosines + torch.cat((-second, first), dim=-1) * sines
    return turned.to(heads_BHTd.dtype)


def build(spec: LlamaSpec, seed: int, _files: Files = ANY_FILE) -> Llama:
    """Build the Llama that a job asks for, with random values."""
    return Llama(spec.sizes, seed)
