"""Data sets that Hugging Face's `datasets` saved: their rows, refused early if wrong, read only where the rules for data allow.

What all sources promise about order and resuming is in test_sources.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from octet.api_schemas import Files, ImageInput, JobSpec, Needs, SpecConflict
from octet.api_schemas.data.datasets import DatasetsSpec
from octet.worker.common.errors import DataError
from octet.worker.data import open_source
from octet.worker.data.datasets import RowBytes, _mapped, read_saved
from octet.worker.data.jsonl import JsonlSpec
from octet.worker.data.varied_images import VariedImages
from octet.worker.models.documents import document_numbers
from tests.kit.chat import save_tokenizer, write_chats
from tests.kit.datasets_data import save, save_chats, save_images, save_texts
from tests.kit.training import train, with_training

TAKES = ImageInput(image_size=16, num_channels=3, num_classes=3, tokens_per_image=17)
NEEDS, NEEDS_IMAGES = Needs(32, 256), Needs(32, 0, TAKES)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("texts") / "saved")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_images(tmp_path_factory.mktemp("images") / "saved")


def of_texts(folder: Path, **options: Any) -> DatasetsSpec:
    return DatasetsSpec(path=str(folder), text_column="body", **options)


def of_images(folder: Path, **options: Any) -> DatasetsSpec:
    return DatasetsSpec(path=str(folder), image_column="picture", label_column="kind", **options)


def bodies(folder: Path) -> list[bytes]:
    import datasets

    return [row["body"].encode() for row in datasets.load_from_disk(str(folder))]


def test_texts_are_their_bytes_with_a_line_feed_each(texts: Path) -> None:
    import numpy as np

    rows, expected = _mapped(texts, read_saved(texts), of_texts(texts), Files()), bodies(texts)
    chosen = np.array([0, 7, 21, 39])
    tokens = RowBytes(rows.data.column("body"), chosen, np.array([len(expected[row]) for row in chosen]))
    whole = b"".join(expected[row] + b"\n" for row in chosen)
    assert len(tokens) == len(whole)
    for start, stop in [(0, len(whole)), (3, 9), (len(expected[0]), len(expected[0]) + 2), (5, 5)]:
        assert bytes(tokens.read(start, stop).tolist()) == whole[start:stop]


def test_packed_rows_do_not_see_each_other(texts: Path) -> None:
    source = open_source(of_texts(texts, packing=True), 64, 0)
    batch = source.train_batch(0, source.num_train_samples)
    ends = batch["tokens"] == ord("\n")
    assert ends.any()
    numbers_BT = document_numbers(batch["documents"], 64)
    assert numbers_BT[:, 1:].gt(numbers_BT[:, :-1]).equal(ends[:, :-1])
    facts = open_source(of_texts(texts), 64, 0).facts
    assert sum(facts.values()) == sum(len(body) + 1 for body in bodies(texts))


def test_images_are_decoded_with_their_classes(images: Path) -> None:
    import datasets

    source = open_source(of_images(images), 256, 0, takes=TAKES)
    assert source.facts["train_images"] + source.facts["evaluation_images"] == 40
    batch = source.train_batch(0, source.num_train_samples)
    assert batch["images"].shape == (36, 3, 16, 16)
    assert isinstance(source, VariedImages)
    for number, row in enumerate(datasets.load_from_disk(str(images))):
        assert source.stock.read(number).tobytes() == row["picture"].tobytes()
        assert int(source.stock.labels_N[number]) == row["kind"]


def test_a_path_in_a_row_is_not_opened(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa

    folder = save_images(tmp_path / "saved", num_rows=4)
    encoded = pa.array([{"bytes": None, "path": "/etc/passwd"}] * 4, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    types = datasets.Features.from_dict(json.loads((folder / "dataset_info.json").read_text())["features"])
    table = pa.table({"picture": encoded, "kind": pa.array([0, 1, 0, 1], pa.int64())}, schema=types.arrow_schema)
    for name in read_saved(folder).files:
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match="has no image in the file"):
        open_source(of_images(folder), 256, 0, takes=TAKES).train_batch(0, 1)


@pytest.mark.matrix
def test_conversations_are_those_of_the_same_lines(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_tokenizer(tmp_path / "model")
    spec = DatasetsSpec(path=str(save_chats(tmp_path / "saved")), messages_column="messages", tokenizer=str(tmp_path / "model"))
    spec.check(spec.place, NEEDS)
    lines = JsonlSpec(path=str(write_chats(tmp_path / "again.jsonl")), tokenizer=str(tmp_path / "model"))
    found, expected = (open_source(each, 64, 0) for each in (spec, lines))
    rows = [sorted(map(bytes, source.train_batch(0, 36)["tokens"].to(torch.uint8).numpy())) for source in (found, expected)]
    assert len(set(rows[0]) & set(rows[1])) > 20  # the division differs


@pytest.mark.matrix
def test_a_job_learns_from_a_saved_data_set(texts: Path, tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = spec_document | {"data": {"source": "datasets", "path": str(texts), "text_column": "body"}}
    recorder, _ = train(with_training(document, steps=12, optimizer={"learning_rate": 1e-2}), tmp_path)
    assert recorder.losses()[-1] < 0.9 * recorder.losses()[0]
    job = JobSpec.model_validate(document)
    assert JobSpec.read_stored(job.model_dump(mode="json")) == job


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "got no column"),
        ({"text_column": "a", "label_column": "b"}, "got label_column, text_column"),
        ({"prompt_column": "a"}, "completion_column with prompt_column"),
        ({"text_column": "a", "tokenizer": "/t"}, "text is read as bytes"),
        ({"text_column": "a", "augmentation": {"flip": 0.5}}, "with images"),
        ({"image_column": "a", "label_column": "b", "packing": True}, "false with images"),
    ],
)
def test_columns_that_are_not_of_one_kind_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DatasetsSpec(path="/data", **columns)


def test_an_object_store_is_refused() -> None:
    with pytest.raises(ValidationError, match="an absolute path"):
        DatasetsSpec(path="s3://corpus/saved", text_column="a")


@pytest.mark.parametrize(
    ("columns", "field", "allowed"),
    [
        ({"text_column": "nothing"}, "data.text_column", "body, number"),
        ({"text_column": "number"}, "data.text_column", "a column of strings"),
        ({"messages_column": "body"}, "data.messages_column", "role and content"),
    ],
)
def test_a_column_of_another_type_is_refused(texts: Path, columns: dict[str, str], field: str, allowed: str) -> None:
    spec = DatasetsSpec(path=str(texts), **columns)
    with pytest.raises(SpecConflict) as raised:
        spec.check(texts, NEEDS)
    assert raised.value.field == field
    assert allowed in raised.value.allowed


def test_classes_and_channels_that_the_model_has_not_are_refused(images: Path) -> None:
    of_images(images).check(images, NEEDS_IMAGES)
    for takes, field in (
        (replace(TAKES, num_classes=2), "model.num_classes"),
        (replace(TAKES, num_channels=4), "model.num_channels"),
    ):
        with pytest.raises(SpecConflict) as raised:
            of_images(images).check(images, Needs(32, 0, takes))
        assert raised.value.field == field


@pytest.mark.parametrize(
    ("name", "content", "allowed"),
    [
        ("state.json", None, "a folder with state.json"),
        ("state.json", "[]", "an object"),
        ("state.json", "{", "JSON"),
        ("state.json", '{"_data_files": [{"filename": "../data.arrow"}]}', "in this folder"),
        ("dataset_info.json", "{}", "the types of the columns"),
        ("dataset_dict.json", '{"splits": ["train", "test"]}', "one split: train, test"),
    ],
)
def test_a_folder_that_is_no_saved_data_set_is_refused(
    tmp_path: Path, texts: Path, name: str, content: str | None, allowed: str
) -> None:
    for file in texts.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(SpecConflict, match=r"data\.path") as raised:
        of_texts(tmp_path).check(tmp_path, NEEDS)
    assert allowed in raised.value.allowed
    with pytest.raises(DataError):
        open_source(of_texts(tmp_path), 32, 0)


def test_an_arrow_file_outside_the_roots_or_damaged_is_refused(tmp_path: Path, texts: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    for file in texts.iterdir():
        (folder / file.name).symlink_to(file)
    with pytest.raises(DataError, match="inside"):
        open_source(of_texts(folder), 32, 0, Files.below((folder,)))
    name = read_saved(folder).files[0]
    (folder / name).unlink()
    with pytest.raises(DataError, match="cannot read"):
        open_source(of_texts(folder), 32, 0)
    (folder / name).write_bytes(b"damaged" * 10)
    with pytest.raises(DataError, match="is not an Arrow file"):
        open_source(of_texts(folder), 32, 0)


def test_rows_without_a_text_and_too_few_rows_are_refused(tmp_path: Path) -> None:
    from datasets import Value

    missing = save(tmp_path / "missing", {"body": ["a", None, "b"]}, {"body": Value("string")}, num_shards=1)
    with pytest.raises(DataError, match=r"1 rows of .* have no text"):
        open_source(of_texts(missing), 32, 0)
    short = save(tmp_path / "short", {"body": ["a", "b", "c"]}, {"body": Value("string")}, num_shards=1)
    with pytest.raises(DataError, match="must hold more than 32 bytes"):
        open_source(of_texts(short), 32, 0)
