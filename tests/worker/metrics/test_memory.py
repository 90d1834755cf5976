"""Bytes are counted from live storage, by class and once each, and stay within what the level's row promises."""

import pytest
import torch
from torch import nn

from octet.api_schemas import GPTSizes
from octet.api_schemas.levels import LEVELS
from octet.worker import initialize, memory_report, offload_optimizer
from octet.worker.fp8.operand import OperandScaling
from octet.worker.kernels import ScaledCodes, ScaleKind, measure, quantize
from octet.worker.kernels.sampling import SAMPLE_ELEMENTS
from octet.worker.metrics.memory import host_bytes
from octet.worker.models.gpt import GPT
from tests.kit.small_model import spread
from tests.numerics.measure import peak_bytes
from tests.numerics.oracle.test_live_bytes import ThreeLayers

FOUR_LAYERS = GPTSizes(hidden_size=128, num_layers=4, num_heads=4, vocab_size=256, max_sequence_length=64)


@pytest.fixture(scope="module", params=LEVELS)
def trained(request: pytest.FixtureRequest) -> tuple[str, GPT, torch.optim.Optimizer]:
    """Return a 4-layer GPT after one step, with its gradients still alive."""
    model = GPT(FOUR_LAYERS)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), opt_level=request.param)
    tokens_BT = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    model.loss({"tokens": tokens_BT, "targets": tokens_BT}).loss.backward()
    optimizer.step()
    return request.param, model, optimizer


def test_converted_layers_hold_what_the_row_promises(trained: tuple[str, GPT, torch.optim.Optimizer]) -> None:
    level, model, optimizer = trained
    report = memory_report(model, optimizer, converted_only=True)
    report["other"] -= num_history_bytes(model)
    num_parameters = model.octet_report.num_converted_parameters
    assert num_parameters == 4 * 12 * 128 * 128
    promised = LEVELS[level].bytes_per_parameter
    assert promised - 0.2 <= sum(report.values()) / num_parameters <= promised


def test_no_level_holds_more_than_bf16_amp(trained: tuple[str, GPT, torch.optim.Optimizer]) -> None:
    _, model, optimizer = trained
    num_bytes = sum(memory_report(model, optimizer).values()) - num_history_bytes(model)
    assert num_bytes <= 16 * model.num_parameters + 24  # 24 bytes: the state of loss scaling


def num_history_bytes(model: nn.Module) -> int:
    """Count the bytes of delayed scaling's windows: 3 operands of (1024 + 4) numbers per layer, for any layer size."""
    scalings = [module for module in model.modules() if isinstance(module, OperandScaling)]
    return sum(buffer.untyped_storage().nbytes() for scaling in scalings for buffer in scaling.buffers())


@pytest.mark.parametrize("level", spread(name for name, row in LEVELS.items() if row.weight_gradient == "fp8"))
def test_nothing_holds_more_than_two_layers_for_a_moment(level: str) -> None:
    """Covers forward and backward; tests/worker/optim covers the optimizer's step."""
    num_layers, layer = 8, 256 * 256
    two_layers = 2 * layer * LEVELS[level].bytes_per_parameter
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(num_layers)))
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level, statistics_every=0)
    input = torch.ones(1, 256)
    loss = model(input).sum()
    assert peak_bytes(lambda: model(input)) <= two_layers
    gradients = num_layers * layer
    assert gradients <= peak_bytes(loss.backward) <= gradients + two_layers
    assert memory_report(model, optimizer)["gradients"] == gradients


def test_storage_counts_once_and_in_full() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model["head"].weight = model["embedding"].weight
    model.register_buffer("window", torch.zeros(100)[:10])
    assert memory_report(model)["weights"] == 4 * (8 * 4 + 8)
    assert memory_report(model)["other"] == 400


