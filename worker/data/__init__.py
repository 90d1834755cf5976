"""Input with a position that a checkpoint can hold."""

from worker.data.text import Batch, TextData, load_text

__all__ = ["Batch", "TextData", "load_text"]
