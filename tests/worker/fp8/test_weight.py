"""A weight held as codes is its values: who reads or writes it finds what a plain tensor, rounded once per write, has."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from octet.worker import initialize
from octet.worker.fp8.weight import Float8Weight
from octet.worker.fp8.weights import decode_values, encode_values
from tests.kit.live_storages import LiveStorages

SHAPE = (16, 32)
STACK = (3, 16, 32)
STORAGES = ("fp16", "e4m3", "e4m3+int8", "e4m3+master")
LEVEL_OF = {"fp16": "O2", "e4m3+int8": "O3-split", "e4m3+master": "O3"}
View = Callable[[Tensor], Tensor]
Write = Callable[[Tensor, torch.Generator], Any]
Read = Callable[[Tensor], Any]


def random(*shape: int, seed: int = 0, scale: float = 0.05) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(tensor.shape), generator=generator) * 0.05


def rounded(values: Tensor, storage: str) -> Tensor:
    """Round values to nearest as a storage does, with one scale for a matrix and one for each entry of a stack."""
    if values.dim() == 3:
        return torch.stack([rounded(one, storage) for one in values])
    dtype = torch.float16 if storage == "fp16" else torch.float8_e4m3fn
    codes, scale, _, residual = encode_values(values, dtype, has_residual=storage == "e4m3+int8")
    return decode_values(codes, scale, residual, torch.float32)


def layer_and_optimizer(storage: str, shape: tuple[int, int] = SHAPE) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    with torch.no_grad():
        model[0].weight.copy_(random(*shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    return initialize(model, optimizer, LEVEL_OF[storage], auto_filter=False, statistics_every=0, convert_heads=True)


def weight_of(storage: str, shape: tuple[int, ...] = SHAPE) -> Float8Weight:
    """A weight in a storage; one with a master comes from our optimizer, which has stepped it."""
    if storage == "e4m3+master":
        model, optimizer = layer_and_optimizer(storage, shape[-2:])  # type: ignore[arg-type]
        train(model, optimizer)
        weight = model[0].weight
        assert weight.state.master is not None
        weight.requires_grad_(False)
        return weight
    dtype = torch.float16 if storage == "fp16" else torch.float8_e4m3fn
    if len(shape) == 2:
        return Float8Weight.encode(random(*shape), dtype, has_residual=storage == "e4m3+int8")
    each = [encode_values(one, dtype, has_residual=storage == "e4m3+int8") for one in random(*shape)]
    codes, scales, amaxes, residuals = zip(*each, strict=True)
    residual = None if residuals[0] is None else torch.stack(residuals)
    scale, amax = torch.stack(scales).view(-1, 1, 1), torch.stack(amaxes).view(-1, 1, 1)
    return Float8Weight(
        torch.stack([one.view(torch.uint8) for one in codes]).view(dtype) if dtype != torch.float16 else torch.stack(codes),
        scale,
        amax,
        residual,
    )


def train(model: nn.Module, optimizer: Any, num_steps: int = 1) -> None:
    for seed in range(num_steps):
        model(random(16, model[0].weight.shape[1], seed=seed, scale=1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


VIEWS: dict[str, View] = {
    "whole": lambda w: w,
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "t": lambda w: w.t() if w.dim() == 2 else w.transpose(-1, -2),
    "transpose": lambda w: w.transpose(0, 1),
    "row": lambda w: w[1],
    "element": lambda w: w[1, 2],
    "rows": lambda w: w[1:3],
    "columns": lambda w: w[..., 1:5],
    "strided": lambda w: w[..., ::2, 1::3],
    "flat": lambda w: w.view(-1),
    "flat part": lambda w: w.view(-1)[5:9],
    "reshape": lambda w: w.reshape(4, -1),
    "diagonal": lambda w: w.diagonal(),
    "chunk": lambda w: w.chunk(2)[1],
    "split": lambda w: w.split([1, w.shape[0] - 1])[1],
    "split columns": lambda w: w.split(5, dim=-1)[1],
    "unbind": lambda w: w.unbind()[-1],
    "unsqueeze": lambda w: w.unsqueeze(0)[0],
    "narrow": lambda w: w.narrow(-1, 2, 3),
    "permute": lambda w: w.permute((*range(1, w.dim()), 0)),
    "as_strided": lambda w: w.as_strided((2, 3), (7, 2), 3),
    "row of t": lambda w: w.transpose(0, 1)[2],
    "unfold": lambda w: w.unfold(-1, 2, 2),
    "tail": lambda w: w[-1:],
    "select last": lambda w: w.select(-1, 0),
    "movedim": lambda w: w.movedim(0, -1),
}

FINISHED: dict[str, Write] = {
    "fill_": lambda w, g: w.fill_(0.3),
    "fill_ of a tensor": lambda w, g: w.fill_(like(w, g).sum()),
    "zero_": lambda w, g: w.zero_(),
}
CHANGES: dict[str, Write] = {
    "copy_": lambda w, g: w.copy_(like(w, g)),
    "copy_ of doubles": lambda w, g: w.copy_(like(w, g).double()),
    "[...] =": lambda w, g: w.__setitem__(Ellipsis, like(w, g)),
    "_foreach_copy_": lambda w, g: torch._foreach_copy_([w], [like(w, g)]),
    "add_": lambda w, g: w.add_(like(w, g), alpha=0.01),
    "sub_": lambda w, g: w.sub_(like(w, g)),
    "mul_": lambda w, g: w.mul_(1 - 1e-5),
    "div_": lambda w, g: w.div_(3),
    "neg_": lambda w, g: w.neg_(),
    "lerp_": lambda w, g: w.lerp_(like(w, g), 0.001),
    "addcmul_": lambda w, g: w.addcmul_(like(w, g), like(w, g)),
    "addcdiv_": lambda w, g: w.addcdiv_(like(w, g), like(w, g).abs() + 1),
    "clamp_": lambda w, g: w.clamp_(-0.06, 0.05),
    "normal_": lambda w, g: w.normal_(0, 0.05, generator=g),
    "uniform_": lambda w, g: w.uniform_(-0.1, 0.1, generator=g),
    "masked_fill_": lambda w, g: w.masked_fill_(like(w, g) > 0.05, 0.01),
    "mask =": lambda w, g: w.__setitem__(like(w, g) > 0.05, 0.02),
    "+=": lambda w, g: w.__iadd__(0.001),
    "add_ of itself": lambda w, g: w.add_(w, alpha=0.5),
    "mul_ of its norm": lambda w, g: w.mul_(1 / (1 + w.norm())),
    "out=": lambda w, g: torch.add(like(w, g), 0.01, out=w),
    "tanh_": lambda w, g: w.tanh_(),
    "_foreach_add_": lambda w, g: torch._foreach_add_([w], 0.001),
    "_foreach_mul_": lambda w, g: torch._foreach_mul_([w], 0.999),
    "_foreach_lerp_": lambda w, g: torch._foreach_lerp_([w], [like(w, g)], 0.01),
    "_foreach_addcdiv_": lambda w, g: torch._foreach_addcdiv_([w], [like(w, g)], [like(w, g).abs() + 1], 0.1),
    "index_copy_": lambda w, g: w.index_copy_(0, torch.tensor([0]), like(w[:1], g)) if w.dim() else w.add_(1),
    "index_fill_": lambda w, g: w.index_fill_(0, torch.tensor([0]), 0.01) if w.dim() else w.add_(1),
    "index_add_": lambda w, g: w.index_add_(0, torch.tensor([0]), like(w[:1], g)) if w.dim() else w.add_(1),
    "scatter_": lambda w, g: w.scatter_(0, torch.zeros(w.shape, dtype=torch.int64), 0.02) if w.dim() else w.add_(1),
    "row by row": lambda w, g: [row.mul_(0.5) for row in w] if w.dim() else w.mul_(0.5),
    "transposed add_": lambda w, g: w.mT.add_(0.001) if w.dim() > 1 else w.add_(0.001),
}
READS: dict[str, Read] = {
    "norm": lambda w: w.norm(),
    "float": lambda w: w.float(),
    "double": lambda w: w.double(),
    "bfloat16": lambda w: w.bfloat16(),
    "sum": lambda w: w.sum(),
    "std": lambda w: w.std(correction=0),
    "abs max": lambda w: w.abs().max(),
    "clone": lambda w: w.clone(),
    "contiguous": lambda w: w.contiguous(),
    "product": lambda w: w.reshape(-1) @ w.reshape(-1),
    "einsum": lambda w: torch.einsum("...,...->...", w, w),
    "cat": lambda w: torch.cat([w.reshape(-1), w.reshape(-1)]),
    "stack": lambda w: torch.stack([w, w]),
    "where": lambda w: torch.where(w > 0, w, 0),
    "compared": lambda w: w > 0.01,
    "foreach norm": lambda w: torch._foreach_norm([w])[0],
    "tolist": lambda w: torch.tensor(w.tolist()),
    "numpy": lambda w: torch.from_numpy(w.numpy()),
    "deepcopy": lambda w: copy.deepcopy(w) + 0,
    "row of a deepcopy": lambda w: copy.deepcopy(w.detach())[:1] + 0 if w.dim() else w + 0,
    "like": lambda w: torch.zeros_like(w),
    "new": lambda w: w.new_full((2,), 3.0),
    "vector": lambda w: nn.utils.parameters_to_vector([w]) if w.is_contiguous() else w + 0,
}


class Twins:
    """A weight and a plain tensor, to which the same is done. `views` of both are kept over later writes."""

    def __init__(self, storage: str, shape: tuple[int, ...] = SHAPE) -> None:
        self.storage, self.weight = storage, weight_of(storage, shape)
        self.plain = self.weight.dequantize()
        self.is_wide = False
        self.views: list[tuple[Tensor, Tensor]] = [(self.weight, self.plain)]

    def view(self, name: str, source: int) -> None:
        weight, plain = self.views[source % len(self.views)]
        try:
            view = VIEWS[name](plain)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                VIEWS[name](weight)
        else:
            self.views.append((VIEWS[name](weight), view))

    def write(self, name: str, target: int, seed: int) -> None:
        weight, plain = self.views[target % len(self.views)]
        write = {**FINISHED, **CHANGES}[name]
        try:
            write(plain, torch.Generator().manual_seed(seed))
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                write(weight, torch.Generator().manual_seed(seed))
            return
        write(weight, torch.Generator().manual_seed(seed))
        if plain.untyped_storage().data_ptr() != self.plain.untyped_storage().data_ptr():
            return  # a reshape that copied
        is_whole = plain.numel() == self.plain.numel()
        if name in CHANGES or (self.is_wide and not is_whole) or self.storage == "e4m3+master":
            self.is_wide = True
            return
        self.is_wide = False
        self.plain.copy_(rounded(self.plain, self.storage))

    def check(self) -> None:
        assert torch.equal(self.weight.dequantize(), self.plain)
        for view, plain in self.views:
            assert view.shape == plain.shape
            assert view.stride() == plain.stride()
            assert torch.equal(view + 0, plain)
        if self.storage != "e4m3+master" or self.is_wide:  # products see the nearest codes at once
            decoded = torch.stack([decode_values(*parts, torch.float32) for parts in parts_of_each(self.weight)]).view(
                self.plain.shape
            )
            assert torch.equal(decoded, rounded(self.plain, self.storage))


def parts_of_each(weight: Float8Weight) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    if weight.dim() == 2:
        return [(weight.codes, weight.dequant_scale, weight.residual)]
    residuals = [None] * len(weight.codes) if weight.residual is None else list(weight.residual)
    return [(*pair, fine) for *pair, fine in zip(weight.codes, weight.dequant_scale.view(-1), residuals, strict=True)]  # type: ignore[misc]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("view"), st.sampled_from(sorted(VIEWS)), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("write"), st.sampled_from(sorted(FINISHED | CHANGES)), st.integers(0, 5), st.integers(0, 99)),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("storage", STORAGES)
@given(shape=st.sampled_from([SHAPE, STACK]), steps=STEPS)
@settings(max_examples=25, derandomize=True)
def test_any_sequence_of_writes_is_that_of_a_plain_tensor(storage: str, shape: tuple[int, ...], steps: Any) -> None:
    twins = Twins(storage, SHAPE if storage == "e4m3+master" else shape)
    for kind, name, which, seed in steps:
        if kind == "view":
            twins.view(name, which)
        else:
            twins.write(name, which, seed)
        twins.check()


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [SHAPE, STACK], ids=["matrix", "stack"])
@pytest.mark.parametrize("storage", STORAGES[:3])
def test_each_write_through_each_view_arrives(storage: str, shape: tuple[int, ...]) -> None:
    for view in VIEWS:
        for write in {**FINISHED, **CHANGES}:
            twins = Twins(storage, shape)
            twins.view(view, 0)
            twins.write(write, 1, seed=1)
            twins.check()


@pytest.mark.parametrize(
    ("storage", "shape", "is_written"),
    [
        *[("fp16", SHAPE, True), ("e4m3+int8", STACK, False), ("e4m3+master", SHAPE, False), ("e4m3", STACK, True)],
        *[
            pytest.param("e4m3", SHAPE, False, marks=pytest.mark.matrix),
            pytest.param("fp16", STACK, False, marks=pytest.mark.matrix),
        ],
    ],
)
def test_each_read_of_each_view_has_the_values(storage: str, shape: tuple[int, ...], is_written: bool) -> None:
    twins = Twins(storage, shape)
    if is_written:
        twins.write("mul_", 0, 0)
    for name, view in VIEWS.items():  # as_strided of a matrix and of a stack alike
        for read in READS.values():
            found, expected = (read(view(tensor)) for tensor in (twins.weight, twins.plain))
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), name


# What a write leaves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_small_changes_are_not_rounded_away(storage: str) -> None:
    weight = weight_of(storage)
    before = weight.dequantize().double()
    for _ in range(100):
        weight.mul_(1 - 1e-5)
    lost = (weight.double() - before * (1 - 1e-5) ** 100).norm() / (before * (1 - (1 - 1e-5) ** 100)).norm()
    assert lost < 0.01


@pytest.mark.parametrize("storage", STORAGES)
def test_a_slow_average_arrives(storage: str) -> None:
    average, plain = weight_of(storage), weight_of(storage).dequantize()
    target = random(*SHAPE, seed=9)
    for _ in range(200):
        average.lerp_(target, 1e-4)
        plain.lerp_(target, 1e-4)
    assert torch.equal(average + 0, plain)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_perturbation_is_taken_back(storage: str) -> None:
    """Climb and return, like SAM before each step."""
    weight, change = weight_of(storage), random(*SHAPE, seed=3, scale=0.01)
    before = weight.dequantize()
    for _ in range(100):
        weight.add_(change)
        weight.sub_(change)
    assert (weight - before).norm() / before.norm() < 1e-6


@pytest.mark.parametrize("storage", LEVEL_OF)
def test_the_next_step_takes_a_change_and_drops_its_fp32_values(storage: str) -> None:
    """Rounded stochastically: a change of a hundredth of a code survives in the mean, and nearest would lose it."""
    model, optimizer = layer_and_optimizer(storage, (64, 256))
    train(model, optimizer)
    weight, group = model[0].weight, optimizer.param_groups[0]
    group["lr"] = 0.0
    with torch.no_grad():
        weight.fill_(0.5)
    train(model, optimizer)
    before = weight.dequantize()
    with torch.no_grad():
        weight.mul_(1 + 2e-5)
    assert weight.state.wide is not None
    train(model, optimizer)
    assert weight.state.wide is None
    assert (weight.detach() - before).mean().item() == pytest.approx(1e-5, rel=0.25)


@pytest.mark.parametrize("storage", LEVEL_OF)
def test_values_that_are_assigned_are_those_that_the_next_step_begins_with(storage: str) -> None:
    model, optimizer = layer_and_optimizer(storage)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        model[0].weight.copy_(random(*SHAPE, seed=5))
    train(model, optimizer)
    error = 2.0**-3 if storage == "e4m3" else 2.0**-10  # stochastically rounded, to either neighbour
    torch.testing.assert_close(model[0].weight + 0, random(*SHAPE, seed=5), rtol=error, atol=1e-4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda weight: pickle.loads(pickle.dumps(weight))])  # noqa: S301
@pytest.mark.parametrize("storage", STORAGES)
def test_a_copy_holds_what_it_is_assigned(storage: str, copied: Callable[[Any], Any]) -> None:
    """One of a weight with a master has a master of its own, which a write replaces, too."""
    weight = weight_of(storage)
    before, other = weight.dequantize(), copied(weight)
    assert torch.equal(other + 0, before)
    other.copy_(random(*SHAPE, seed=5))
    kept = random(*SHAPE, seed=5)
    assert torch.equal(other + 0, kept)
    other.mul_(0.5)
    assert torch.equal(other + 0, kept * 0.5)
    assert torch.equal(weight + 0, before)


# What torch asks without an op ---------------------------------------------------------------------------------------------


def test_data_takes_the_values_of_another_weight() -> None:
    weight, other = weight_of("fp16"), weight_of("e4m3").mul_(2)
    weight.data = other
    assert torch.equal(weight + 0, rounded(other + 0, "fp16"))
    with pytest.raises(ValueError, match="Assign a new parameter"):
        weight.data = torch.zeros(3)


@pytest.mark.parametrize("change", [lambda w: w.resize_(4, 4), lambda w: w.t_(), lambda w: w.unsqueeze_(0)])
def test_a_change_of_shape_in_place_is_refused(change: Callable[[Tensor], Any]) -> None:
    weight = weight_of("fp16")
    before = weight.dequantize()
    with pytest.raises(ValueError, match="codes keep their memory"):
        change(weight)
    assert torch.equal(weight + 0, before)


def test_new_tensors_are_plain() -> None:
    """One that shared the weight's scale would change the weight when it is filled."""
    weight = weight_of("fp16")
    before = weight.dequantize()
    for made in (weight.new_zeros(2, 3), weight.new_empty(2, 3), torch.empty_like(weight), weight.new_tensor([1.0])):
        assert type(made) is Tensor
        made.fill_(1000.0)
    assert torch.equal(weight + 0, before)


