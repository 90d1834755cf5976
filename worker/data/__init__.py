"""Training input whose position fits in a checkpoint: one module for each source of `api_schemas/data/`, by its name."""

from importlib import import_module

from octet.api_schemas import ANY_FILE, Files, ImageInput, SourceSpec, TokenInput
from octet.worker.common.errors import DataError
from octet.worker.data.source import Batch, Source, VaryingTargets, loss_divisor
from octet.worker.data.targets import MaskedTokens, SmoothedLabels

__all__ = ["Batch", "Source", "VaryingTargets", "loss_divisor", "open_source"]


def open_source(
    spec: SourceSpec,
    sequence_length: int,
    seed: int,
    files: Files = ANY_FILE,
    takes: TokenInput | ImageInput | None = None,
    label_smoothing: float = 0.0,
) -> Source:
    """Open the source that a spec names. Raises DataError if a rank cannot read it or it holds too little.

    takes: what the model reads; None stands for a language model that predicts the next token. Sources of images cut nothing
    to `sequence_length`, and have their targets smoothed by `label_smoothing`.
    """
    if spec.is_stored:
        from octet.worker.data.stores import StoreFiles

        files = StoreFiles.of(files)
    module = import_module(f"octet.worker.data.{spec.source}")
    if isinstance(takes, ImageInput):
        images: Source = module.open_source(spec, takes, seed, files)
        return SmoothedLabels(images, takes.num_classes, label_smoothing) if label_smoothing else images
    source: Source = module.open_source(spec, sequence_length, seed, files)
    if takes is None:
        return source
    if takes.vocab_size is not None and source.facts.get("vocab_size", 0) > takes.vocab_size:
        raise DataError(
            f"{spec.path} has tokens up to {source.facts['vocab_size'] - 1:.0f}; allowed: below the model's vocab_size, "
            f"{takes.vocab_size}. Use the model's own tokenizer, or a model with a larger vocabulary."
        )
    if takes.mask_token is None:
        return source
    assert takes.vocab_size is not None  # by the contract of a masked model
    return MaskedTokens(source, takes.vocab_size, takes.mask_token, seed)
