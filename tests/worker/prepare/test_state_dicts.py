"""State dicts between plain and converted models and between levels: what is held has a name, and is read or refused."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.fp8.weight import Float8Weight
from tests.kit.small_model import FP8_LEVELS, LEVELS_OF_CODES, SPREAD, Small, make, spread, values_of_weights

LEVEL_PAIRS = [
    pytest.param(source, target, marks=() if source in SPREAD else pytest.mark.matrix)
    for source in FP8_LEVELS
    for target in ("te", "O2", "O3", "O3-split-8bit", "bf16-amp", "fp32")
    if source != target
]
CODE_ERROR = {"fp32": 0.0, "fp16+scale": 2.0**-11, "fp8": 2.0**-4}
"""The largest relative error of a normal number by the level's `weight`."""


def step(model: Small, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    (model(inputs) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_values(seed: int = 7) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Small().state_dict()


def assert_close(model: Small, expected: dict[str, Tensor], error: float) -> None:
    held = values_of_weights(model)
    for name, value in expected.items():
        layer_name = name.removesuffix(".weight")
        actual = held.get(layer_name, model.state_dict().get(name)) if name.endswith("weight") else model.state_dict()[name]
        assert actual is not None, name
        torch.testing.assert_close(actual.float(), value.float(), rtol=error, atol=2.0**-12)


@pytest.mark.parametrize("level", spread(LEVELS_OF_CODES))
def test_a_state_dict_has_the_names_and_values_of_a_plain_model(level: str) -> None:
    model, optimizer = make(level)
    step(model, optimizer)
    state = model.state_dict()
    assert list(state) == list(Small().state_dict())
    assert {type(tensor) for tensor in state.values()} == {Tensor}
    plain = Small()
    plain.load_state_dict(state)
    for name, values in values_of_weights(model).items():
        assert torch.equal(plain.get_submodule(name).weight, values)


@pytest.mark.parametrize(
    "level", ["O3-split-8bit", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("O1", "O2", "O3"))]
)
def test_a_file_of_a_state_dict_is_loaded_by_a_plain_model(level: str, tmp_path: Path) -> None:
    """By torch alone, in the way that is safe for files of others; scales and counts in its metadata do no harm."""
    model, _ = make(level)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    code = (
        "import sys, torch; from torch import nn; assert 'octet' not in sys.modules; "
        "state = torch.load(sys.argv[1], weights_only=True); layer = nn.Linear(32, 64); "
        "layer.load_state_dict({name: state['first.' + name] for name in ('weight', 'bias')}); print(layer.weight.sum().item())"
    )
    shown = subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True, check=True)
    assert float(shown.stdout) == model.first.weight.sum().item()


@pytest.mark.parametrize("level", spread(LEVELS_OF_CODES))
def test_exact_names_say_what_is_held(level: str) -> None:
    model, _ = make(level)
    names = [name for name in exact_state_dict(model) if name.startswith("first.weight")]
    assert names[0] == "first.weight_codes"
    assert "first.weight" not in names
    assert "norm.weight" in exact_state_dict(model)


@pytest.mark.parametrize("level", spread(LEVELS_OF_CODES))
def test_a_plain_model_refuses_codes(level: str) -> None:
    """torch says what is missing. With strict=False it lists that, and leaves the weight alone."""
    model, _ = make(level)
    plain = Small()
    before = plain.first.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "first\.weight"'):
        plain.load_state_dict(exact_state_dict(model))
    result = plain.load_state_dict(exact_state_dict(model), strict=False)
    assert "first.weight" in result.missing_keys
    assert torch.equal(plain.first.weight, before)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("level", spread(FP8_LEVELS))
def test_plain_values_are_encoded(level: str, strict: bool) -> None:
    model, optimizer = make(level)
    step(model, optimizer)
    result = model.load_state_dict(plain_values(), strict=strict)
    assert not result.missing_keys
    assert not result.unexpected_keys
    error = 2.0**-11 if LEVELS[level].master_weight == "int8-residual" else CODE_ERROR[LEVELS[level].weight]
    assert_close(model, plain_values(), error)


@pytest.mark.parametrize("level", spread(FP8_LEVELS))
def test_training_continues_from_loaded_values(level: str) -> None:
    """The master weight too: a step of lr 1e-4 must not bring back what was there before."""
    model, optimizer = make(level, lr=1e-4)
    for seed in range(2):
        step(model, optimizer, seed)
    model.load_state_dict(plain_values())
    step(model, optimizer)
    expected = plain_values()["inner.0.weight"]
    rounding = CODE_ERROR[LEVELS[level].weight] * expected.abs().max()
    assert (values_of_weights(model)["inner.0"] - expected).abs().max() < 2e-3 + rounding
    if level == "O3":
        master = optimizer.state[model.inner[0].weight]["master_weights"]
        exact = (master["codes"].float() * master["dequant_scale"]).view(64, 64)
        assert (exact - expected).abs().max() < 2e-3, "the master starts from the loaded values, not from their E4M3 codes"
        assert model.inner[0].weight.state.wide is None


def test_a_master_weight_starts_from_codes_that_were_loaded_alone() -> None:
    source, _ = make("O3", seed=7)
    model, optimizer = make("O3", lr=1e-4)
    step(model, optimizer)
    model.load_state_dict(exact_state_dict(source))
    step(model, optimizer)
    expected = values_of_weights(source)["inner.0"]
    assert (values_of_weights(model)["inner.0"] - expected).abs().max() < 2e-2


