"""Images from a .npz file: each once an epoch, evaluation apart, refused early if wrong; classifiers learn from them."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octet.api_schemas import EvaluationReport, ImageInput, Needs, SpecConflict
from octet.api_schemas.data.images import ImagesSpec
from octet.worker.common.errors import Cancelled, DataError
from octet.worker.data import open_source
from octet.worker.data.images import LabelledImages
from tests.kit.images import write_images
from tests.kit.training import Recorder, train, with_training

TAKES = ImageInput(image_size=16, num_channels=3, num_classes=4, tokens_per_image=17)
NEEDS = Needs(256, 0, TAKES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_images(tmp_path / "colours.npz")


def source_of(path: Path, seed: int = 0) -> LabelledImages:
    source = open_source(ImagesSpec(path=str(path)), 256, seed, takes=TAKES)
    assert isinstance(source, LabelledImages)
    return source


def rows(images: torch.Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def test_every_image_is_read_once_an_epoch_and_evaluation_is_apart(path: Path) -> None:
    source = source_of(path)
    assert source.facts["train_images"] == 86
    assert source.facts["evaluation_images"] == 10
    first, second = source.train_batch(0, 86), source.train_batch(86, 86)
    assert len(set(rows(first["images"]))) == 86
    assert set(rows(first["images"])) == set(rows(second["images"]))
    assert rows(first["images"]) != rows(second["images"])
    held_out = [row for batch in source.evaluation_batches(10, 1, 0, 1) for row in rows(batch["images"])]
    assert len(set(held_out)) == 10
    assert not set(held_out) & set(rows(first["images"]))
    assert set(held_out) == {
        row
        for part in range(3)
        for batch in source_of(path, 7).evaluation_batches(10, 1, part, 3)
        for row in rows(batch["images"])
    }


def test_pixels_are_scaled_and_channels_come_first(path: Path) -> None:
    source, batch = source_of(path), source_of(path).train_batch(3, 2)
    assert batch["images"].shape == (2, 3, 16, 16)
    assert batch["images"].dtype == torch.float32
    raw = source.images_NHWC[source.parts.train[source.order[3]]]
    assert batch["images"][0, 1, 2, 5] == raw[2, 5, 1] / 127.5 - 1
    assert batch["labels"][0] == source.labels_N[source.parts.train[source.order[3]]]


@pytest.mark.parametrize(
    ("changes", "field", "allowed"),
    [
        ({"images": None}, "data.path", "arrays images and labels"),
        ({"labels": None}, "data.path", "arrays images and labels"),
        ({"images": np.zeros((96, 16, 16, 3))}, "data.path", "uint8"),
        ({"images": np.zeros((96, 16), np.uint8)}, "data.path", "uint8"),
        ({"labels": np.zeros(95, np.int64)}, "data.path", "a label for each image"),
        ({"labels": np.zeros(96)}, "data.path", "integers"),
        ({"size": 8}, "model.image_size", "8 × 8 pixels"),
        ({"num_channels": 1}, "model.num_channels", "1 channels"),
        ({"labels": np.array([None] * 96)}, "data.path", "integers"),
    ],
)
def test_a_file_that_cannot_feed_the_model_is_refused_early_and_in_the_rank(
    tmp_path: Path, changes: dict[str, Any], field: str, allowed: str
) -> None:
    path = write_images(tmp_path / "wrong.npz", **changes)
    with pytest.raises(SpecConflict) as raised:
        ImagesSpec(path=str(path)).check(path, NEEDS)
    assert raised.value.field == field
    assert allowed in raised.value.allowed
    with pytest.raises(DataError, match=field):
        source_of(path)


@pytest.mark.parametrize("content", [b"", b"PK", b"text" * 100])
def test_what_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.npz"
    path.write_bytes(content)
    with pytest.raises(SpecConflict, match="npz"):
        ImagesSpec(path=str(path)).check(path, NEEDS)


def test_damaged_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.npz"
    for header in (b"\x93NUMPY\x01\x00\x05\x00[[[[[", b"\x93NUMPY\x01\x00\xff\xff", b"none", b"\x93NUMPY\x01\x00\x02\x00{}"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("images.npy", header)
            archive.writestr("labels.npy", header)
        with pytest.raises(SpecConflict, match="npz"):
            ImagesSpec(path=str(path)).check(path, NEEDS)


def test_a_label_outside_the_classes_is_refused_in_the_rank(tmp_path: Path) -> None:
    path = write_images(tmp_path / "wrong.npz", labels=np.full(96, 4))
    with pytest.raises(DataError, match=r"from 4 to 4; allowed: 0 to 3"):
        source_of(path)


DEIT = {"preset": "deit-tiny", "num_layers": 2, "hidden_size": 32, "num_heads": 2, "image_size": 16, "num_classes": 4}
SWIN = {"preset": "swin-tiny", "image_size": 16, "patch_size": 2, "num_classes": 4, "depths": [1, 1]}


@pytest.mark.system
@pytest.mark.parametrize("model", [pytest.param(DEIT, id="deit"), pytest.param(SWIN, id="swin", marks=pytest.mark.matrix)])
def test_a_classifier_learns_and_resumes_bit_identically(
    tmp_path: Path, path: Path, spec_document: dict[str, Any], model: dict[str, Any]
) -> None:
    document = spec_document | {"model": model, "data": {"source": "images", "path": str(path)}}
    training = {
        "steps": 16,
        "global_batch_size": 8,
        "checkpoint_every": 6,
        "sequence_length": 256,
        "optimizer": {"learning_rate": 3e-3},
    }
    document = with_training(document, "O2", **training)
    whole, summary = train(document, tmp_path / "whole")
    interrupted = Recorder(stop_after_step=9)
    with pytest.raises(Cancelled):
        train(document, tmp_path / "parts", recorder=interrupted)
    resumed, again = train(document, tmp_path / "parts", interrupted.checkpoints())
    assert resumed.losses() == whole.losses()[6:]
    assert again.evaluation_metrics == summary.evaluation_metrics == whole.of(EvaluationReport)[-1].metrics
    assert set(summary.evaluation_metrics) == {"top1_accuracy", "top5_accuracy"}
    assert summary.evaluation_metrics["top5_accuracy"] == 1.0  # there are four classes
    assert summary.evaluation_metrics["top1_accuracy"] > summary.data["largest_class_ratio"]
    assert summary.evaluation_loss < 0.7 * whole.losses()[0]
