"""A tiny Llama of transformers, built from a configuration, and text for it, byte by byte."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.kit.text import text

LENGTH = 32


def llama(seed: int = 0, dropout: float = 0.0) -> LlamaForCausalLM:
    """One layer of 32 features; the same weights for each seed."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=128, max_position_embeddings=64, attention_dropout=dropout, use_cache=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def examples(num_examples: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """`input_ids` and `labels`, both int64 (LENGTH)."""
    codes = torch.tensor(list(text(num_examples, seed).encode("ascii")))[: num_examples * LENGTH].view(-1, LENGTH)
    assert len(codes) == num_examples
    return [{"input_ids": row, "labels": row} for row in codes]


def evaluated_loss(model: nn.Module, rows: list[dict[str, Tensor]]) -> float:
    """The mean loss over the examples, in evaluation mode."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        loss: float = model.eval()(**batch).loss.item()
    return loss
