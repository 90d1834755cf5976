"""Between optimizer steps: sampled statistics that are true, and layers that go to bf16 by rule."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octet.api_schemas.precision import PrecisionSpec
from octet.worker import follow_optimizer, fp8_statistics, initialize
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.health import LayerDemoted, LayerRecovered
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.operand import OperandScaling
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.kernels import ScaledCodes, ScaleKind, dequantize, encode, measure, quantize, values_of
from octet.worker.kernels.sampling import SAMPLE_ELEMENTS, sampled_rows
from tests.numerics.measure import mixed_magnitudes
from tests.numerics.measure import sqnr_db as measured_sqnr_db

E4M3 = torch.float8_e4m3fn


def make(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), **{"opt_level": "O2", **options})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, input: Tensor) -> None:
    model(input).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def gaussian(seed: int = 0) -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))


def spiked() -> Tensor:
    """One element that leaves the others less than half of E4M3's smallest number."""
    values = gaussian()
    values[0, 0] = 1e7
    return values


def in_codes(values: Tensor, kind: ScaleKind = ScaleKind.TENSOR) -> ScaledCodes:
    return ScaledCodes(*quantize(values, E4M3, kind.granularity, block=kind.block), kind)


class CountMeasurements(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_found += func is torch.ops.octet.measure.default
        return func(*args, **(kwargs or {}))


def test_gaussian_numbers_measure_as_theory_says() -> None:
    values = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    amax, dequant_scale, overflow_ratio, underflow_ratio, sqnr_db = measure(values, in_codes(values)).tolist()
    assert amax == values.abs().max().item()
    assert dequant_scale == 2.0**-6
    assert overflow_ratio == 0
    assert underflow_ratio < 1e-4
    assert 31.0 < sqnr_db < 32.0


def test_ratios_are_counts() -> None:
    values = torch.tensor([[1000.0, -1000.0, 448.0, 1e-5, -1e-5, 1e-5, 0.0, 1.0]])
    codes = encode(values, torch.ones(()), E4M3)
    _, _, overflow_ratio, underflow_ratio, sqnr_db = measure(
        values, ScaledCodes(codes, torch.ones(()), ScaleKind.TENSOR)
    ).tolist()
    assert (overflow_ratio, underflow_ratio) == (2 / 8, 3 / 8)
    noise = (values - dequantize(codes, torch.ones(()))).square().sum()
    assert sqnr_db == pytest.approx((10 * torch.log10(values.square().sum() / noise)).item())
    assert measure(torch.ones(2, 2), in_codes(torch.ones(2, 2))).tolist()[-1] == 200


@pytest.mark.parametrize("kind", ScaleKind)
def test_of_a_large_operand_rows_are_measured_that_lie_an_odd_distance_apart(kind: ScaleKind) -> None:
    values = mixed_magnitudes(300, 5000)
    rows = sampled_rows(*values.shape)
    assert (rows.step, len(rows)) == (13, 24)
    quantized = in_codes(values, kind)
    amax, largest_scale, overflow_ratio, underflow_ratio, sqnr_db = measure(values, quantized).tolist()
    values, decoded = values[:: rows.step], values_of(quantized)[:: rows.step]
    scales = quantized.dequant_scale
    if kind.block[0] > 1:
        scales = scales[[row // kind.block[0] for row in rows]]
    elif kind is not ScaleKind.TENSOR:
        scales = scales[:: rows.step]
    assert (amax, largest_scale, overflow_ratio) == (values.abs().max().item(), scales.max().item(), 0)
    assert underflow_ratio == pytest.approx(((decoded == 0) & (values != 0)).double().mean().item())
    assert sqnr_db == pytest.approx(measured_sqnr_db(decoded, values), abs=1e-3)


@pytest.mark.parametrize("shape", [(1, 1), (512, 256), (513, 256), (16384, 2048), (300_000, 1024), (64, 50_304), (17, 1 << 20)])
def test_a_sample_has_few_elements_of_all_parts(shape: tuple[int, int]) -> None:
    rows = sampled_rows(*shape)
    assert len(rows) * shape[1] <= max(SAMPLE_ELEMENTS, 16 * shape[1])
    assert len(rows) == shape[0] or (rows.step % 2 == 1 and len(rows) * shape[1] >= SAMPLE_ELEMENTS / 3)
    assert shape[0] - rows[-1] <= rows.step


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_of_an_activation_that_a_layer_applies_the_sampled_rows_are_computed(
    granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics are those that the whole activation would give."""
    model = nn.Sequential(nn.GELU(), nn.Linear(1024, 32))
    recipe = {"scaling": "current", "granularity": granularity}
    converted, _ = initialize(model, None, "O2", recipe=recipe, statistics_every=1, auto_filter=False)
    x, (layer,) = mixed_magnitudes(700, 1024), [part for part in converted.modules() if isinstance(part, Float8Linear)]
    sampled: list[int] = []
    sample = OperandScaling._sample
    monkeypatch.setattr(OperandScaling, "_sample", lambda own, x, *how: (sampled.append(x.shape[0]), sample(own, x, *how))[1])
    rows, _ = layer.input_scaling.activate(x, "gelu")
    assert sampled == [len(sampled_rows(700, 1024))]
    assert sampled[0] < 700
    assert torch.equal(layer.input_scaling.sample, measure(nn.functional.gelu(x), rows))


@pytest.mark.parametrize("opt_level", ["te", "O2"])
def test_each_operand_of_a_layer_is_measured_once(opt_level: str) -> None:
    """The weight too, whose codes are made again in the backward pass."""
    model, optimizer = make(opt_level=opt_level, statistics_every=2)
    measured = []
    for number in range(2):
        with CountMeasurements() as counter:
            step(model, optimizer, gaussian(number).requires_grad_())
        measured.append(counter.num_found)
    assert measured == [2 * 3, 0]


def test_every_nth_step_is_sampled_for_every_layer_and_operand() -> None:
    model, optimizer = make(statistics_every=3)
    seen = []
    for number in range(5):
        step(model, optimizer, gaussian(number))
        seen.append({sample.step for sample in fp8_statistics(model)})
    assert seen == [{0}, {0}, {0}, {3}, {3}]
    samples = fp8_statistics(model)
    assert [(sample.layer, sample.operand) for sample in samples] == [
        (layer, operand) for layer in ("0", "2") for operand in ("input", "weight", "grad_output")
    ]
    assert samples[0].amax == gaussian(3).abs().max().item()
    assert all(20 < sample.sqnr_db < 40 for sample in samples)


@pytest.mark.parametrize("opt_level", ["te", "O1", "O2"])
def test_weights_are_measured_in_their_own_units(opt_level: str) -> None:
    """However a weight is held, its amax is that of its values, not that of the codes."""
    model, optimizer = make(opt_level=opt_level, statistics_every=1)
    largest = {name: model.get_submodule(name).weight_values().abs().max().item() for name in ("0", "2")}
    step(model, optimizer, gaussian())
    weights = {sample.layer: sample for sample in fp8_statistics(model) if sample.operand == "weight"}
    for name, amax in largest.items():
        assert weights[name].amax == pytest.approx(amax)
        assert weights[name].dequant_scale == 2.0 ** math.ceil(math.log2(amax / 448))


def test_evaluation_is_not_sampled() -> None:
    model, optimizer = make(statistics_every=2)
    step(model, optimizer, gaussian())
    step(model, optimizer, gaussian())
    model.eval()(gaussian(7))
    model.train()
    step(model, optimizer, gaussian(1))
    assert fp8_statistics(model)[0].amax == gaussian(1).abs().max().item()


def test_a_rehearsed_step_takes_samples_that_count_for_nothing() -> None:
    model, optimizer = make(statistics_every=3)
    twin, twin_optimizer = make(statistics_every=3)
    seen = []
    for number in range(4):
        if number == 1:
            model.octet_report.health.rehearse()
        seen.append(model[0].input_scaling.is_sampled)
        step(model, optimizer, gaussian(number))
        step(twin, twin_optimizer, gaussian(number))
        assert fp8_statistics(model) == fp8_statistics(twin)
    assert seen == [True, True, False, True]
    assert torch.equal(model[0].weight, twin[0].weight)


def test_by_default_the_first_of_fifty_steps_is_sampled() -> None:
    model, optimizer = make()
    step(model, optimizer, gaussian())
    assert {sample.step for sample in fp8_statistics(model)} == {0}
    assert PrecisionSpec(level="O2").resolved_statistics_every == 50
    assert PrecisionSpec(level="ao").resolved_statistics_every == PrecisionSpec(level="fp32").resolved_statistics_every == 0
    assert PrecisionSpec(level="O2", statistics_every=0).resolved_statistics_every == 0


def test_a_model_without_statistics_says_so() -> None:
    with pytest.raises(ValueError, match="statistics_every"):
        fp8_statistics(make(statistics_every=0)[0])


def test_an_optimizer_that_is_made_later_is_followed_alike() -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))

    options: Any = {"recipe": {"scaling": "delayed", "amax_history_length": 2}, "statistics_every": 3}
    first, other = network(), network()
    model, optimizer = initialize(first, torch.optim.RMSprop(first.parameters(), lr=1e-4), "te", **options)
    other, _ = initialize(other, None, "te", **options)
    later = torch.optim.RMSprop(other.parameters(), lr=1e-4)
    follow_optimizer(other, later)
    assert optimizer is not None
    for number in range(5):
        step(model, optimizer, gaussian(number))
        step(other, later, gaussian(number))
    assert fp8_statistics(model) == fp8_statistics(other)
    assert {sample.step for sample in fp8_statistics(other)} == {3}
    state = exact_state_dict(other)
    for name, value in exact_state_dict(model).items():
        assert torch.equal(value, state[name]), name


def test_only_the_one_optimizer_that_trains_the_model_is_followed() -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match="follows an optimizer already"):
        follow_optimizer(model, optimizer)
    with pytest.raises(ValueError, match="has none of the model's parameters"):
        follow_optimizer(model, torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    with pytest.raises(ValueError, match="not initialized"):
        follow_optimizer(nn.Linear(2, 2), optimizer)
    without, _ = initialize(nn.Sequential(nn.Linear(64, 64)), None, "bf16-amp")
    follow_optimizer(without, torch.optim.AdamW(without.parameters()))


def test_a_layer_that_breaks_a_limit_in_a_row_is_demoted_with_an_event() -> None:
    events: list[LayerDemoted] = []
    model, optimizer = make(statistics_every=1, demotion={"patience": 2}, on_event=events.append)
    step(model, optimizer, spiked())
    step(model, optimizer, gaussian())  # a good sample: the count starts again
    step(model, optimizer, spiked())
    assert events == []
    step(model, optimizer, spiked())
    assert [(event.step, event.layer, event.operand) for event in events] == [(3, "0", "input")]
    assert events[0].reason.startswith("underflow_ratio 1 > 0.5")
    assert isinstance(model[0], Float8Linear)
    assert "demoted, all in bf16" in repr(model[0])
    for _ in range(3):
        step(model, optimizer, spiked())
    assert len(events) == 1


def test_a_demoted_layer_computes_in_bf16_and_still_trains_its_codes() -> None:
    model, optimizer = make(statistics_every=1, demotion={"patience": 1})
    layer = model[0]
    step(model, optimizer, spiked())
    assert layer.fallback is Fallback.DEMOTED
    exact = gaussian() @ layer.weight_values().T + layer.bias
    torch.testing.assert_close(layer(gaussian()), exact, rtol=2**-7, atol=2**-7)
    before = layer.weight.clone()
    step(model, optimizer, gaussian())
    assert not torch.equal(layer.weight, before)
    assert layer.encoded.codes.dtype == torch.float16


def test_demotion_and_the_sampling_rhythm_survive_a_checkpoint() -> None:
    options = {"statistics_every": 2, "demotion": {"patience": 1}}
    model, optimizer = make(**options)
    step(model, optimizer, spiked())
    restored, _ = make(**options)
    restored.load_state_dict(model.state_dict())
    assert restored[0].fallback is Fallback.DEMOTED
    assert restored[2].fallback is Fallback.NONE
    assert not restored[2].input_scaling.is_sampled


def test_a_copy_is_silent() -> None:
    events: list[LayerDemoted] = []
    pair = make(statistics_every=1, demotion={"patience": 1}, on_event=events.append)
    twin, twin_optimizer = copy.deepcopy(pair)
    step(twin, twin_optimizer, spiked())
    assert twin[0].fallback is Fallback.DEMOTED
    assert pair[0][0].fallback is Fallback.NONE
    assert events == []


RECOVERS = {"statistics_every": 1, "demotion": {"patience": 1, "recovery": 3}}


@pytest.mark.parametrize(
    ("opt_level", "recipe"),
    [
        ("te", None),
        ("te", {"scaling": "delayed", "amax_history_length": 4}),
        ("O2", None),
        ("O3", None),
        ("O3-split", None),
    ],
)
def test_a_calm_layer_comes_back_to_fp8(opt_level: str, recipe: dict[str, Any] | None) -> None:
    events: list[LayerDemoted | LayerRecovered] = []
    options = RECOVERS | ({"recipe": recipe} if recipe else {})
    model, optimizer = make(opt_level=opt_level, on_event=events.append, **options)
    if recipe and recipe.get("scaling") == "delayed":
        for _ in range(4):  # a full window, by which the outlier is clamped
            step(model, optimizer, gaussian())
    layer = model[0]
    step(model, optimizer, spiked())
    assert layer.fallback is Fallback.DEMOTED
    calm = [gaussian(0), gaussian(1), spiked(), gaussian(2), gaussian(3), gaussian(4)]
    found = []
    for input in calm:
        step(model, optimizer, input)
        found.append(layer.fallback)
    assert found == [Fallback.DEMOTED] * 5 + [Fallback.NONE]
    assert [(type(event), event.layer) for event in events] == [(LayerDemoted, "0"), (LayerRecovered, "0")]
    assert events[1].step == events[0].step + 6
    twin, _ = make(opt_level=opt_level, **options)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(gaussian(5)), twin(gaussian(5)))
    assert "demoted" not in repr(layer)


@pytest.mark.parametrize("opt_level", ["te", "O2"])
def test_a_demoted_layer_that_may_recover_is_measured_and_computes_the_same(opt_level: str) -> None:
    model, optimizer = make(opt_level=opt_level, **RECOVERS)
    twin, twin_optimizer = make(opt_level=opt_level, statistics_every=1, demotion={"patience": 1})
    for input in (spiked(), gaussian(1)):
        step(model, optimizer, input)
        step(twin, twin_optimizer, input)
    for name, value in model.named_parameters():
        assert torch.equal(value, twin.get_parameter(name)), name
    assert {(sample.layer, sample.operand) for sample in fp8_statistics(model)} == {
        (layer, operand) for layer in ("0", "2") for operand in ("input", "weight", "grad_output")
    }
    assert {sample.layer for sample in fp8_statistics(twin)} == {"2"}
    [sample] = [each for each in fp8_statistics(model) if (each.layer, each.operand) == ("0", "input")]
    assert sample.amax == gaussian(1).abs().max().item()


def test_calm_samples_are_counted_across_a_checkpoint() -> None:
    model, optimizer = make(**RECOVERS)
    for input in (spiked(), gaussian(1), gaussian(2)):
        step(model, optimizer, input)
    restored, its_optimizer = make(**RECOVERS)
    restored.load_state_dict(model.state_dict())
    assert restored[0].fallback is Fallback.DEMOTED
    step(restored, its_optimizer, gaussian(3))
    assert restored[0].fallback is Fallback.NONE


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
def test_a_compiled_layer_comes_back_too() -> None:
    model, optimizer = make(opt_level="te", auto_filter=False, **RECOVERS)
    twin, twin_optimizer = make(opt_level="te", auto_filter=False, **RECOVERS)
    compiled = torch.compile(model, backend="aot_eager")
    for input in (spiked(), gaussian(1), gaussian(2), gaussian(3), gaussian(4)):
        step(compiled, optimizer, input)  # type: ignore[arg-type]
        step(twin, twin_optimizer, input)
        assert model[0].fallback is twin[0].fallback
        assert fp8_statistics(model) == fp8_statistics(twin)
    assert model[0].fallback is Fallback.NONE
    assert torch.equal(model[0].weight, twin[0].weight)
