"""A tokenizer with a chat template, and records to fine-tune on, made of the text that the tests carry."""

import json
from pathlib import Path
from typing import Any

from tests.kit.text import text

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NOUNS = ("river", "mountain", "letter", "window", "machine", "captain", "garden", "market", "bridge", "doctor")
VOCAB_SIZE = 320


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Any:
    """Train a byte-level BPE on the carried text, save it as transformers does, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text(100)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def conversation(noun: str, number: int = 1) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Where are the {number} {noun}s?"},
        {"role": "assistant", "content": f"The {noun} is near the coast."},
    ]


def write_chats(path: Path, num_records: int = 40) -> Path:
    """Write conversations of two and of four messages, which differ in length."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_records):
            messages = conversation(NOUNS[number % len(NOUNS)], number)
            if number % 3 == 0:
                messages += conversation(NOUNS[number % 7], number + 1)
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
