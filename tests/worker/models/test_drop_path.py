"""Drop path: whole branches of some images, more of them in deeper blocks, and nothing in an evaluation."""

import pytest
import torch

from octet.api_schemas.models.deit import DeiTSpec
from octet.api_schemas.models.swin import SwinSpec
from octet.worker.models import build_model
from octet.worker.models.deit import DropPath


def test_a_branch_of_an_image_is_dropped_as_a_whole_and_its_mean_stays() -> None:
    torch.manual_seed(0)
    drop, branch = DropPath(0.25), torch.ones(4000, 3, 2)
    kept = drop(branch)
    per_image = kept.flatten(1)
    assert torch.equal(per_image, per_image[:, :1].expand_as(per_image))
    assert per_image[:, 0].unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.03)
    assert drop.eval()(branch) is branch


def test_rates_grow_from_zero_to_that_of_the_job() -> None:
    deit = build_model(DeiTSpec(preset="deit-tiny", drop_path_rate=0.3), seed=0)
    rates = [getattr(layer.dropout, "rate", 0.0) for layer in deit.network.vit.layers]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert build_model(DeiTSpec(preset="deit-tiny"), seed=0).network.vit.layers[-1].dropout.p == 0.0
    assert SwinSpec(preset="swin-tiny").sizes.drop_path_rate == 0.1  # as transformers has
    assert build_model(SwinSpec(preset="swin-tiny", drop_path_rate=0.0), seed=0).network.config.drop_path_rate == 0.0


def test_training_draws_and_an_evaluation_does_not() -> None:
    model = build_model(DeiTSpec(preset="deit-tiny", drop_path_rate=0.5), seed=0)
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(model(images))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(model.eval()(images), model(images))