@pytest.mark.parametrize("state_of", [nn.Module.state_dict, exact_state_dict], ids=["values", "exact"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("level", ["te", "O2", "O3", "O3-split"])
def test_resume_is_bit_equal_in_either_order(level: str, first: str, state_of: Callable[[nn.Module], dict[str, Any]]) -> None:
    model, optimizer = make(level)
    for seed in range(3):
        step(model, optimizer, seed)
    saved = copy.deepcopy((state_of(model), optimizer.state_dict()))
    resumed, resumed_optimizer = make(level, seed=1)
    step(resumed, resumed_optimizer, 9)
    for part in ["model", "optimizer"] if first == "model" else ["optimizer", "model"]:
        resumed.load_state_dict(saved[0]) if part == "model" else resumed_optimizer.load_state_dict(saved[1])
    for each in ((model, optimizer), (resumed, resumed_optimizer)):
        for seed in range(3, 6):
            step(*each, seed)
    for (name, one), other in zip(exact_state_dict(model).items(), exact_state_dict(resumed).values(), strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize(("source", "target"), LEVEL_PAIRS)
def test_a_level_reads_another_level(source: str, target: str) -> None:
    """Exact parts, too, except `fp32`, which has no layers of ours: there torch refuses those."""
    model, optimizer = make(source)
    step(model, optimizer)
    saved, values = exact_state_dict(model), values_of_weights(model)
    other, other_optimizer = make(target, seed=1)
    if target == "fp32":
        with pytest.raises(RuntimeError, match="Unexpected key"):
            other.load_state_dict(saved)
        return
    if LEVELS[source].master_weight == "fp16+scale":  # the optimizer's states bring the master
        other.load_state_dict(model.state_dict())
    else:
        other.load_state_dict(saved)
    error = 2.0**-11 if LEVELS[target].master_weight == "int8-residual" else CODE_ERROR[LEVELS[target].weight]
    assert_close(other, {f"{name}.weight": value for name, value in values.items()}, error)
    step(other, other_optimizer)


def test_codes_without_their_scale_are_refused() -> None:
    model, _ = make("O2")
    saved = exact_state_dict(model)
    del saved["first.weight_dequant_scale"]
    with pytest.raises(ValueError, match=r"first\.weight_codes came without first\.weight_dequant_scale"):
        model.load_state_dict(saved)


def test_a_state_dict_from_before_codes_had_a_name_is_read() -> None:
    model, _ = make("O2")
    saved = {name.replace("weight_codes", "weight"): value for name, value in exact_state_dict(model).items()}
    other, _ = make("O2", seed=1)
    other.load_state_dict(saved)
    assert torch.equal(other.first.weight, model.first.weight)


def test_loading_leaves_the_given_state_dict_alone() -> None:
    given = plain_values()
    names = list(given)
    make("O2")[0].load_state_dict(given)
    make("bf16-amp")[0].load_state_dict(given)
    assert list(given) == names


def test_another_shape_is_named() -> None:
    model, _ = make("O3")
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        model.load_state_dict(plain_values() | {"first.weight": torch.zeros(3, 3)})
    assert model.first.weight.state.wide is None


def test_a_history_with_a_part_missing_is_refused() -> None:
    """A plain state dict has none of it, and another recipe all of it; a part is damage."""
    model, _ = make("te")
    saved = exact_state_dict(model)
    del saved["first.input_scaling.window_amax"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "first\.input_scaling\.window_amax"'):
        model.load_state_dict(saved)


def test_a_model_without_an_optimizer_keeps_no_wide_values() -> None:
    model, _ = initialize(Small(), None, "O3", convert_heads=True)
    assert all(layer.weight.state.wide is None for layer in model.modules() if isinstance(layer, Float8Linear))
    model.load_state_dict(plain_values())
    assert all(layer.weight.state.wide is None for layer in model.modules() if isinstance(layer, Float8Linear))


@pytest.mark.parametrize("level", spread(LEVELS_OF_CODES))
def test_a_model_that_torchs_optimizer_trains_loses_no_digits(level: str, tmp_path: Path) -> None:
    """Its weights keep fp32 beside the codes: through a load of their own values, a file, and exact parts.

    Values alone, which have lost what travels beside them, are rounded to nearest.
    """

    def start(seed: int) -> tuple[Small, torch.optim.Optimizer]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model, _ = initialize(Small(), None, level, convert_heads=True)
        return model, torch.optim.Adadelta(model.parameters(), lr=0.1)

    model, optimizer = start(0)
    for seed in range(3):
        step(model, optimizer, seed)
    expected = values_of_weights(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, expected[name]) for name, value in values_of_weights(model).items())
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "run.pt")
    for load in (lambda: torch.load(tmp_path / "run.pt")[0], lambda: exact_state_dict(model)):
        resumed, its_optimizer = start(1)
        resumed.load_state_dict(load())
        its_optimizer.load_state_dict(torch.load(tmp_path / "run.pt")[1])
        assert all(torch.equal(value, expected[name]) for name, value in values_of_weights(resumed).items())
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(resumed, its_optimizer, seed)
    assert all(torch.equal(value, values_of_weights(model)[name]) for name, value in values_of_weights(resumed).items())

    alone, _ = start(1)
    alone.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    found, trained = alone.first.weight, values_of_weights(model)["first"]
    has_residual = found.residual is not None
    assert found.state.wide is None
    assert torch.equal(found + 0, Float8Weight.encode(trained, found.codes.dtype, has_residual=has_residual) + 0)
