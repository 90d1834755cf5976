"""The networks that Octet trains."""

from worker.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
