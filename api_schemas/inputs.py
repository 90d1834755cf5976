"""The batches that a network takes and the values that it predicts: what ties a family of models to a source of data."""

from dataclasses import dataclass
from typing import ClassVar, Literal

Task = Literal["next_token", "masked_token", "image_class"]
BatchKind = Literal["tokens", "images"]

DEFAULT_SEQUENCE_LENGTH = 256

METRICS: dict[Task, tuple[str, ...]] = {
    "next_token": ("token_accuracy",),
    "masked_token": ("masked_token_accuracy",),
    "image_class": ("top1_accuracy", "top5_accuracy"),
}
"""The values that an evaluation of each task measures besides the loss; each is a mean over the same targets."""


@dataclass(frozen=True)
class TokenInput:
    """Sequences of tokens. None: only the rank can know.

    mask_token: the token that hides others, if the task masks. keeps_documents_apart: True if attention and positions can end
    at the border of a document, so that several documents fit in one sequence.
    """

    kind: ClassVar[BatchKind] = "tokens"

    vocab_size: int | None
    max_sequence_length: int | None
    mask_token: int | None = None
    keeps_documents_apart: bool | None = False


@dataclass(frozen=True)
class ImageInput:
    """Square images with a class each. tokens_per_image: the tokens that most of the network's blocks see of one image."""

    kind: ClassVar[BatchKind] = "images"

    image_size: int
    num_channels: int
    num_classes: int
    tokens_per_image: int


def tokens_per_sample(takes: TokenInput | ImageInput, sequence_length: int) -> int:
    """Return the tokens of one sample: those of a sequence, or those that the model takes from an image."""
    return takes.tokens_per_image if isinstance(takes, ImageInput) else sequence_length
