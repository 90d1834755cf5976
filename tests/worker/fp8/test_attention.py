"""torch's own attention computes by linear layers what torch computes, and keeps torch's names."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas.precision import PrecisionSpec
from octet.worker import exact_state_dict, initialize, memory_report, plain_state_dict
from octet.worker.fp8.attention import computes_by_layers, unstack_attention
from octet.worker.fp8.convert import select_layers
from octet.worker.fp8.weight import is_float8_weight
from tests.kit.small_model import FP8_LEVELS, spread

WIDTH, HEADS, QUERIES, KEYS, BATCH = 32, 4, 6, 5, 3
CAUSAL = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * KEYS, [False] * 3 + [True] * 2, [False] + [True] * 4])
BIAS = torch.linspace(-2, 2, BATCH * HEADS * QUERIES * KEYS).view(BATCH * HEADS, QUERIES, KEYS)


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(5)
    made = nn.MultiheadAttention(WIDTH, HEADS, **options)
    if made.in_proj_bias is not None:
        nn.init.normal_(made.in_proj_bias)
    return made


def tokens(length: int, *, batch_first: bool = True, seed: int = 0) -> Tensor:
    made = torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(seed))
    return (made if batch_first else made.transpose(0, 1).contiguous()).requires_grad_()


def unstacked(model: nn.Module) -> nn.Module:
    unstack_attention(model, PrecisionSpec(level="O2"))
    return model


SELF: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal hint": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "causal hint with weights": {"attn_mask": CAUSAL, "is_causal": True},
    "numbers": {"attn_mask": torch.linspace(-1, 1, QUERIES * QUERIES).view(QUERIES, QUERIES), "need_weights": False},
}
CROSS: dict[str, dict[str, Any]] = {
    "padding": {"key_padding_mask": PADDING, "need_weights": False},
    "padding with weights by head": {"key_padding_mask": PADDING, "average_attn_weights": False},
    "both masks": {"key_padding_mask": PADDING, "attn_mask": BIAS[0] > 0.5, "need_weights": False},
    "by head": {"attn_mask": BIAS},
    "padding in numbers": {"key_padding_mask": PADDING * -3.0, "attn_mask": BIAS},
}


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"batch_first": True, "bias": False}], ids=str)
@pytest.mark.parametrize("name", [*SELF, *CROSS])
def test_it_computes_what_torch_computes(name: str, options: dict[str, Any]) -> None:
    results = []
    for model in (attention(**options), unstacked(attention(**options))):
        batch_first = options.get("batch_first", False)
        query = tokens(QUERIES, batch_first=batch_first)
        key = query if name in SELF else tokens(KEYS, batch_first=batch_first, seed=1)
        output, weights = model(query, key, key, **(SELF | CROSS)[name])
        (output * torch.linspace(-1, 1, WIDTH)).sum().backward()
        results.append(
            (output, weights, query.grad, key.grad, model.state_dict()["in_proj_weight"], model.out_proj.weight.grad)
        )
        if weights is not None:
            assert weights.requires_grad
    for theirs, ours in zip(*results, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_unbatched_tokens_and_the_same_dropout(need_weights: bool) -> None:
    results = []
    for model in (attention(dropout=0.5), unstacked(attention(dropout=0.5))):
        torch.manual_seed(11)
        dropped, _ = model(*[tokens(QUERIES)] * 3, need_weights=need_weights)
        one = tokens(QUERIES)[0]
        output, weights = model.eval()(one, one, one, need_weights=need_weights, key_padding_mask=torch.arange(QUERIES) > 3)
        results.append((dropped, output, weights if need_weights else output))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_a_hint_without_a_mask_is_refused() -> None:
    with pytest.raises(RuntimeError, match="is_causal is a hint"):
        unstacked(attention())(*[tokens(QUERIES)] * 3, is_causal=True)


class Separate(nn.Module):
    """The same attention, as somebody writes it with four linear layers."""

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        super().__init__()
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        parts = zip(self.projections, packed.in_proj_weight.chunk(3), packed.in_proj_bias.chunk(3), strict=True)
        for linear, weight, bias in parts:
            linear.weight, linear.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
        self.out_proj.load_state_dict(packed.out_proj.state_dict())

    def ordered(self) -> list[nn.Parameter]:
        weights, biases = zip(*((linear.weight, linear.bias) for linear in self.projections), strict=True)
        return [*weights, *biases, self.out_proj.weight, self.out_proj.bias]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> tuple[Tensor, None]:
        heads = [
            linear(each).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear, each in zip(self.projections, (query, key, value), strict=True)
        ]
        return self.out_proj(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("level", spread(FP8_LEVELS))
def test_it_has_the_bits_of_separate_layers(level: str) -> None:
    torch.set_num_threads(1)
    found = []
    for model in (attention(batch_first=True), Separate(attention(batch_first=True))):
        # In the order of the packed parameters, by which an optimizer draws its random numbers.
        ordered = model.parameters() if isinstance(model, nn.MultiheadAttention) else model.ordered()
        model, optimizer = initialize(model, torch.optim.AdamW(ordered, lr=1e-2), level)
        assert optimizer is not None
        assert len(model.octet_report.converted) == 4  # type: ignore[union-attr]
        losses = []
        for step in range(3):
            query = tokens(QUERIES, seed=step)
            output, _ = model(query, query, query, need_weights=False)
            loss = (output * torch.linspace(-1, 1, WIDTH)).square().sum()
            loss.backward()
            losses += [loss.detach(), query.grad]
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def encoder_decoder() -> nn.Transformer:
    torch.manual_seed(2)
    return nn.Transformer(WIDTH, HEADS, 1, 1, 64, dropout=0.0, batch_first=True)


def test_all_of_torchs_transformer_is_converted_and_learns_as_in_fp32() -> None:
    losses = []
    for level in ("fp32", "O2"):
        model = encoder_decoder()
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), level)
        assert optimizer is not None
        if level == "O2":
            assert len(model.octet_report.converted) == 4 * 3 + 2 * 2  # type: ignore[union-attr]
            assert model.octet_report.skipped == ()  # type: ignore[union-attr]
        for step in range(12):
            source, target = tokens(KEYS, seed=step % 3), tokens(QUERIES, seed=step % 3)
            output = model(source, target, src_key_padding_mask=PADDING, tgt_mask=CAUSAL, tgt_is_causal=True)
            loss = (output - target.detach().roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert losses[1] < 1.6


@pytest.mark.parametrize("level", ["te", "O2"])
def test_evaluation_computes_as_training_does_and_not_by_torchs_fast_path(level: str) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True), 2)
    model, _ = initialize(encoder, None, level)
    source = tokens(KEYS)
    kept = ~PADDING[..., None]
    trained = model(source, src_key_padding_mask=PADDING)
    for grad in (torch.no_grad, torch.enable_grad):
        with grad():
            evaluated = model.eval()(source, src_key_padding_mask=PADDING)
            by_itself = model.layers[0](source, src_key_padding_mask=PADDING)
        assert torch.equal(evaluated * kept, trained * kept)
        assert by_itself.shape == source.shape


@pytest.mark.parametrize("level", spread(FP8_LEVELS))
def test_state_dicts_have_torchs_names(level: str, tmp_path: Any) -> None:
    plain, (model, optimizer) = encoder_decoder(), started(level)
    step(model, optimizer)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt").keys() == plain.state_dict().keys() == plain_state_dict(model).keys()
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    again, _ = started(level)
    again.load_state_dict(plain.state_dict())
    source, target = tokens(KEYS), tokens(QUERIES)
    torch.testing.assert_close(again(source, target), model(source, target), atol=0.1, rtol=0.1)
    torch.testing.assert_close(plain(source, target), model(source, target), atol=0.2, rtol=0.2)


@pytest.mark.parametrize("level", spread(FP8_LEVELS))
def test_a_run_goes_on_to_the_bit(level: str) -> None:
    model, optimizer = started(level)
    step(model, optimizer)
    restored, its_optimizer = started(level)
    restored.load_state_dict(exact_state_dict(model))
    its_optimizer.load_state_dict(optimizer.state_dict())
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # noqa: S301 - our own
    source, target = tokens(KEYS), tokens(QUERIES)
    assert torch.equal(copied(source, target), model(source, target))
    assert step(restored, its_optimizer) == step(model, optimizer)


def started(level: str) -> tuple[Any, Any]:
    model = encoder_decoder()
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)


def step(model: nn.Module, optimizer: Any) -> float:
    loss = model(tokens(KEYS), tokens(QUERIES)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_an_optimizer_follows_with_its_states_and_an_old_one_raises() -> None:
    model = attention(batch_first=True)
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())
    model(*[tokens(QUERIES)] * 3)[0].sum().backward()
    optimizer.step()
    before = optimizer.state[model.in_proj_weight]["exp_avg"].clone()
    model, ours = initialize(model, optimizer, "te")
    assert ours is not None
    states = [ours.state[layer.weight]["exp_avg"]["codes"] for layer in model.in_proj]
    assert torch.equal(torch.cat(states), before.flatten())
    with pytest.raises(RuntimeError, match="its matrices are parameters of their own"):
        other.step()


def test_a_file_of_another_width_is_refused() -> None:
    model = unstacked(attention())
    state = model.state_dict() | {"in_proj_weight": torch.zeros(3 * WIDTH + 1, WIDTH)}
    with pytest.raises(RuntimeError, match="size mismatch for in_proj_weight"):
        model.load_state_dict(state)


class Changed(nn.MultiheadAttention):
    pass


def test_other_attention_stays_as_it_is_and_says_so() -> None:
    hooked = attention()
    hooked.out_proj.register_forward_hook(lambda *_: None)
    others = {
        "changed": Changed(WIDTH, HEADS),
        "wider keys": attention(kdim=48),
        "biased keys": attention(add_bias_kv=True),
        "hooked": hooked,
    }
    for name, other in others.items():
        assert not computes_by_layers(unstacked(other)), name
    _, skipped = select_layers(unstacked(nn.ModuleDict({"changed": others["changed"]})), PrecisionSpec(level="O2"))
    assert [layer.reason for layer in skipped] == ["its owner, a Changed, reads the weight itself"]


def test_its_memory_is_that_of_codes() -> None:
    model, optimizer = started("O2")
    step(model, optimizer)
    weights = [parameter for parameter in model.parameters() if is_float8_weight(parameter)]
    assert sum(weight.numel() for weight in weights) == 3 * 4 * WIDTH**2 + 2 * 2 * 64 * WIDTH
    others = sum(parameter.numel() for parameter in model.parameters()) - sum(weight.numel() for weight in weights)
    assert memory_report(model, optimizer)["weights"] == sum(2 * weight.numel() for weight in weights) + 4 * others
