"""A DeiT without distillation: transformers' ViTForImageClassification in the sizes of the contract."""

from typing import Any

from octet.api_schemas import ANY_FILE, Files
from octet.api_schemas.models.deit import DeiTSizes, DeiTSpec
from octet.worker.models.drop_path import drop_paths
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
