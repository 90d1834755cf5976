"""A GPT: learned positions, pre-LayerNorm blocks, causal attention, a 4x GELU MLP, and a head tied to the embedding.

Plain PyTorch modules and nothing about precision: a level converts the `nn.Linear`s from outside (`worker.initialize`).
Initial values are GPT-2's (Radford et al. 2019): N(0, 0.02), with 0.02 / sqrt(2 * num_layers) for what writes to the
residual stream.

Shape suffixes: B sequences, T tokens, D hidden, H heads, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.models.cross_entropy import cross_entropy


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT, in transformers' words."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_sequence_length: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}. Change one of them."
            )


class Attention(nn.Module):
    """Causal multi-head attention; queries, keys and values come from one linear layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        query, key, value = (
            part_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part_BTD in self.qkv(hidden_BTD).chunk(3, dim=-1)
        )
        mixed_BHTd = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed_BHTd.transpose(1, 2).flatten(-2))


class MLP(nn.Sequential):
    """Two linear layers with a GELU (tanh form, as GPT-2) between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        hidden_BTD = hidden_BTD + self.attention(self.attention_norm(hidden_BTD))
        return hidden_BTD + self.mlp(self.mlp_norm(hidden_BTD))


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.max_sequence_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        self._reset_parameters(torch.Generator().manual_seed(seed))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        num_tokens = tokens_BT.shape[1]
        if num_tokens > self.config.max_sequence_length:
            raise ValueError(
                f"got {num_tokens} tokens; at most max_sequence_length {self.config.max_sequence_length}. "
                "Shorten the sequences or raise max_sequence_length."
            )
        positions_T = torch.arange(num_tokens, device=tokens_BT.device)
        hidden_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions_T)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        return self.head(self.final_norm(hidden_BTD))

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross entropy in nats per token, computed in fp32. Its backward pass runs once."""
        return cross_entropy(self(tokens_BT).flatten(0, 1), targets_BT.flatten())

    @property
    def num_parameters(self) -> int:
        """Number of parameters; the tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def _reset_parameters(self, generator: torch.Generator) -> None:
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                writes_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                parameter.normal_(0.0, residual_std if writes_residual else 0.02, generator=generator)
