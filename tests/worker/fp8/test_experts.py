"""Experts of a mixture train as separate linear layers do, to the bit, and keep transformers' names."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from octet.api_schemas.levels import LEVELS
from octet.api_schemas.precision import PrecisionSpec
from octet.worker import exact_state_dict, initialize, kernels, memory_report, plain_state_dict
from octet.worker.fp8.experts import expert_loads, has_experts, mixtures_of, unstack_experts
from octet.worker.fp8.operand import OperandScaling
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.metrics.table import Metrics
from octet.worker.optim.rules.adam import LowBitAdamW
from octet.worker.train.build import linear_flops_per_token
from tests.kit.small_model import spread

NUM_EXPERTS, TOP_K, NUM_TOKENS, WIDTH, INNER = 4, 2, 24, 32, 48


def experts() -> nn.Module:
    """transformers' own, as Qwen3-MoE has them."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": INNER, "num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
    made: nn.Module = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, experts_implementation="eager"))
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return made


class Separate(nn.Module):
    """The same weights as a list of linear layers, which are called one after another."""

    def __init__(self, stacked: nn.Module) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * INNER, bias=False) for _ in range(NUM_EXPERTS))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=False) for _ in range(NUM_EXPERTS))
        for linears, weights in ((self.up, stacked.gate_up_proj), (self.down, stacked.down_proj)):
            for linear, weight in zip(linears, weights, strict=True):
                linear.weight = nn.Parameter(weight.detach().clone())

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros(*index.shape, WIDTH)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = torch.where(index == expert)
            gate, value = up(hidden_states[token]).chunk(2, dim=-1)
            own = down(functional.silu(gate) * value) * weights[token, place, None]
            output = output.index_put((token, place), own)
        return output.sum(1)


