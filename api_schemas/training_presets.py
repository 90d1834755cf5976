"""The published recipes of four papers, as fields of a job's `training`. A job names one and overrides what it wants otherwise.

Lengths, batches and warm-ups are those of the papers' data; a job on other data sets its own.
"""

from collections.abc import Mapping
from typing import Any, Literal

TrainingPreset = Literal["gpt3-125m", "roberta-base", "deit", "swin"]

_ADAMW_OF_VISION = {"learning_rate": 1.0e-3, "betas": (0.9, 0.999), "weight_decay": 0.05}
_EMBEDDINGS_OF_VISION = ("*cls_token", "*position_embeddings")

TRAINING_PRESETS: Mapping[TrainingPreset, Mapping[str, Any]] = {
    # Brown et al. 2020, arXiv 2005.14165, table 2.1 and appendix B: 300 B tokens in batches of 0.5 M, warm-up over 375 M.
    "gpt3-125m": {
        "steps": 572_000,
        "global_batch_size": 256,
        "sequence_length": 2048,
        "optimizer": {"learning_rate": 6.0e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
        "schedule": {"warmup_steps": 715, "final_fraction": 0.1},
        "gradient_clip": 1.0,
    },
    # Liu et al. 2019, arXiv 1907.11692, table 9.
    "roberta-base": {
        "steps": 500_000,
        "global_batch_size": 8192,
        "sequence_length": 512,
        "optimizer": {"learning_rate": 6.0e-4, "betas": (0.9, 0.98), "eps": 1.0e-6, "weight_decay": 0.01},
        "schedule": {"name": "linear", "warmup_steps": 24_000, "final_fraction": 0.0},
        "gradient_clip": None,
    },
    # Touvron et al. 2021, arXiv 2012.12877, table 9: 5e-4 × batch / 512, 5 epochs of warm-up on ImageNet-1k, down to 1e-5.
    # Class token and positions do not decay in the authors' code. Their repeated augmentation is not done.
    "deit": {
        "epochs": 300,
        "global_batch_size": 1024,
        "optimizer": {**_ADAMW_OF_VISION, "no_decay": _EMBEDDINGS_OF_VISION},
        "schedule": {"warmup_steps": 6256, "final_fraction": 0.01},
        "gradient_clip": None,
        "label_smoothing": 0.1,
    },
    # Liu et al. 2021, arXiv 2103.14030, appendix A2.1: 20 epochs of warm-up on ImageNet-1k, down to 1e-5 in the authors' code,
    # where tables of relative positions do not decay.
    "swin": {
        "epochs": 300,
        "global_batch_size": 1024,
        "optimizer": {**_ADAMW_OF_VISION, "no_decay": ("*relative_position_bias_table",)},
        "schedule": {"warmup_steps": 25_023, "final_fraction": 0.01},
        "gradient_clip": 1.0,
        "label_smoothing": 0.1,
    },
}


def with_training_preset(training: Any) -> Any:
    """Return a job's `training` with its preset's fields where it sets none; anything else as it is.

    Fields of optimizer and schedule are merged one by one, unless the job names another optimizer or schedule: then the
    preset's numbers do not belong to it. A job that sets steps or epochs keeps its own length.
    """
    preset = training.get("preset") if isinstance(training, Mapping) else None
    if not isinstance(preset, str) or preset not in TRAINING_PRESETS:
        return training
    merged = dict(TRAINING_PRESETS[preset])
    if training.get("steps") is not None or training.get("epochs") is not None:
        merged = {name: value for name, value in merged.items() if name not in ("steps", "epochs")}
    for name, default in (("optimizer", "adamw"), ("schedule", "cosine")):
        own, published = training.get(name), merged.get(name, {})
        if isinstance(own, Mapping) and own.get("name", published.get("name", default)) == published.get("name", default):
            merged[name] = {**published, **own}
        elif own is not None:
            merged[name] = own
    return {**merged, **{name: value for name, value in training.items() if name not in ("optimizer", "schedule")}}
