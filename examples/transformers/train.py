"""Train a small Llama on a text, byte by byte, with transformers' Trainer at a precision level.

All of `TrainingArguments` and `OctetArguments` are options; `--resume_from_checkpoint FOLDER` continues bit for bit.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from octet import OctetArguments, prepare_trainer

README = Path(__file__).parents[2] / "README.md"


@dataclass
class ExampleArguments:
    """Options of the data."""

    text: str = field(default=str(README), metadata={"help": "a text file"})
    length: int = field(default=64, metadata={"help": "bytes per example"})


def rows_of(text: bytes, length: int) -> list[dict[str, Tensor]]:
    """Cut a text into examples; `input_ids` and `labels` are int64 (length)."""
    num_rows = len(text) // length
    rows = torch.tensor(list(text[: num_rows * length])).view(num_rows, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Read the command line, train, and save."""
    parser = HfArgumentParser((ExampleArguments, OctetArguments, TrainingArguments))
    example, octet, training = parser.parse_args_into_dataclasses()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=example.length))
    trainer = Trainer(model, training, train_dataset=rows_of(Path(example.text).read_bytes(), example.length))
    prepare_trainer(trainer, octet)
    sys.stdout.write(f"{trainer.model.octet_report}\n")
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
