"""Shards of tokens on disk, described by an index. A tokenizer wrote them once; ranks map them into memory.

A folder holds `index.json` (`TokenIndex`) and the files that it names. A shard is a plain array of little-endian integers.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from octet.api_schemas.base import Contract, SpecConflict
from octet.api_schemas.data.base import Needs, SourceSpec
from octet.api_schemas.data.files import ANY_FILE, Files

INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 16 << 20
BYTES_PER_TOKEN = {"uint8": 1, "uint16": 2, "uint32": 4}


class TokenShard(Contract):
    """One file of tokens, in the folder of the index."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]
    num_tokens: int = Field(ge=1)


class TokenIndex(Contract):
    """The contents of a folder of shards. Each part is one run of tokens, stored in its shards in this order."""

    version: Literal[1] = 1
    dtype: Literal["uint8", "uint16", "uint32"]
    vocab_size: int = Field(ge=1, description="one more than the largest token")
    train: tuple[TokenShard, ...] = Field(min_length=1)
    evaluation: tuple[TokenShard, ...] = Field(min_length=1)

    @classmethod
    def read(cls, folder: Path, files: Files = ANY_FILE) -> "TokenIndex":
        """Read the index of a folder. Raises SpecConflict if the index is missing or wrong."""
        path = folder / INDEX_NAME
        try:
            return cls.model_validate_json(files.read(path, MAX_INDEX_BYTES))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise SpecConflict(
                "data.path", folder, f"a folder of token shards with {INDEX_NAME}", "Change data.path."
            ) from None
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            where = ".".join(map(str, detail["loc"]))
            raise SpecConflict(
                "data.path", path, f"an index of token shards ({where}: {detail['msg']})", "Write it again."
            ) from None

    def check(self, folder: Path, needs: Needs, files: Files = ANY_FILE) -> None:
        """Raise SpecConflict if a shard is not as long as the index says, a part too short, or the vocabulary too large."""
        for shard in (*self.train, *self.evaluation):
            expected = shard.num_tokens * BYTES_PER_TOKEN[self.dtype]
            found = files.num_bytes(folder / shard.file)
            if found != expected:
                allowed = f"{expected} bytes: {shard.num_tokens} tokens of {self.dtype}, as the index says"
                raise SpecConflict("data.path", f"{shard.file} of {found} bytes", allowed, "Write the shards again.")
        if self.vocab_size > needs.vocab_size:
            change = "Raise model.vocab_size, or train on tokens of a smaller vocabulary."
            allowed = f"at least {self.vocab_size}, the vocabulary of the tokens"
            raise SpecConflict("model.vocab_size", needs.vocab_size, allowed, change)
        for part, shards in (("training", self.train), ("evaluation", self.evaluation)):
            num_tokens = sum(shard.num_tokens for shard in shards)
            if num_tokens <= needs.sequence_length:
                allowed = f"less than the {part} part of {folder}, which has {num_tokens} tokens"
                raise SpecConflict(
                    "training.sequence_length", needs.sequence_length, allowed, "Shorten training.sequence_length."
                )


class TokensSpec(SourceSpec):
    """Shards of tokens in a folder, written by `octet.worker.data.tokens.write_shards`; the workers memory-map them."""

    source: Literal["tokens"] = "tokens"

    def check(self, path: Path, needs: Needs, files: Files = ANY_FILE) -> None:
        """Check as `SourceSpec.check` says: compare file sizes with the index, without reading tokens."""
        TokenIndex.read(path, files).check(path, needs, files)