def test_classes_of_torchs_own_optimizer() -> None:
    model = nn.Linear(4, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    expected = {"weights": 128, "gradients": 128, "exp_avg": 128, "exp_avg_sq": 128, "other": 4}
    assert {kind: size for kind, size in memory_report(model, optimizer).items() if size} == expected


class Wrapper:
    """Holds other objects, like the optimizers of Accelerate and Lightning."""

    def __init__(self, **held: object) -> None:
        self.__dict__.update(held)


def test_the_optimizer_within_wrappers_is_counted(trained: tuple[str, GPT, torch.optim.Optimizer]) -> None:
    _, model, optimizer = trained
    report = memory_report(model, optimizer)
    assert memory_report(model, Wrapper(inner=optimizer, model=model)) == report  # type: ignore[arg-type]
    for wrapper, number in ((Wrapper(), 0), (Wrapper(one=optimizer, other=torch.optim.SGD(model.parameters())), 2)):
        with pytest.raises(TypeError, match=f"a Wrapper that holds {number} optimizers; allowed: a torch"):
            memory_report(model, wrapper)  # type: ignore[arg-type]


def test_states_in_host_memory_are_not_the_devices() -> None:
    """The device is torch's meta device, of whose tensors only the sizes exist."""
    model = nn.Linear(8, 4, bias=False, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    moment = {"codes": torch.zeros(4, 8, dtype=torch.int8), "dequant_scale": torch.zeros(1)}
    optimizer.state[model.weight] = {"exp_avg": moment, "exp_avg_sq": {"codes": torch.zeros(4, 8, device="meta")}}
    assert {kind: size for kind, size in memory_report(model, optimizer).items() if size} == {"weights": 128, "exp_avg_sq": 128}
    assert host_bytes(model, optimizer) == 32 + 4


def test_a_model_on_the_host_has_its_states_there() -> None:
    model = nn.Linear(64, 64, bias=False)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), "O2", convert_heads=True)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    before = memory_report(model, optimizer)
    offload_optimizer(optimizer)
    assert memory_report(model, optimizer) == before
    assert 64 * 64 <= before["exp_avg"] < before["exp_avg_sq"] == 2 * 64 * 64
    assert host_bytes(model, optimizer) == 0


def test_a_sample_costs_a_fixed_amount_of_memory() -> None:
    """Holds for operands of any size, because of a large one only some rows are measured."""
    values = torch.randn(8192, 1024)
    quantized = ScaledCodes(*quantize(values, torch.float8_e4m3fn), ScaleKind.TENSOR)
    assert peak_bytes(lambda: measure(values, quantized)) <= 10 * 4 * SAMPLE_ELEMENTS


@pytest.mark.parametrize("level", ["O3", "O3-split", "O2"])
def test_a_layer_that_is_not_trained_holds_its_codes_alone(level: str) -> None:
    model = ThreeLayers()
    optimizer = torch.optim.AdamW([*model.trained.parameters(), *model.frozen.parameters()])
    weights = [model.frozen.weight.detach().clone(), model.unused.weight.detach().clone()]
    model, optimizer = initialize(model, optimizer, opt_level=level)
    layer, row = 128 * 128, LEVELS[level]
    report = memory_report(model, optimizer)
    assert report["weights"] == 3 * layer * model.trained.weight.codes.itemsize
    assert report["master_weights"] == layer * {"O3": 2, "O3-split": 3, "O2": 0}[level]
    for converted, values in zip((model.frozen, model.unused), weights, strict=True):
        torch.testing.assert_close(converted.weight_values(), values, rtol=2**-4, atol=2**-10)
    assert (optimizer.state[model.trained.weight].keys() >= {"master_weights"}) == (row.master_weight == "fp16+scale")
    assert model.frozen.weight not in optimizer.state


def test_a_layer_that_is_thawed_starts_its_master_from_the_codes() -> None:
    model = ThreeLayers()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level="O3")
    model.frozen.requires_grad_(True)
    before = model.frozen.weight_values()
    model(torch.ones(16, 128)).sum().backward()
    optimizer.step()
    assert "master_weights" in optimizer.state[model.frozen.weight]
    change = model.frozen.weight_values() - before
    assert 0 < change.abs().max() <= 2e-2
