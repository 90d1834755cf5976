"""Training input whose position fits in a checkpoint: one module for each source of `api_schemas/data/`, by its name."""

from importlib import import_module

from api_schemas import ANY_FILE, Files, ImageInput, SourceSpec, TokenInput
from worker.data.masking import MaskedTokens
from worker.data.source import Batch, Source

__all__ = ["Batch", "Source", "open_source"]


def open_source(
    spec: SourceSpec,
    sequence_length: int,
    seed: int,
    files: Files = ANY_FILE,
    takes: TokenInput | ImageInput | None = None,
) -> Source:
    """Open the source that a spec names. Raises DataError if a rank cannot read it or it holds too little.

    takes: what the model reads; None stands for a language model that predicts the next token. Sources of images cut nothing
    to `sequence_length`.
    """
    module = import_module(f"worker.data.{spec.source}")
    if isinstance(takes, ImageInput):
        images: Source = module.open_source(spec, takes, seed, files)
        return images
    source: Source = module.open_source(spec, sequence_length, seed, files)
    if takes is None or takes.mask_token is None:
        return source
    assert takes.vocab_size is not None  # the contract of a masked model says it
    return MaskedTokens(source, takes.vocab_size, takes.mask_token, seed)
