"""Packing: every token once, no row too long, exact resume at any step and rank count, and the loss of the records alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from octet.api_schemas import JobSpec, Needs, SpecConflict, TextSpec
from octet.api_schemas.layout import BatchDivision
from octet.worker.common.errors import DataError
from octet.worker.data import VaryingTargets, open_source
from octet.worker.data.jsonl import Completions
from octet.worker.data.packing import pack
from octet.worker.data.tokenizer import Encoded, TokenizedRecords
from octet.worker.data.windows import DocumentWindows
from octet.worker.models.cross_entropy import IGNORED
from octet.worker.models.documents import document_numbers
from tests.kit.chat import VOCAB_SIZE, save_tokenizer, write_chats
from tests.kit.training import train
from tests.worker.train.test_fine_tuning import LLAMA

CAPACITY = 12
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)
DIVISIONS = st.builds(BatchDivision, st.just(8), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))


@settings(max_examples=50, deadline=None)
@given(LENGTHS)
def test_each_document_is_in_one_row_that_holds_it(lengths: list[int]) -> None:
    numbers = list(range(3, 3 + len(lengths)))
    by_number = np.array([0, 0, 0, *lengths])
    rows = pack(numbers, by_number, CAPACITY)
    found = [rows[row] for row in range(len(rows))]
    assert sorted(np.concatenate(found).tolist()) == numbers
    sums = sorted(int(by_number[row].sum()) for row in found)
    assert sums[-1] <= CAPACITY
    assert len(sums) == 1 or sums[0] + sums[1] > CAPACITY  # otherwise best fit would have joined the two


RECORDS = st.lists(
    st.lists(st.booleans(), min_size=2, max_size=CAPACITY + 1).filter(lambda counts: any(counts[1:])), min_size=2, max_size=30
)


def completions(records: list[list[bool]], seed: int = 0) -> Completions:
    """A source in which token 100·r + t is token t of record r, counted from 1; the last record evaluates."""
    encoded = (Encoded([100 * number + t for t in range(len(counts))], counts) for number, counts in enumerate(records, 1))
    last = len(records) - 1
    tokenized = TokenizedRecords(encoded, CAPACITY + 1)
    return Completions(tokenized, range(last), range(last, last + 1), CAPACITY, seed, is_packed=True)


@settings(max_examples=30, deadline=None)
@given(records=RECORDS, seed=st.integers(0, 5), division=DIVISIONS, first_step=st.integers(0, 4))
def test_packed_records_resume_anywhere_and_lose_nothing(
    records: list[list[bool]], seed: int, division: BatchDivision, first_step: int
) -> None:
    _check_ranks(lambda: completions(records, seed), division, first_step)
    alone = completions(records, seed)
    epoch = alone.train_batch(3 * alone.num_train_samples, alone.num_train_samples)
    inputs, targets = [], []
    numbers_BT = document_numbers(epoch["documents"], CAPACITY)
    for tokens_T, targets_T, documents_T in zip(epoch["tokens"], epoch["targets"], numbers_BT, strict=True):
        for document in documents_T.unique().tolist():
            own = documents_T == document
            if not tokens_T[own].any() and document == documents_T.max():
                assert set(targets_T[own].tolist()) <= {IGNORED}
                continue  # padding
            assert len({token // 100 for token in tokens_T[own].tolist()}) == 1
            inputs += tokens_T[own].tolist()
            targets += [target for target in targets_T[own].tolist() if target != IGNORED]
    trained = records[:-1]
    assert sorted(inputs) == [100 * r + t for r, counts in enumerate(trained, 1) for t in range(len(counts) - 1)]
    assert sorted(targets) == [100 * r + t for r, counts in enumerate(trained, 1) for t in range(1, len(counts)) if counts[t]]


def text_source(folder: Path, texts: list[bytes], sequence_length: int) -> DocumentWindows:
    folder.mkdir(exist_ok=True)
    for number, content in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(content)
    source = open_source(TextSpec(path=str(folder), packing=True), sequence_length, seed=1)
    assert isinstance(source, DocumentWindows)
    return source


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=5, max_size=12).filter(lambda found: sum(map(bool, found)) >= 4),
    division=DIVISIONS,
    first_step=st.integers(0, 4),
)
def test_packed_text_resumes_anywhere_and_predicts_no_other_file(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], division: BatchDivision, first_step: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    texts = [bytes([65 + number]) * length for number, length in enumerate(lengths)]
    try:
        source = text_source(folder, [*texts, b"long" * 9, b"long" * 9], 4)
    except DataError:
        return  # the evaluation file that the hash chose is shorter than a window
    _check_ranks(lambda: source, division, first_step)
    epoch = source.train_batch(0, source.num_train_samples)
    counts = epoch["targets"] != IGNORED
    numbers_BT = document_numbers(epoch["documents"], 4)
    for tokens_T, targets_T, documents_T, counts_T in zip(epoch["tokens"], epoch["targets"], numbers_BT, counts, strict=True):
        assert torch.equal(tokens_T[1:][counts_T[:-1]], targets_T[:-1][counts_T[:-1]])
        assert torch.equal(counts_T[:-1], documents_T[1:] == documents_T[:-1])
        for document in documents_T.unique().tolist():
            assert len(set(tokens_T[documents_T == document].tolist()) - {10, *b"long"}) <= 1
    order = [source._order[position] for position in range(source.num_train_samples)]
    in_order = epoch["tokens"][torch.tensor(order).argsort()].flatten()
    assert torch.equal(in_order, source.train.read(0, len(in_order)))


def _check_ranks(opened: Any, division: BatchDivision, first_step: int) -> None:
    """Check that any number of ranks reads what one rank reads. Each rank opens the source again where it resumes."""
    alone = opened()
    for position in (8 * first_step, 8 * first_step + 8):
        parts = [
            opened().train_batch(division.first_sample(position, rank, index), division.micro_batch_size)
            for rank in range(division.num_data_ranks)
            for index in range(division.num_micro_batches)
        ]
        whole = alone.train_batch(position, 8)
        for name, tensor in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
        assert isinstance(alone, VaryingTargets)
        assert alone.num_targets(position, 8) == int((whole["targets"] != IGNORED).sum()) == int(whole["num_targets"].sum())


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    save_tokenizer(folder / "tokenizer")
    write_chats(folder / "chats.jsonl", 20)
    return folder


def document(chats: Path, num_rows: int, micro_batch_size: int, **data: Any) -> dict[str, Any]:
    files = {"path": str(chats / "chats.jsonl"), "tokenizer": str(chats / "tokenizer")}
    training = {"steps": 3, "global_batch_size": num_rows, "micro_batch_size": micro_batch_size, "sequence_length": 128}
    return {
        "name": "packed",
        "model": LLAMA | {"max_sequence_length": 128},
        "precision": {"level": "fp32"},
        "data": {"source": "jsonl", "evaluation_fraction": 0.2, **files, **data},
        "training": training | {"optimizer": {"learning_rate": 1e-2}},
    }


def test_a_job_trains_on_packed_records_as_on_each_alone(chats: Path, tmp_path: Path) -> None:
    """Each step reads all records: packed in rows, a row at a time, or a record at a time. The losses are the same."""
    alone, summary = train(document(chats, 16, 16), tmp_path / "alone")
    num_rows = 8
    packed, packed_summary = train(document(chats, num_rows, 1, packing=True), tmp_path / "packed")
    assert packed_summary.data["train_rows"] == num_rows
    assert packed_summary.data["train_records"] == summary.data["train_records"] == 16
    assert 0.5 < packed_summary.data["filled_share"] <= 1.0
    assert packed.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert packed_summary.evaluation_loss == pytest.approx(summary.evaluation_loss, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"architecture": "opt", "config": {"vocab_size": 320}}, "would see each other"),
        ({"preset": "roberta-base"}, "tokens can be hidden"),
    ],
)
def test_a_model_that_mixes_documents_is_refused(chats: Path, model: dict[str, Any], says: str) -> None:
    spec = document(chats, 8, 1, packing=True) | {"model": model}
    with pytest.raises(ValidationError, match=says):
        JobSpec.model_validate(spec)


def test_a_folder_of_a_model_that_mixes_documents_is_refused(chats: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom", "vocab_size": 320}')
    spec = JobSpec.model_validate(document(chats, 8, 1, packing=True) | {"model": {"path": str(tmp_path)}})
    from octet.api_schemas import check_data

    found = check_data(spec.model.read_sizes().takes, spec.data, 128)
    assert found is not None
    assert "would see each other" in str(found)


def test_one_file_of_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("text " * 100)
    spec = TextSpec(path=str(tmp_path / "one.txt"), packing=True)
    with pytest.raises(SpecConflict, match="a single document"):
        spec.check(tmp_path / "one.txt", Needs(8, VOCAB_SIZE))
    with pytest.raises(DataError, match="a single document"):
        open_source(spec, 8, seed=0)