@pytest.mark.parametrize(
    "read", [lambda w: w.data_ptr(), lambda w: torch.utils.dlpack.to_dlpack(w), lambda w: w.view(torch.int32)]
)
def test_raw_memory_is_refused(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=r"allowed|Cannot access data pointer"):
        read(weight_of("fp16"))


def test_values_leave_torch() -> None:
    weight = weight_of("fp16")
    plain = weight.dequantize()
    assert torch.equal(torch.from_dlpack(weight), plain)
    assert (weight.numpy() == plain.numpy()).all()
    assert weight.tolist() == plain.tolist()
    assert f"{weight[0, 0]:.3f}" == f"{plain[0, 0]:.3f}"


def test_a_parameter_is_saved_and_loaded() -> None:
    parameter, buffer = nn.Parameter(weight_of("e4m3+int8")), io.BytesIO()
    torch.save({"parameter": parameter, "row": parameter[1].detach()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert type(loaded["parameter"]) is Float8Weight
    assert isinstance(loaded["parameter"], nn.Parameter)
    assert loaded["parameter"].requires_grad
    assert torch.equal(loaded["parameter"] + 0, parameter + 0)
    assert torch.equal(loaded["row"], parameter[1] + 0)
    same = copy.copy(parameter)
    assert same.codes is parameter.codes


SHARED = """
import torch
from octet.worker.fp8.weight import Float8Weight

weight = Float8Weight.encode(torch.ones(16, 32), torch.float16)
weight.share_memory_()
assert weight.is_shared()
process = torch.multiprocessing.get_context("fork").Process(target=weight.fill_, args=(2.0,))
process.start()
process.join()
assert process.exitcode == 0
assert float(weight.mean()) == 2.0
"""


@pytest.mark.system
def test_shared_memory_is_written_by_another_process() -> None:
    """In a process of its own, which a fault would end."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", SHARED], check=True, timeout=300)


def test_a_weight_that_changes_before_its_backward_pass_is_noticed() -> None:
    model, _ = layer_and_optimizer("fp16")
    for change in (lambda w: w.mul_(2), lambda w: w.view(-1)[3:4].zero_(), lambda w: w.copy_(torch.ones(SHAPE))):
        output = model(random(4, SHAPE[1]).requires_grad_())
        with torch.no_grad():
            change(model[0].weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_hooks_stay_with_a_weight_that_moves() -> None:
    model, _ = layer_and_optimizer("fp16")
    seen: list[str] = []
    weight = model[0].weight
    weight.register_hook(lambda _: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    model._apply(lambda tensor: tensor.clone())
    assert model[0].weight is weight
    model(random(4, SHAPE[1])).sum().backward()
    assert seen == ["gradient", "after"]


def test_a_foreach_write_decodes_one_weight_at_a_time() -> None:
    weights = [Float8Weight.encode(torch.ones(256, 256), torch.float16) for _ in range(8)]
    with LiveStorages() as live:
        torch._foreach_copy_(weights, [torch.zeros(())] * 8)
    assert live.peak_bytes < 4 * weights[0].numel() * 4
    assert not any(weight.any() for weight in weights)


@pytest.mark.parametrize("storage", LEVEL_OF)
def test_writes_into_a_state_dict_arrive(storage: str) -> None:
    """Write entries like those of a plain model, which are its parameters: timm's averages and others' are made by this."""
    model, optimizer = layer_and_optimizer(storage)
    train(model, optimizer)
    weight = model[0].weight
    before = weight.dequantize()
    for values in model.state_dict().values():
        if values.shape == SHAPE:
            values.mul_(0.5)
    del values
    assert torch.equal(weight + 0, before * 0.5)
    assert not weight.state.entries
    state = model.state_dict()
    state["0.weight"].zero_()
    with torch.no_grad():
        assert not model.eval()(random(4, SHAPE[1])).any()
    model.train()
    state["0.weight"].copy_(before)
    train(model, optimizer)
    assert (weight - before).norm() < 0.5 * before.norm()
    state["0.weight"].zero_()
    with pytest.warns(UserWarning, match="after its weight had changed"):
        weight.sum()
    assert weight.any()


# Graphs --------------------------------------------------------------------------------------------------------------------


def counted(use: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Compile a function. Returns the graphs that are made, too."""
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        made.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(use, backend=backend, **options), made


@pytest.mark.parametrize("storage", ["fp16", pytest.param("e4m3+int8", marks=pytest.mark.matrix)])
def test_a_graph_reads_values_and_is_made_once(storage: str) -> None:
    def use(weight: Tensor, x: Tensor) -> Tensor:
        return x @ weight.t() + weight.pow(2).sum()

    compiled, made = counted(use, fullgraph=True)
    x = random(4, SHAPE[1])
    for scale in (1.0, 8.0):
        dtype = torch.float16 if storage == "fp16" else torch.float8_e4m3fn
        weight = Float8Weight.encode(random(*SHAPE) * scale, dtype, has_residual=storage != "fp16")
        assert torch.equal(compiled(weight, x), use(weight, x))
    assert len(made) == 1


@pytest.mark.parametrize("storage", [pytest.param("fp16", marks=pytest.mark.matrix), "e4m3", "e4m3+int8", "e4m3+master"])
def test_a_graph_ends_where_a_weight_is_written_or_has_finer_values(storage: str) -> None:
    """Both then run eagerly: a graph has the codes alone. A whole graph is refused."""

    def write(weight: Tensor, x: Tensor) -> Tensor:
        y = x * 2
        weight.mul_(1 - 1e-4)
        return y @ weight.t()

    def read(weight: Tensor, x: Tensor) -> Tensor:
        y = x * 2
        return y @ weight.t()

    x = random(4, SHAPE[1])
    refused = "held as codes is (read|written) inside of a compiled graph"
    one, other = weight_of(storage), weight_of(storage)
    one.requires_grad_(False)
    other.requires_grad_(False)
    with pytest.raises(Exception, match=refused):
        counted(write, fullgraph=True)[0](one, x)
    assert torch.equal(one + 0, other + 0)
    if storage == "e4m3+master":
        with pytest.raises(Exception, match=refused):
            counted(read, fullgraph=True)[0](one, x)
    compiled, made = counted(write)
    for _ in range(10):
        assert torch.equal(compiled(one, x), write(other, x))
    assert made
    assert one.state.wide is not None
    assert torch.equal(one + 0, other + 0)
    assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    with pytest.raises(Exception, match=refused):
        counted(read, fullgraph=True)[0](one, x)
    assert torch.equal(counted(read)[0](one, x), read(other, x))
