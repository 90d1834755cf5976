"""Token shards: the same stream as one run of tokens, memory-mapped, checked at submission and in the rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas import JobSpec, Needs, SpecConflict, StepReport
from octet.api_schemas.data.tokens import TokenIndex, TokenShard, TokensSpec
from octet.worker.common.errors import DataError
from octet.worker.data import open_source
from octet.worker.data.tokens import ShardedTokens, write_shards
from tests.kit.text import text
from tests.kit.training import train, with_training

TOKENS = list(text(400).encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "shards", 256, [TOKENS[:5000], TOKENS[5000:5001], TOKENS[5001:20_000]], [TOKENS[20_000:]])
    return tmp_path / "shards"


def spec(document: dict[str, Any], folder: Path) -> JobSpec:
    return JobSpec.model_validate(document | {"data": {"source": "tokens", "path": str(folder)}})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_a_range_over_shards_is_the_range_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    folder, whole = tmp_path_factory.mktemp("shards"), np.arange(sum(lengths), dtype="<u2")
    for number, part in enumerate(np.split(whole, np.cumsum(lengths)[:-1])):
        part.tofile(folder / f"{number}.bin")
    shards = [TokenShard(file=f"{number}.bin", num_tokens=length) for number, length in enumerate(lengths)]
    tokens = ShardedTokens(folder, shards, "uint16")
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert len(tokens) == len(whole)
    assert tokens.read(start, stop).tolist() == whole[start:stop].tolist()
    assert tokens.read(start, stop).dtype == torch.int64
    starts = data.draw(st.lists(st.integers(0, start), min_size=1, max_size=3))
    rows = tokens.read_rows(np.array(starts), stop - start)
    assert rows.tolist() == [whole[first : first + stop - start].tolist() for first in starts]


def test_every_window_is_read_once_an_epoch(folder: Path) -> None:
    source = open_source(TokensSpec(path=str(folder)), 32, seed=0)
    assert source.facts == {"train_tokens": 20_000, "evaluation_tokens": len(TOKENS) - 20_000, "vocab_size": 256}
    batch = source.train_batch(0, 624)  # the windows of an epoch: 19,999 // 32
    windows = {tuple(TOKENS[start : start + 32]) for start in range(0, 624 * 32, 32)}
    assert {tuple(row) for row in batch["tokens"].tolist()} == windows


def test_tokens_that_are_bytes_train_what_text_would(tmp_path: Path, folder: Path, spec_document: dict[str, Any]) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(TOKENS[:20_000]) + bytes(TOKENS[20_000:]))
    fraction = (len(TOKENS) - 20_000) / len(TOKENS)
    as_text = spec_document | {"data": {"path": str(tmp_path / "one.txt"), "evaluation_fraction": fraction}}
    as_tokens = spec_document | {"data": {"source": "tokens", "path": str(folder)}}
    runs = [train(with_training(document), tmp_path / str(index)) for index, document in enumerate((as_text, as_tokens))]
    assert [report.loss for report in runs[0][0].of(StepReport)] == [report.loss for report in runs[1][0].of(StepReport)]
    assert runs[0][1].evaluation_loss == runs[1][1].evaluation_loss


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_the_smallest_dtype_holds_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    index = write_shards(tmp_path, vocab_size, [[0, vocab_size - 1] * 40], [[vocab_size - 1] * 40])
    assert index.dtype == dtype
    batch = open_source(TokensSpec(path=str(tmp_path)), 16, seed=0).train_batch(0, 1)
    assert int(batch["tokens"].max()) == vocab_size - 1


def test_a_token_outside_the_vocabulary_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"from 0 to 300; allowed: 0 to 255\. Raise vocab_size"):
        write_shards(tmp_path, 256, [[0, 300]], [[1]])
    with pytest.raises(DataError, match=r"index\.json"):
        open_source(TokensSpec(path=str(tmp_path)), 16, seed=0)


@pytest.mark.parametrize(
    ("spoil", "needs", "field", "allowed"),
    [
        (lambda folder: (folder / "index.json").unlink(), Needs(32, 256), "data.path", "index.json"),
        (lambda folder: (folder / "index.json").write_text("{}"), Needs(32, 256), "data.path", "an index of token shards"),
        (lambda folder: (folder / "train-00001.bin").write_bytes(b"xx"), Needs(32, 256), "data.path", "1 bytes"),
        (lambda folder: None, Needs(32, 255), "model.vocab_size", "at least 256"),
        (lambda folder: None, Needs(20_000, 256), "training.sequence_length", "20000 tokens"),
    ],
)
def test_shards_that_cannot_feed_a_job_are_refused(folder: Path, spoil: Any, needs: Needs, field: str, allowed: str) -> None:
    spoil(folder)
    with pytest.raises(SpecConflict) as raised:
        TokensSpec(path=str(folder)).check(folder, needs)
    assert raised.value.field == field
    assert allowed in raised.value.allowed


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "train-00002.bin").unlink()
    with pytest.raises(DataError, match=r"train-00002\.bin"):
        open_source(TokensSpec(path=str(folder)), 32, seed=0)


def test_a_job_of_tokens_is_stored_and_read_again(folder: Path, spec_document: dict[str, Any]) -> None:
    job = spec(spec_document, folder)
    assert isinstance(job.data, TokensSpec)
    assert JobSpec.read_stored(job.model_dump(mode="json") | {"from_a_later_version": 1}) == job
    assert TokenIndex.read(folder).vocab_size == 256
