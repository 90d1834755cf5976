"""A Swin: transformers' SwinForImageClassification in the sizes of the contract."""

from typing import Any

from octet.api_schemas import ANY_FILE, Files
from octet.api_schemas.models.swin import SwinSizes, SwinSpec
from octet.worker.models.huggingface import from_random_values, make_config
from octet.worker.models.model import TrainedModel
from octet.worker.models.wrapped import wrap


def build(spec: SwinSpec, seed: int, _files: Files = ANY_FILE) -> TrainedModel:
    """Build the Swin that a job asks for, with random values."""
    return wrap(from_random_values(config_of(spec.sizes), "image_class", seed), "image_class")


def config_of(sizes: SwinSizes) -> Any:
    """Return the configuration of transformers with these sizes."""
    fields = {
        "drop_path_rate": sizes.drop_path_rate,
        "embed_dim": sizes.embed_dim,
        "depths": list(sizes.depths),
        "num_heads": list(sizes.num_heads),
        "window_size": sizes.window_size,
        "image_size": sizes.image_size,
        "patch_size": sizes.patch_size,
        "num_channels": sizes.num_channels,
        "num_labels": sizes.num_classes,
    }
    return make_config("swin", fields)
