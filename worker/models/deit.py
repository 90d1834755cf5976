"""A DeiT without distillation: transformers' ViTForImageClassification in the sizes of the contract."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octet.api_schemas import ANY_FILE, Files
from octet.api_schemas.models.deit import DeiTSizes, DeiTSpec
from octet.worker.models.huggingface import from_random_values, make_config
from octet.worker.models.model import TrainedModel
from octet.worker.models.wrapped import wrap


def build(spec: DeiTSpec, seed: int, _files: Files = ANY_FILE) -> TrainedModel:
    """Build the DeiT that a job asks for, with random values."""
    network = from_random_values(config_of(spec.sizes), "image_class", seed)
    drop_paths(network.vit.layers, spec.sizes.drop_path_rate)
    return wrap(network, "image_class")


def config_of(sizes: DeiTSizes) -> Any:
    """Return the configuration of transformers with these sizes."""
    fields = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 4 * sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "image_size": sizes.image_size,
        "patch_size": sizes.patch_size,
        "num_channels": sizes.num_channels,
        "num_labels": sizes.num_classes,
    }
    return make_config("vit", fields)


# Stochastic depth: in training, some images of a batch skip a residual branch (Huang et al. 2016, arXiv 1603.09382).
#
# transformers' Swin has it; its ViT has dropout at the end of each branch, which is replaced here.


class DropPath(nn.Module):
    """Set a branch of randomly chosen images to 0 and divide the others by the share that is kept, in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch_BTD: Tensor) -> Tensor:
        """Draws from torch's generator, which the trainer seeds by the position of the batch."""
        if not self.training:
            return branch_BTD
        kept_B11 = torch.rand(len(branch_BTD), 1, 1, device=branch_BTD.device) >= self.rate
        return branch_BTD * kept_B11.to(branch_BTD.dtype).div_(1 - self.rate)

    def extra_repr(self) -> str:
        """Say the rate."""
        return f"rate={self.rate}"


def drop_paths(layers: Sequence[Any] | nn.ModuleList, rate: float) -> None:
    """Give the two branches of each ViT layer of transformers a rate that grows linearly from 0 to `rate` (section 4)."""
    for number, layer in enumerate(layers):
        layer_rate = rate * number / max(1, len(layers) - 1)
        if layer_rate:
            layer.dropout = DropPath(layer_rate)
