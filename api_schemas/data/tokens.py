"""Tokens in shards on disk, described by an index: what a tokenizer made once, read without loading it into memory.

A folder holds `index.json` (`TokenIndex`) and the files that it names. A shard is a plain array of little-endian integers.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from api_schemas.base import Contract
from api_schemas.data.base import Needs, SourceSpec, Unfit

INDEX_NAME = "index.json"
BYTES_PER_TOKEN = {"uint8": 1, "uint16": 2, "uint32": 4}


class TokenShard(Contract):
    """One file of tokens, in the folder of the index."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]
    num_tokens: int = Field(ge=1)


class TokenIndex(Contract):
    """What a folder of shards holds. Each part is one run of tokens, its shards in this order."""

    version: Literal[1] = 1
    dtype: Literal["uint8", "uint16", "uint32"]
    vocab_size: int = Field(ge=1, description="one more than the largest token")
    train: tuple[TokenShard, ...] = Field(min_length=1)
    evaluation: tuple[TokenShard, ...] = Field(min_length=1)

    @classmethod
    def read(cls, folder: Path) -> "TokenIndex":
        """The index of a folder. Raises Unfit for one that is missing or wrong."""
        path = folder / INDEX_NAME
        if not path.is_file():
            raise Unfit("data.path", folder, f"a folder of token shards with {INDEX_NAME}", "Change data.path.")
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            where = ".".join(map(str, detail["loc"]))
            raise Unfit("data.path", path, f"an index of token shards ({where}: {detail['msg']})", "Write it again.") from None

    def check(self, folder: Path, needs: Needs) -> None:
        """Raise Unfit where shards are not as long as the index says, or too short or too rich for the job."""
        for shard in (*self.train, *self.evaluation):
            expected = shard.num_tokens * BYTES_PER_TOKEN[self.dtype]
            found = (folder / shard.file).stat().st_size
            if found != expected:
                allowed = f"{expected} bytes: {shard.num_tokens} tokens of {self.dtype}, as the index says"
                raise Unfit("data.path", f"{shard.file} of {found} bytes", allowed, "Write the shards again.")
        if self.vocab_size > needs.vocab_size:
            change = "Raise model.vocab_size, or train on tokens of a smaller vocabulary."
            raise Unfit("model.vocab_size", needs.vocab_size, f"at least {self.vocab_size}, that of the tokens", change)
        for part, shards in (("training", self.train), ("evaluation", self.evaluation)):
            num_tokens = sum(shard.num_tokens for shard in shards)
            if num_tokens <= needs.sequence_length:
                allowed = f"less than the {part} part of {folder}, which has {num_tokens} tokens"
                raise Unfit("training.sequence_length", needs.sequence_length, allowed, "Shorten training.sequence_length.")


class TokensSpec(SourceSpec):
    """Shards of tokens in a folder, as `worker.data.tokens.write_shards` writes them; memory-mapped by the workers."""

    source: Literal["tokens"] = "tokens"

    def check(self, path: Path, needs: Needs) -> None:
        """As `SourceSpec.check`; sizes of files are compared with the index, tokens are not read."""
        TokenIndex.read(path).check(path, needs)
