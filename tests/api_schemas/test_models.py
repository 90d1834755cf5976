"""The model of a job: families, presets, sizes that follow from others, and refusals that name the field."""

from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import PRESETS, ImageInput, JobSpec, explain
from octet.api_schemas.catalog import model_families
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models import FAMILIES, DeiTSpec, RobertaSpec, SwinSpec

LLAMA = {"family": "huggingface", "architecture": "llama", "config": {"vocab_size": 256}}
IMAGES = {"source": "images", "path": "/data/images.npz"}


def job(model: dict[str, Any], data: dict[str, Any] | None = None, **training: Any) -> JobSpec:
    document = {
        "name": "job",
        "model": model,
        "data": data or {"path": "/data/text"},
        "training": {"steps": 2, **training},
    }
    return JobSpec.model_validate(document)


def test_a_presets_name_selects_the_family() -> None:
    for name in PRESETS:
        data = IMAGES if isinstance(PRESETS[name].takes, ImageInput) else {"source": "tokens", "path": "/data/tokens"}
        model = job({"preset": name}, data).model
        assert model.sizes == PRESETS[name]
        assert model.title == name


@pytest.mark.parametrize(
    ("preset", "num_parameters"),
    [
        ("gpt-13b", 12_853_626_880),
        ("gpt-175b", 174_604_836_864),
        ("roberta-base", 124_697_433),
        ("roberta-large", 355_412_057),
        ("deit-s", 22_050_664),
        ("deit-b", 86_567_656),
        ("vit-1.2b", 1_212_632_040),
        ("swin-t", 28_288_354),
        ("swin-1.0b", 1_064_127_084),
    ],
)
def test_presets_have_the_published_parameters(preset: str, num_parameters: int) -> None:
    assert PRESETS[preset].num_parameters == num_parameters


def test_flops_of_an_image_are_about_six_per_weight_and_token() -> None:
    """The papers count multiply-adds of a forward pass; ours are two FLOPs each, and backward is twice forward."""
    for preset, forward_gmacs in (("deit-s", 4.6), ("swin-t", 4.5)):
        sizes: Any = PRESETS[preset]
        assert sizes.flops_per_image / 6e9 == pytest.approx(forward_gmacs, rel=0.06)


def test_sizes_that_follow_from_others() -> None:
    changed = RobertaSpec(preset="roberta-base", hidden_size=384, num_heads=6, vocab_size=1000).sizes
    assert (changed.intermediate_size, changed.mask_token) == (1536, 999)
    kept = RobertaSpec(preset="roberta-base", hidden_size=384, num_heads=6, intermediate_size=512, mask_token=7).sizes
    assert (kept.intermediate_size, kept.mask_token) == (512, 7)
    assert DeiTSpec(preset="deit-s", num_classes=10).sizes.takes == ImageInput(224, 3, 10, 197)
    assert SwinSpec(preset="swin-t").sizes.tokens_per_image == 14 * 14


@pytest.mark.parametrize(
    ("model", "field", "says"),
    [
        (LLAMA | {"architecture": "lama"}, "model.architecture", "Did you mean 'llama'"),
        (LLAMA | {"architecture": "gemma3"}, "model.architecture", "Did you mean 'gemma3_text'"),
        (LLAMA | {"architecture": None}, "model.architecture", "Set model.architecture or model.path"),
        (LLAMA | {"path": "/models/x"}, "model.architecture", "Set model.architecture or model.path"),
        ({"family": "huggingface", "path": "/models/x", "config": {"a": 1}}, "model.config", "config.json"),
        ({"family": "huggingface", "path": "models/x"}, "model.path", "set model.path to the absolute path"),
        (LLAMA | {"config": {}}, "model.config.vocab_size", "Set config.vocab_size"),
        (LLAMA | {"config": {"vocab_size": "256"}}, "model.config.vocab_size", "Change config.vocab_size"),
        (LLAMA | {"config": {"vocab_size": 256, "auto_map": {}}}, "model.config.auto_map", "Remove"),
        (LLAMA | {"config": {"vocab_size": 100}}, "model.vocab_size", "Raise"),
        (LLAMA | {"config": {"vocab_size": 256, "max_position_embeddings": 128}}, "training.sequence_length", "Shorten"),
        (LLAMA | {"mask_token": 4}, "model.mask_token", "Remove"),
        (LLAMA | {"architecture": "bert"}, "model.mask_token", "Raise model.vocab_size"),
        (LLAMA | {"architecture": "bert", "mask_token": 256}, "model.mask_token", "Change"),
        (LLAMA | {"architecture": "vit"}, "model.config.num_labels", "Set config.num_labels"),
        (LLAMA | {"architecture": "vit", "config": {"image_size": 8, "num_labels": 2}}, "data.source", "Change data.source"),
        ({"preset": "roberta-tiny", "vocab_size": 256}, "model.mask_token", "Raise model.vocab_size"),
        ({"preset": "roberta-tiny", "mask_token": 272}, "model.mask_token", "Change"),
        ({"preset": "roberta-tiny", "num_heads": 3}, "model.num_heads", "Change"),
        ({"preset": "deit-s"}, "data.source", "Change data.source or model.family"),
        ({"preset": "deit-s", "patch_size": 15}, "model.image_size", "Change"),
        ({"preset": "swin-t", "depths": [2, 2]}, "model.num_heads", "Change model.num_heads"),
        ({"preset": "swin-t", "image_size": 208}, "model.image_size", "Change"),
        ({"preset": "swin-t", "embed_dim": 97}, "model.embed_dim", "Change"),
    ],
)
def test_a_model_that_cannot_train_is_refused(model: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        job(model)
    (violation,) = explain(caught.value, JobSpec)
    assert violation.field == field
    assert says in violation.message


def test_images_have_no_sequence_length_of_their_own() -> None:
    spec = job({"preset": "deit-s"}, IMAGES)
    assert spec.tokens_per_sample == 197
    assert JobSpec.read_stored(spec.model_dump(mode="json")) == spec
    with pytest.raises(ValidationError, match="197 tokens"):
        job({"preset": "deit-s"}, IMAGES, sequence_length=128)


def test_a_huggingface_job_is_stored_and_read_again() -> None:
    spec = job(LLAMA | {"config": {"vocab_size": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}})
    assert JobSpec.read_stored(spec.model_dump(mode="json") | {"from_a_later_version": 1}) == spec
    assert spec.model.sizes.num_parameters is None
    assert spec.model.title == "llama"


def test_the_catalog_lists_every_family_and_preset() -> None:
    families = {family.family: family for family in model_families()}
    assert list(families) == list(FAMILIES)
    assert families.keys() >= {"gpt", "llama", "roberta", "deit", "swin", "huggingface", "python"}
    assert {preset.name for family in families.values() for preset in family.presets} == set(PRESETS)
    assert "qwen3" in families["huggingface"].architectures["next_token"]
    for family in families.values():
        for preset in family.presets:
            assert preset.num_parameters == preset.sizes.num_parameters
            assert list(preset.bytes_by_level) == list(LEVELS)
            assert preset.bytes_by_level["fp32"] == 16 * preset.num_parameters + preset.sizes.buffer_bytes


def test_a_large_model_takes_the_bytes_that_the_table_promises() -> None:
    presets = {preset.name: preset for family in model_families() for preset in family.presets}
    large = presets["llama-8b"]
    assert large.bytes_by_level["bf16-amp"] / large.num_parameters == 16
    assert large.bytes_by_level["O2-8bit"] / large.num_parameters == pytest.approx(5.9, abs=0.2)  # the head stays in fp32
