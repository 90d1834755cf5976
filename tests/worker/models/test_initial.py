"""Random initial values that are skipped leave the generator as drawn ones do."""

import pytest
import torch

from octet.api_schemas import GPTSizes, GPTSpec
from octet.worker.models.gpt import GPT
from octet.worker.models.initial import Constant, Normal, draw, parameters_on_meta, skip
from octet.worker.pretrained.start import start_model
from octet.worker.pretrained.values import DrawnValues


@pytest.mark.parametrize("num_elements", [1, 15, 16, 17, 4096, (1 << 20) + 3])
def test_skipping_takes_the_numbers_that_drawing_takes(num_elements: int) -> None:
    drawn, skipped = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    draw(torch.empty(num_elements), Normal(0.02), drawn)
    skip(num_elements, Normal(0.02), skipped)
    assert torch.equal(drawn.get_state(), skipped.get_state())
    assert torch.equal(draw(torch.empty(40), Normal(1.0), drawn), draw(torch.empty(40), Normal(1.0), skipped))


def test_constants_take_no_numbers() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    assert draw(torch.empty(20), Constant(1.0), generator).tolist() == [1.0] * 20
    skip(20, Constant(1.0), generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("start_change", [0.0, 1e-3])
def test_values_that_are_read_one_at_a_time_are_those_of_the_model(start_change: float) -> None:
    sizes = GPTSizes(hidden_size=32, num_layers=2, num_heads=2, vocab_size=33, max_sequence_length=7)
    started, _ = start_model(GPTSpec.model_validate(sizes.model_dump()), 4, start_change=start_change)
    whole = dict(started.named_parameters())
    with parameters_on_meta():
        model = GPT(sizes, seed=4)
    values = DrawnValues(model, 4, torch.device("cpu"), start_change)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())
    assert [each.names[0] for each in values.unfilled] == list(whole)
    for number, each in enumerate(values.unfilled):
        if number % 3:
            assert torch.equal(values.read(each), whole[each.names[0]])
        else:
            values.skip(each)
