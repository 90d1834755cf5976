"""Images in folders: every image once an epoch, refused early if wrong, bad files named; augmentation by position alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from octet.api_schemas import ImageInput, Needs, SpecConflict
from octet.api_schemas.data.augmentation import AugmentationSpec
from octet.api_schemas.data.files import Files
from octet.api_schemas.data.images import ImagesSpec
from octet.worker.common.errors import DataError
from octet.worker.data import Source, open_source
from octet.worker.data.augmentation import (
    APPLIED,
    ERASED_AREA,
    OPERATIONS,
    central_crop,
    draw_box,
    erase_,
    mix_,
    randaugment,
    to_tensor,
    vary,
)
from tests.kit.images import write_folder, write_images
from tests.kit.training import train, with_training

TAKES = ImageInput(image_size=16, num_channels=3, num_classes=4, tokens_per_image=17)
NEEDS = Needs(256, 0, TAKES)
WHOLE = {"preset": "deit"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images")


def opened(path: Path, seed: int = 0, label_smoothing: float = 0.0, **spec: Any) -> Source:
    return open_source(ImagesSpec(path=str(path), **spec), 256, seed, takes=TAKES, label_smoothing=label_smoothing)


def rows(images: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def test_every_image_is_read_once_an_epoch_with_its_class(folder: Path) -> None:
    source = opened(folder, evaluation_fraction=0.25)
    assert source.facts["train_images"] == 18
    first, second = source.train_batch(0, 18), source.train_batch(18, 18)
    assert first["images"].shape == (18, 3, 16, 16)
    assert len(set(rows(first["images"]))) == 18
    assert set(rows(first["images"])) == set(rows(second["images"]))
    held_out = [batch for part in range(2) for batch in source.evaluation_batches(6, 1, part, 2)]
    evaluated = {row for batch in held_out for row in rows(batch["images"])}
    assert len(evaluated) == 6
    assert not evaluated & set(rows(first["images"]))
    for batch in (first, *held_out):
        assert torch.equal(batch["images"].mean((2, 3)).argmax(1), batch["labels"])


@pytest.mark.parametrize("augmentation", [{}, {"flip": 0.5}, WHOLE], ids=str)
@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_a_sample_depends_on_seed_and_position_alone(
    tmp_path: Path, folder: Path, augmentation: dict[str, Any], kind: str
) -> None:
    path = folder if kind == "folder" else write_images(tmp_path / "colours.npz", num_images=24)
    whole = opened(path, augmentation=augmentation, label_smoothing=0.1).train_batch(5, 8)
    for start in (12, 9, 5):  # in another order, in smaller batches, by another rank that has read nothing before
        part = opened(path, augmentation=augmentation, label_smoothing=0.1).train_batch(start, 1)
        assert torch.equal(part["images"][0], whole["images"][start - 5])
        assert torch.equal(part["labels"][0], whole["labels"][start - 5])
    if augmentation:
        other = opened(path, 1, augmentation=augmentation, label_smoothing=0.1).train_batch(5, 8)
        assert not set(rows(other["images"])) <= set(rows(whole["images"]))


def test_targets_are_shares_that_sum_to_one(folder: Path) -> None:
    mixed = opened(folder, augmentation={"mixup": 0.8}, label_smoothing=0.1).train_batch(0, 12)["labels"]
    assert mixed.shape == (12, 4)
    torch.testing.assert_close(mixed.sum(1), torch.ones(12))
    assert float(mixed.min()) == pytest.approx(0.1 / 4)
    plain = opened(folder).train_batch(0, 12)["labels"]
    smoothed = opened(folder, label_smoothing=0.2).train_batch(0, 12)["labels"]
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        torch.nn.functional.cross_entropy(logits, smoothed),
        torch.nn.functional.cross_entropy(logits, plain, label_smoothing=0.2),
    )


def test_a_bad_file_is_named(folder: Path) -> None:
    for path in sorted((folder / "class_1").rglob("*.png")):
        path.write_bytes(path.read_bytes()[:60])
    source = opened(folder)
    ImagesSpec(path=str(folder)).check(folder, NEEDS)  # its first bytes are those of an image
    with pytest.raises(DataError, match=r"cannot decode the image .*class_1/.*\.png"):
        source.train_batch(0, 18)


def without(folder: Path, name: str) -> None:
    for path in sorted((folder / name).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("change", "takes", "field", "allowed"),
    [
        (lambda f: without(f, "class_1"), {}, "data.path", "at least one image"),
        (lambda f: None, {"num_classes": 2}, "model.num_classes", "at least 3"),
        (lambda f: None, {"num_channels": 4}, "model.num_channels", "RGB"),
        (lambda f: [without(f, f"class_{n}") or (f / f"class_{n}").rmdir() for n in (1, 2)], {}, "data.path", "at least two"),
    ],
)
def test_a_folder_that_cannot_feed_the_model_is_refused_early_and_in_the_rank(
    folder: Path, change: Any, takes: dict[str, int], field: str, allowed: str
) -> None:
    change(folder)
    wanted = ImageInput(**{"image_size": 16, "num_channels": 3, "num_classes": 4, "tokens_per_image": 17, **takes})
    with pytest.raises(SpecConflict) as raised:
        ImagesSpec(path=str(folder)).check(folder, Needs(256, 0, wanted))
    assert raised.value.field == field
    assert allowed in raised.value.allowed
    with pytest.raises(DataError, match=field):
        open_source(ImagesSpec(path=str(folder)), 256, 0, takes=wanted)


def test_a_file_that_is_no_image_is_refused_early(folder: Path) -> None:
    for path in (folder / "class_2").rglob("*.*"):
        path.write_text("<html>not found</html>")
    with pytest.raises(SpecConflict, match="begins with b'<html>no'"):
        ImagesSpec(path=str(folder)).check(folder, NEEDS)


def test_only_the_data_roots_are_read(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    Image.new("RGB", (16, 16)).save(outside)
    (folder / "class_0" / "link.png").symlink_to(outside)
    files = Files.below((folder,))
    source = open_source(ImagesSpec(path=str(folder)), 256, 0, files, TAKES)
    assert source.facts["train_images"] + source.facts["evaluation_images"] == 24  # the link is left out
    with pytest.raises(DataError, match="a file or folder inside"):
        open_source(ImagesSpec(path=str(folder)), 256, 0, Files.below((tmp_path / "elsewhere",)), TAKES)


class TestAugmentation:
    def image(self, size: tuple[int, int] = (40, 30)) -> Image.Image:
        return Image.fromarray(np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))

    def test_crops_keep_the_published_areas_and_ratios(self) -> None:
        draws = np.random.default_rng(0)
        boxes = [box for _ in range(2000) if (box := draw_box((224, 224), (0.08, 1.0), (3 / 4, 4 / 3), draws))]
        areas = np.array([box.width * box.height / 224**2 for box in boxes])
        ratios = np.array([box.width / box.height for box in boxes])
        assert 0.075 < areas.min() < 0.1
        assert areas.max() > 0.93
        # A share a fits with a chance of min(1, -ln a / ln 4/3), so the mean is 0.478 instead of 0.54.
        assert areas.mean() == pytest.approx(0.478, abs=0.02)
        assert 0.73 < ratios.min() < 0.77
        assert 1.3 < ratios.max() < 1.37
        assert np.log(ratios).mean() == pytest.approx(0.0, abs=0.02)
        assert all(0 <= box.left <= 224 - box.width and 0 <= box.top <= 224 - box.height for box in boxes)

    @pytest.mark.parametrize(
        ("name", "share", "sign", "expected"),
        [
            ("invert", 0.9, 1, lambda pixels: 255 - pixels),
            ("posterize", 0.9, 1, lambda pixels: pixels & 0b10000000),  # 4 - int(3.6) bits
            ("posterize", 0.3, 1, lambda pixels: pixels & 0b11100000),
            ("solarize", 0.5, 1, lambda pixels: np.where(pixels < 128, pixels, 255 - pixels)),
            ("solarize_add", 1.0, 1, lambda pixels: np.where(pixels < 128, np.minimum(255, pixels + 110), pixels)),
            ("brightness", 1.0, -1, lambda pixels: (pixels * 0.1).astype(int)),
            ("translate_x", 0.5, 1, lambda p: np.concatenate([p[:, 9:], np.full_like(p[:, :9], 128)], 1)),  # 0.225 of 40
        ],
    )
    def test_operations_are_as_strong_as_published(self, name: str, share: float, sign: int, expected: Any) -> None:
        image = self.image()
        found = np.array(OPERATIONS[name](image, share, sign), dtype=int)
        assert np.abs(found - expected(np.array(image, dtype=int))).max() <= 1

    @pytest.mark.parametrize("mode", ["RGB", "L"])
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_every_operation_takes_every_mode(self, name: str, mode: str) -> None:
        image = self.image().convert(mode)
        varied = OPERATIONS[name](image, 0.9, -1)
        assert (varied.size, varied.mode) == (image.size, mode)

    def test_each_operation_has_a_chance_of_one_half(self) -> None:
        draws, image = np.random.default_rng(0), self.image((4, 4))
        changed = sum(randaugment(image, 1, 9.0, 0.5, draws) is not image for _ in range(600))
        assert changed / 600 == pytest.approx(APPLIED, abs=0.06)

    def test_erasing_fills_one_rectangle_with_noise(self) -> None:
        shares = []
        for seed in range(200):
            pixels = torch.zeros(3, 64, 64)
            erase_(pixels, np.random.default_rng(seed))
            shares.append(float((pixels != 0).float().mean()))
        assert ERASED_AREA[0] * 0.8 < min(shares)
        assert max(shares) < ERASED_AREA[1] * 1.05

    @pytest.mark.parametrize("spec", [AugmentationSpec(mixup=0.8), AugmentationSpec(cutmix=1.0), AugmentationSpec(**WHOLE)])
    def test_the_share_of_the_target_is_the_share_of_the_pixels(self, spec: AugmentationSpec) -> None:
        shares = []
        for seed in range(300):
            pixels, other = torch.ones(1, 32, 32), torch.zeros(1, 32, 32)
            shares.append(mix_(pixels, other, spec, np.random.default_rng(seed)))
            assert float(pixels.mean()) == pytest.approx(shares[-1], abs=1e-5)
        assert np.mean(shares) == pytest.approx(0.5 if spec.mixup and not spec.cutmix else np.mean(shares), abs=0.06)
        assert min(shares) < 0.4  # a rectangle is cut at the edges: it rarely covers the image
        assert max(shares) > 0.95

    def test_nothing_is_changed_without_a_field(self) -> None:
        image = self.image((16, 16))
        varied = vary(image, 16, AugmentationSpec(), np.random.default_rng(0))
        assert torch.equal(varied, to_tensor(image))
        flipped = vary(image, 16, AugmentationSpec(flip=1.0), np.random.default_rng(0))
        assert torch.equal(flipped, varied.flip(2))

    def test_an_evaluation_sees_the_centre(self) -> None:
        assert central_crop(self.image((40, 32)), 16).size == (16, 16)
        halves = Image.new("L", (64, 32))
        halves.paste(200, (32, 0, 64, 32))
        assert np.array(central_crop(halves, 16), dtype=int).mean() == pytest.approx(100, abs=2)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [({"crop_area": (0.5, 0.1)}, "smaller share first"), ({"randaugment_magnitude": 3.0}, "randaugment_operations")],
    )
    def test_what_has_no_effect_is_refused(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            AugmentationSpec(**fields)

    def test_a_preset_is_overridden_and_stored(self) -> None:
        spec = AugmentationSpec.model_validate({"preset": "swin", "erase": 0.0})
        assert (spec.erase, spec.mixup, spec.randaugment_magnitude) == (0.0, 0.8, 9.0)
        assert AugmentationSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.system
def test_a_job_learns_from_a_folder(folder: Path, tmp_path: Path, spec_document: dict[str, Any]) -> None:
    model = {"preset": "deit-tiny", "num_layers": 2, "hidden_size": 32, "num_heads": 2, "image_size": 16, "num_classes": 3}
    data = {"source": "images", "path": str(folder), "augmentation": {"preset": "deit", "erase": 0.0}}
    document = spec_document | {"model": model | {"drop_path_rate": 0.1}, "data": data}
    options = {"sequence_length": 256, "label_smoothing": 0.1, "optimizer": {"learning_rate": 3e-3}}
    whole, summary = train(
        with_training(document, "O2", steps=14, global_batch_size=8, checkpoint_every=7, **options), tmp_path
    )
    resumed, again = train(
        with_training(document, "O2", steps=14, global_batch_size=8, checkpoint_every=7, **options),
        tmp_path,
        whole.checkpoints()[1:],
    )
    assert resumed.losses() == whole.losses()[7:]
    assert again.evaluation_loss == summary.evaluation_loss
    assert summary.evaluation_loss < 0.8 * whole.losses()[0]
