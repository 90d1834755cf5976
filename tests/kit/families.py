"""A tiny model of each family that `initialize` meets, and a batch for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octet.api_schemas import GPTSizes
from octet.api_schemas.models.deit import DeiTSpec
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.api_schemas.models.llama import LlamaSizes
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.models import TrainedModel, build_model
from octet.worker.models.gpt import GPT
from octet.worker.models.llama import Llama

TOKENS = torch.randint(4, 64, (2, 17), generator=torch.Generator().manual_seed(0))
WIDE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = WIDE | {"vocab_size": 64, "max_position_embeddings": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1}
IMAGES = {"image_size": 32, "patch_size": 4, "num_labels": 4}
FAMILIES: dict[str, Callable[[], TrainedModel]] = {
    "gpt": lambda: GPT(GPTSizes(hidden_size=32, num_layers=1, num_heads=2, vocab_size=64, max_sequence_length=32)),
    "llama": lambda: Llama(
        LlamaSizes(
            hidden_size=32,
            intermediate_size=64,
            num_layers=1,
            num_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            max_sequence_length=32,
            rope_theta=10_000.0,
            tie_embeddings=True,
        )
    ),
    "transformers-llama": lambda: transformers("llama", TEXT | {"num_key_value_heads": 1}),
    "roberta": lambda: transformers("roberta", TEXT | NO_DROPOUT),
    "vit": lambda: transformers("vit", WIDE | IMAGES),
    "deit": lambda: build_model(
        DeiTSpec(hidden_size=32, num_layers=1, num_heads=2, image_size=32, patch_size=4, num_channels=3, num_classes=4), 0
    ),
    "swin": lambda: transformers("swin", IMAGES | {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}),
}


def transformers(architecture: str, config: dict[str, Any]) -> TrainedModel:
    return build_model(HuggingFaceSpec(family="huggingface", architecture=architecture, config=config), 0)


def batch_of(family: str) -> dict[str, Tensor]:
    if family in ("vit", "deit", "swin"):
        return {"images": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), "labels": torch.arange(2)}
    if family == "roberta":
        positions = torch.tensor([[0, 5], [3, 9]])
        return {"tokens": TOKENS, "positions": positions, "targets": TOKENS.gather(1, positions)}
    return {"tokens": TOKENS[:, :-1].contiguous(), "targets": TOKENS[:, 1:].contiguous()}


def fit_loss_scale(model: nn.Module) -> None:
    """Lower the loss scale of a level in fp16: at its initial value the gradient of two images overflows."""
    if STATE_BUFFER in dict(model.named_buffers()):
        model.get_buffer(STATE_BUFFER)[0] = 256.0