def routing(kind: str, step: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their experts, and the weights of these."""
    generator = torch.Generator().manual_seed(10 + step)
    num_tokens = 0 if kind == "no tokens" else NUM_TOKENS
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    if kind == "skewed":
        scores[: NUM_TOKENS - 2, 0] += 2
        scores[:, 3] += 1
    elif kind == "an empty expert":
        scores[:, 2] -= 2
    weights, index = scores.softmax(-1).topk(TOP_K)
    return torch.randn(num_tokens, WIDTH, generator=generator), index, weights


def codes_of(model: nn.Module) -> list[Tensor]:
    weights = [parameter for parameter in model.parameters() if is_float8_weight(parameter)]
    parts = [part for weight in weights for part in (weight.codes, weight.dequant_scale, weight.residual) if part is not None]
    return [part.float() for part in parts]


@pytest.mark.parametrize("kind", ["even", "skewed", "an empty expert", "no tokens"])
@pytest.mark.parametrize("level", [*spread(name for name, row in LEVELS.items() if row.has_own_fp8)])
def test_they_have_the_bits_of_separate_layers(level: str, kind: str) -> None:
    options: dict[str, Any] = {"recipe": {"scaling": "delayed", "amax_history_length": 2}} if kind == "an empty expert" else {}
    check_against_separate_layers(level, kind, options)


@pytest.mark.system
@pytest.mark.parametrize("kind", ["skewed", "an empty expert"])
@pytest.mark.parametrize("granularity", ["row", "block", "mx"])
def test_scales_of_parts_have_them_too(granularity: str, kind: str) -> None:
    """Each expert multiplies its tokens by itself then."""
    check_against_separate_layers("O2", kind, {"recipe": {"granularity": granularity}})


def check_against_separate_layers(level: str, kind: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    found = []
    for build in (experts, lambda: Separate(experts())):
        model = build()
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, **options)
        assert optimizer is not None
        assert len(model.octet_report.converted) == 2 * NUM_EXPERTS  # type: ignore[union-attr]
        results = []
        for step in range(3):
            tokens, index, weights = routing(kind, step)
            tokens.requires_grad_()
            weights.requires_grad_()
            output = model(tokens, index, weights)
            (output * torch.linspace(-1, 1, WIDTH)).sum().backward()
            results += [output.detach(), tokens.grad, weights.grad, *(p.grad + 0 for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        buffers = [buffer for buffer in model.buffers() if buffer.numel()]
        found.append((*results, *codes_of(model), *(parameter + 0 for parameter in model.parameters()), *buffers))
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one.nan_to_num(-9), other.nan_to_num(-9)) for one, other in zip(*found, strict=True))


def test_an_expert_without_tokens_keeps_its_weight_and_scales() -> None:
    model = experts()
    options = {"recipe": {"scaling": "delayed", "amax_history_length": 2}, "statistics_every": 0}
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0), "O2", **options)
    assert optimizer is not None
    empty, full = model.gate_up_proj[2], model.gate_up_proj[0]
    before = [[part.clone() for part in codes_of(layer)] for layer in (empty, full)]
    model(*routing("an empty expert")).sum().backward()
    assert torch.equal(empty.weight.grad + 0, torch.zeros(2 * INNER, WIDTH))
    assert (full.weight.grad + 0).abs().amax() > 0
    optimizer.step()
    after = [codes_of(layer) for layer in (empty, full)]
    assert all(map(torch.equal, before[0], after[0]))
    assert not all(map(torch.equal, before[1], after[1]))
    for layer, has_seen in ((empty, False), (full, True)):
        windows = [scaling for name, scaling in layer.scalings().items() if name == "input"]
        assert all(isinstance(scaling, OperandScaling) and bool(scaling.num_finite_steps) is has_seen for scaling in windows)


def test_they_compute_what_transformers_computes() -> None:
    """Without any rounding, forward and backward; `test_architectures.py` has other classes of experts."""
    plain, unstacked = experts(), experts()
    unstack_experts(unstacked, PrecisionSpec(level="O2"))
    assert has_experts(unstacked)
    results = []
    for model in (plain, unstacked):
        tokens, index, weights = routing("skewed")
        output = model(tokens.requires_grad_(), index, weights.requires_grad_())
        (output**2).sum().backward()
        results.append((output, tokens.grad, weights.grad, model.state_dict()["gate_up_proj"]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    stacked = torch.stack([linear.weight.grad for linear in unstacked.down_proj])
    torch.testing.assert_close(stacked, plain.down_proj.grad)


@pytest.mark.parametrize("level", ["te", "O2", "O3", "O3-split"])
def test_plain_state_dicts_have_transformers_names_and_return_exactly(level: str) -> None:
    plain = experts()
    model = initialize(experts(), None, level)[0]
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    assert plain_state_dict(model).keys() == plain.state_dict().keys()
    again, _ = initialize(experts(), None, level)
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    again.load_state_dict(model.state_dict())
    assert all(map(torch.equal, codes_of(again), codes_of(model)))
    inputs = routing("even")
    assert torch.equal(again(*inputs), model(*inputs))
    plain.load_state_dict(model.state_dict())
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    assert all(torch.equal(values[name], value) for name, value in plain_state_dict(model).items() if level == "te")
    exact = exact_state_dict(model)
    assert all(".0." in name or ".1." in name or ".2." in name or ".3." in name for name in exact)
    with pytest.raises(RuntimeError, match=r"size mismatch for gate_up_proj.* has 4 matrices there"):
        model.load_state_dict({name: value[:3] for name, value in plain.state_dict().items()})


def test_writes_into_a_state_dict_reach_the_weights() -> None:
    """Averages of timm write so."""
    model, _ = initialize(experts(), None, "O2")
    state = model.state_dict()
    state["down_proj"].mul_(0.5)
    expected = state["down_proj"].clone()
    torch.testing.assert_close(plain_state_dict(model)["down_proj"], expected, rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        model.down_proj[0].weight.mul_(2.0)  # the entry is older now, and nothing is written back
    del state
    torch.testing.assert_close(plain_state_dict(model)["down_proj"][0], 2 * expected[0], rtol=1e-3, atol=1e-6)


def test_the_optimizer_follows_with_its_states() -> None:
    """A group keeps its experts, and a step after `initialize` is the one that would have come without it."""
    plain, model = experts(), experts()
    optimizers = [
        torch.optim.AdamW([{"params": [m.down_proj], "lr": 1e-2}, {"params": [m.gate_up_proj]}]) for m in (plain, model)
    ]
    for own, optimizer in zip((plain, model), optimizers, strict=True):
        own(*routing("even")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model, made = initialize(
        model, optimizers[1], "te", recipe={"high_precision_gemms": ["output", "grad_input", "grad_weight"]}
    )
    assert made is optimizers[1]
    assert [len(group["params"]) for group in made.param_groups] == [NUM_EXPERTS, NUM_EXPERTS]
    assert {id(p) for group in made.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    before = plain.down_proj.detach().clone()
    for own, optimizer in ((plain, optimizers[0]), (model, made)):
        own(*routing("even", 1)).sum().backward()
        optimizer.step()
    moved, expected = model.state_dict()["down_proj"] - before, plain.down_proj.detach() - before
    assert (moved - expected).norm() < 0.05 * expected.norm()  # products in bf16


@pytest.mark.parametrize("level", ["te", "O2"])
def test_an_optimizer_that_was_left_behind_is_refused_when_it_steps(level: str) -> None:
    """It holds the stacks of before, which get no gradient: it would train everything but the experts."""
    model = experts()
    left_behind = torch.optim.AdamW(model.parameters())
    model, _ = initialize(model, None, level)
    model(*routing("even")).sum().backward()
    for use in (left_behind.step, left_behind.zero_grad):
        with pytest.raises(
            RuntimeError, match=r"shape \(\d+, \d+, \d+\) .* Pass the optimizer to initialize, or make it later"
        ):
            use()
    torch.optim.AdamW(model.parameters()).step()


def test_a_report_has_a_line_for_all_experts_of_a_stack() -> None:
    model, _ = initialize(nn.ModuleDict({"experts": experts()}), None, "O2")
    report = model.octet_report
    lines = [line for line in str(report).splitlines() if line.startswith("  converted")]
    number = len(report.converted) // 2
    expected = [f"  converted experts.{name} ({number} experts)" for name in ("gate_up_proj", "down_proj")]
    assert (lines, number) == (expected, len(model["experts"].down_proj))


def test_few_bit_states_of_a_stack_are_refused() -> None:
    model = experts()
    optimizer = LowBitAdamW(model.parameters())
    model(*routing("even")).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has stepped experts that lie in one tensor"):
        initialize(model, optimizer, "O2")
    assert not has_experts(model)


def test_flops_count_the_experts_of_a_token_in_stacks_and_one_by_one() -> None:
    plain, unstacked = experts(), experts()
    unstack_experts(unstacked, PrecisionSpec(level="O2"))
    num_elements = 3 * WIDTH * INNER
    for model in (plain, unstacked):
        assert linear_flops_per_token(nn.Sequential(nn.Linear(WIDTH, 8), model)) == 6 * (8 * WIDTH + TOP_K * num_elements)


@pytest.mark.parametrize("level", ["O2", "O2-8bit", "O3", "O3-split"])
def test_they_hold_the_bytes_of_the_level(level: str) -> None:
    """6.1 bytes a parameter at O2, by live storage, after a step and with gradients."""
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

    model: Any = MixtralExperts(MixtralConfig(hidden_size=128, intermediate_size=256, num_local_experts=8))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), level)
    assert optimizer is not None
    scores, index = torch.rand(64, 8).topk(2)
    model(torch.randn(64, 128), index, scores).sum().backward()
    optimizer.step()
    num_parameters = 8 * 3 * 128 * 256
    assert model.octet_report.num_converted_parameters == num_parameters
    report = memory_report(model, optimizer)
    report["other"] = 0  # windows of scales, for each layer alike
    promised = LEVELS[level].bytes_per_parameter
    assert promised - 0.2 <= sum(report.values()) / num_parameters <= promised + 0.01


def test_copies_and_pickles_train_on() -> None:
    model, _ = initialize(experts(), None, "O2")
    inputs = routing("even")
    expected = model(*inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert torch.equal(other(*inputs), expected)
        assert other.state_dict().keys() == model.state_dict().keys()
        other.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        assert not other(*inputs).any()
    assert torch.equal(model(*inputs), expected)


def test_products_are_counted_as_those_of_separate_layers() -> None:
    kernels.count_flops()
    model, _ = initialize(experts(), None, "O2")
    tokens, *chosen = routing("an empty expert")
    with FlopCounterMode(display=False) as counter:
        model(tokens.requires_grad_(), *chosen).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * NUM_TOKENS * TOP_K * 3 * WIDTH * INNER


def test_loads_are_counted() -> None:
    """The tokens of the expert with fewest and of that with most, over the mean, which the rank's metrics show."""
    model = nn.ModuleList([initialize(experts(), None, "O2")[0] for _ in range(2)])
    assert expert_loads(mixtures_of(model).values()) == []
    for mixture, kind in zip(model, ("even", "an empty expert"), strict=True):
        mixture(*routing(kind))
    loads = expert_loads(mixtures_of(model).values())
    counts = [torch.bincount(routing(kind)[1].flatten(), minlength=NUM_EXPERTS) for kind in ("even", "an empty expert")]
    mean = NUM_TOKENS * TOP_K / NUM_EXPERTS
    assert loads == [(int(count.min()) / mean, int(count.max()) / mean) for count in counts]
    assert loads[1][0] == 0
    metrics = Metrics()
    metrics.observe_experts(loads)
    found = {labels: value for family, labels, value in metrics.read() if family.name == "octet_expert_load_ratio"}
    assert found == {("fewest",): 0.0, ("most",): max(most for _, most in loads)}


@pytest.mark.parametrize("level", ["te", "O2", "O3"])
def test_biases_transposed_weights_and_micro_batches(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS has both. Its experts together have the bits of one after another, added up too, and frozen in part."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    torch.set_num_threads(1)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": NUM_EXPERTS}
    found: list[list[Tensor]] = []
    for together in (True, False):
        made: Any = GptOssExperts(GptOssConfig(**sizes, experts_implementation="eager"))
        generator = torch.Generator().manual_seed(3)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
        model, _ = initialize(made, None, level, statistics_every=0)
        assert model.gate_up_proj.are_grouped
        if not together:
            monkeypatch.setattr("octet.worker.fp8.experts.are_grouped", lambda _layers: False)
        results = []
        for step in range(2):
            tokens, index, weights = routing("an empty expert", step)
            output = model(tokens.requires_grad_(), index, weights.requires_grad_())
            (output * torch.linspace(-1, 1, WIDTH)).sum().backward()
            results += [output.detach(), tokens.grad, weights.grad, *(p.grad + 0 for p in model.parameters())]
        model.down_proj.requires_grad_(False)
        tokens, *chosen = routing("skewed")
        model(tokens.requires_grad_(), *chosen).sum().backward()
        with torch.no_grad():
            results += [tokens.grad, model(*routing("skewed"))]
        found.append([each for each in (*results, *model.buffers()) if each.numel()])
    assert all(torch.equal(one.nan_to_num(-9), other.nan_to_num(-9)) for one, other in zip(*found, strict=True))
