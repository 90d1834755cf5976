"""The promises of every source: each sample once an epoch, evaluation apart, and samples that depend on the position alone.

So a run resumes exactly at any step, and any number of ranks reads what one rank would read, in the same order.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octet.api_schemas import ANY_FILE, ImageInput, SourceSpec, TextSpec, TokenInput
from octet.api_schemas.data.images import ImagesSpec
from octet.api_schemas.data.jsonl import JsonlSpec
from octet.api_schemas.data.tokens import TokensSpec
from octet.api_schemas.layout import BatchDivision
from octet.worker.data import Batch, Source, open_source
from octet.worker.data.tokens import write_shards
from tests.kit.chat import save_tokenizer, write_chats
from tests.kit.datasets_data import saved_spec
from tests.kit.images import write_folder, write_images
from tests.kit.object_store import files_of, upload
from tests.kit.text import text, write_corpus

IMAGES = ImageInput(image_size=16, num_channels=3, num_classes=4, tokens_per_image=17)
LENGTH = 48
Open = Callable[[int], Source]
"""Opens a source by seed."""


def write_tokens(folder: Path) -> Path:
    tokens = list(text(60).encode())
    write_shards(folder, 256, [tokens[:700], tokens[700:2000]], [tokens[2000:2400]])
    return folder


def spec_of(name: str, folder: Path) -> SourceSpec:
    """Write the data of a source and return what selects it."""
    if name == "text":
        return TextSpec(path=str(write_corpus(folder / "text", num_files=4, num_sentences=12)))
    if name in ("tokens", "masked tokens"):
        return TokensSpec(path=str(write_tokens(folder / "tokens")))
    if name == "jsonl":
        path = write_chats(folder / "chats.jsonl", num_records=40)
        (folder / "model").mkdir()
        save_tokenizer(folder / "model")
        return JsonlSpec(path=str(path), tokenizer=str(folder / "model"))
    if name.startswith("saved"):
        return saved_spec(name, folder)
    if name == "images in a file":
        path = write_images(folder / "images.npz", num_images=40)
    else:
        path = write_folder(folder / "images", num_images=40, size=(16, 16))
    varied = {"augmentation": {"preset": "deit"}} if name == "varied images" else {}
    return ImagesSpec.model_validate({"path": str(path), **varied})


def make(name: str, folder: Path) -> Open:
    """Write the data of a source, in an object store if its name says so, and return what opens it."""
    spec, files = spec_of(name.removeprefix("stored "), folder), ANY_FILE
    if name.startswith("stored "):
        files = files_of("memory://corpus", cache=folder / "cache", cache_bytes=20_000)  # not enough for all
        spec = spec.model_copy(update={"path": upload(Path(spec.path), name)})
    if spec.gives == "images":
        smoothing = 0.1 if name == "varied images" else 0.0
        return lambda seed: open_source(spec, LENGTH, seed, files, takes=IMAGES, label_smoothing=smoothing)
    takes = TokenInput(257, LENGTH, mask_token=256) if name == "masked tokens" else None
    return lambda seed: open_source(spec, 64 if spec.has_targets else LENGTH, seed, files, takes=takes)


LOCAL = ("text", "tokens", "jsonl", "images in a file", "images in folders")
SAVED = ("saved texts", "saved records", "saved images")
PLAIN = (*LOCAL, *SAVED, *(f"stored {name}" for name in LOCAL))
ALL = (*PLAIN, "masked tokens", "varied images")


NOT_HERE = {name: pytest.mark.matrix for name in ("jsonl", "stored jsonl", "stored images in a file", "saved records")}
"""jsonl, and records, load transformers; test_jsonl_data.py has the same promises."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=NOT_HERE.get(name, ())) for name in ALL])
def opens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Open]:
    return request.param, make(request.param, tmp_path_factory.mktemp("source"))


def samples(batch: Batch) -> list[bytes]:
    """Return each sample of a batch as bytes, all its tensors together."""
    parts = [batch[name] for name in sorted(batch)]
    return [b"".join(row.numpy().tobytes() for row in rows) for rows in zip(*parts, strict=True)]


def evaluated(source: Source, num_parts: int) -> Iterator[bytes]:
    for part in range(num_parts):
        for batch in source.evaluation_batches(8, 1000, part, num_parts):
            yield from samples(batch)


def test_nothing_is_lost_read_twice_or_shared_with_the_evaluation(opens: tuple[str, Open]) -> None:
    name, opened = opens
    source = opened(0)
    num_samples = source.num_train_samples
    epochs = [samples(source.train_batch(epoch * num_samples, num_samples)) for epoch in range(2)]
    if name not in PLAIN:  # drawn again in each epoch
        assert not set(epochs[0]) & set(epochs[1])
        return
    assert len(set(epochs[0])) == num_samples
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]
    held_out = list(evaluated(source, 1))
    assert held_out
    assert not set(held_out) & set(epochs[0])
    assert samples(opened(1).train_batch(0, num_samples)) != epochs[0]


@pytest.mark.parametrize(
    ("first", "num_ranks", "num_micro_batches"),
    [(0, 4, 2), (37, 2, 1), pytest.param(101, 4, 1, marks=pytest.mark.matrix), pytest.param(5, 1, 2, marks=pytest.mark.matrix)],
)
def test_any_number_of_ranks_continues_at_any_step_as_one_rank_would(
    opens: tuple[str, Open], first: int, num_ranks: int, num_micro_batches: int
) -> None:
    _, opened = opens
    division = BatchDivision(8, 8 // num_ranks // num_micro_batches, num_ranks)
    whole = samples(opened(3).train_batch(first, 2 * division.global_batch_size))
    found = []
    ranks = [opened(3) for _ in range(num_ranks)]  # each has read nothing before
    for step in range(2):
        for rank, source in enumerate(ranks):
            for index in range(division.num_micro_batches):
                position = division.first_sample(first + step * division.global_batch_size, rank, index)
                found += samples(source.train_batch(position, division.micro_batch_size))
    assert found == whole


def test_ranks_divide_the_evaluation_without_loss_or_overlap(opens: tuple[str, Open]) -> None:
    _, opened = opens
    whole = sorted(evaluated(opened(0), 1))
    for num_parts in (2, 3):
        assert sorted(evaluated(opened(0), num_parts)) == whole
