"""The text stream: disjoint parts, every window once per epoch, resume from one number, equal for any world size."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from octet.api_schemas import JobSpec, Needs, SpecConflict, TextSpec, TokenInput
from octet.worker.common.errors import DataError
from octet.worker.data import open_source as open_training_source
from octet.worker.data.text import open_source, unigram_entropy_nats
from octet.worker.data.windows import HeldTokens, Tokens
from tests.kit.chat import save_tokenizer
from tests.kit.text import write_corpus as write_sentences


def write_corpus(root: Path, num_files: int, num_bytes: int = 400) -> TextSpec:
    root.mkdir(exist_ok=True)
    for number in range(num_files):
        (root / f"{number:03}.txt").write_text(chr(ord("a") + number) * num_bytes)
    return TextSpec(path=str(root))


def every(tokens: Tokens) -> list[int]:
    return tokens.read(0, len(tokens)).tolist()


def test_training_and_evaluation_files_are_disjoint_and_complete(tmp_path: Path) -> None:
    data = open_source(write_corpus(tmp_path / "corpus", 20), sequence_length=16, seed=0)
    train, evaluation = set(every(data.train)), set(every(data.evaluation))
    assert train & evaluation <= {ord("\n")}
    assert len(train | evaluation) == 21
    assert data.facts["evaluation_files"] == 2


def test_a_single_file_is_split_by_position(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a" * 900 + "b" * 100)
    data = open_source(TextSpec(path=str(tmp_path / "one.txt")), sequence_length=16, seed=0)
    assert set(every(data.train)) == {ord("a")}
    assert set(every(data.evaluation)) == {ord("b")}


def test_binary_hidden_and_linked_files_are_left_out(tmp_path: Path) -> None:
    spec = write_corpus(tmp_path / "corpus", 4)
    (tmp_path / "corpus" / "blob.bin").write_bytes(b"x\0y" * 100)
    (tmp_path / "corpus" / ".secret").write_text("z" * 500)
    (tmp_path / "outside.txt").write_text("Z" * 500)
    (tmp_path / "corpus" / "link.txt").symlink_to(tmp_path / "outside.txt")
    data = open_source(spec, sequence_length=16, seed=0)
    assert data.facts["binary_files"] == 1
    assert data.facts["train_files"] + data.facts["evaluation_files"] == 4
    assert not {ord("z"), ord("Z")} & set(every(data.train) + every(data.evaluation))


def test_each_window_is_read_once_an_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 251)) * 8)
    data = open_source(TextSpec(path=str(tmp_path / "one.txt"), evaluation_fraction=0.1), sequence_length=10, seed=3)
    count = data.num_train_windows
    first = [tuple(row) for row in data.train_batch(0, count)["tokens"].tolist()]
    second = [tuple(row) for row in data.train_batch(count, count)["tokens"].tolist()]
    assert sorted(first) == sorted(second)
    assert first != second
    windows = [tuple(data.train.read(start * 10, start * 10 + 10).tolist()) for start in range(count)]
    assert sorted(first) == sorted(windows)


def test_targets_are_the_tokens_that_follow(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 256)) * 4)
    batch = open_source(TextSpec(path=str(tmp_path / "one.txt")), sequence_length=8, seed=0).train_batch(5, 3)
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert batch["tokens"].dtype == torch.int64


def test_ranks_and_micro_batches_read_what_one_rank_would(tmp_path: Path) -> None:
    data = open_source(write_corpus(tmp_path / "corpus", 10), sequence_length=16, seed=0)
    whole = data.train_batch(40, 8)["tokens"]
    parts = [data.train_batch(40 + rank * 4 + micro * 2, 2)["tokens"] for rank in range(2) for micro in range(2)]
    assert torch.equal(whole, torch.cat(parts))


def test_evaluation_is_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    data = open_source(write_corpus(tmp_path / "corpus", 20, 1000), sequence_length=16, seed=0)

    def windows(num_parts: int) -> list[tuple[int, ...]]:
        batches = [batch for part in range(num_parts) for batch in data.evaluation_batches(8, 3, part, num_parts)]
        return sorted(tuple(row) for batch in batches for row in batch["tokens"].tolist())

    assert len(windows(1)) == 24
    assert windows(1) == windows(2) == windows(4)


def test_unigram_entropy() -> None:
    assert unigram_entropy_nats(HeldTokens(np.array([1, 2, 3, 4]))) == pytest.approx(math.log(4))
    assert unigram_entropy_nats(HeldTokens(np.array([7, 7]))) == 0.0


@pytest.mark.parametrize("num_files", [0, 1])
def test_too_few_files_are_refused_with_what_to_change(tmp_path: Path, num_files: int) -> None:
    with pytest.raises(DataError, match=r"Change data\.include"):
        open_source(write_corpus(tmp_path / "corpus", num_files), sequence_length=16, seed=0)


def test_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sequence_length"):
        open_source(write_corpus(tmp_path / "corpus", 3, 20), sequence_length=256, seed=0)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a file nor a folder"):
        open_source(TextSpec(path=str(tmp_path / "none")), sequence_length=16, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


class TestTokenizer:
    """Text read by a tokenizer of transformers."""

    def test_tokens_are_the_tokenizers_and_each_file_ends(self, folder: Path, tmp_path: Path) -> None:
        theirs = save_tokenizer(tmp_path / "again")
        corpus = write_sentences(tmp_path / "corpus", num_files=6, num_sentences=20)
        (corpus / "café.txt").write_text("café\n" * 40)
        spec = TextSpec(path=str(corpus), tokenizer=str(folder))
        data = open_source(spec, sequence_length=8, seed=0)
        parts = spec.divide_files([path.name for path in corpus.iterdir()])
        for tokens, names in zip((data.train, data.evaluation), parts, strict=True):
            expected = [[*theirs((corpus / name).read_text())["input_ids"], theirs.eos_token_id] for name in names]
            assert every(tokens) == [token for tokens_of_file in expected for token in tokens_of_file]
        assert data.facts["vocab_size"] == max(every(data.train) + every(data.evaluation)) + 1
        assert data.facts["train_tokens"] == len(data.train) < data.facts["train_bytes"]
        assert open_source(spec.model_copy(update={"packing": True}), 8, 0).train_batch(0, 4)["documents"].min() == 0

    def test_a_single_file_is_not_cut_inside_a_character(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "one.txt").write_text("é" * 401)
        spec = TextSpec(path=str(tmp_path / "one.txt"), tokenizer=str(folder), evaluation_fraction=0.25)
        data = open_source(spec, sequence_length=8, seed=0)
        assert data.facts["train_bytes"] % 2 == 0
        assert data.facts["train_bytes"] + data.facts["evaluation_bytes"] == 802

    def test_a_model_with_a_tokenizer_is_not_fed_bytes(self, folder: Path, tmp_path: Path) -> None:
        corpus = write_sentences(tmp_path / "corpus", num_files=3, num_sentences=20)
        of_model = TextSpec(path=str(corpus)).with_model(str(folder))
        with pytest.raises(SpecConflict, match=r"its tokens are not bytes\. Set data\.tokenizer to"):
            of_model.check(corpus, Needs(8, 320))
        with pytest.raises(DataError, match="its tokens are not bytes"):
            open_source(of_model, 8, 0)
        TextSpec(path=str(corpus)).with_model(str(tmp_path)).check(corpus, Needs(8, 320))  # without a tokenizer: of bytes

    def test_what_is_wrong_is_named(self, folder: Path, tmp_path: Path) -> None:
        corpus = write_sentences(tmp_path / "corpus", num_files=3, num_sentences=20)
        needs = Needs(8, 320)
        TextSpec(path=str(corpus), tokenizer=str(folder)).check(corpus, needs)
        with pytest.raises(SpecConflict, match="a folder with a tokenizer"):
            TextSpec(path=str(corpus), tokenizer=str(corpus)).check(corpus, needs)
        with pytest.raises(ValidationError, match="an absolute path"):
            TextSpec(path=str(corpus), tokenizer="tokenizer")
        (corpus / "part_1.txt").write_bytes(b"latin \xe9" * 20)
        with pytest.raises(DataError, match=r"part_1\.txt is not UTF-8 at byte 6"):
            open_source(TextSpec(path=str(corpus), tokenizer=str(folder)), 8, 0)
        (corpus / "part_1.txt").unlink()
        spec = JobSpec.model_validate(
            {"name": "a", "model": {"preset": "gpt-tiny"}, "training": {"steps": 1}}
            | {"data": {"source": "text", "path": str(corpus), "tokenizer": str(folder)}}
        )
        with pytest.raises(DataError, match="below the model's vocab_size, 256"):
            open_training_source(spec.data, 8, 0, takes=TokenInput(256, 64))
