"""The blocks that a model repeats are found, checkpointed to the same numbers, and compiled once."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octet.api_schemas import EventReport, JobSpec
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.gpt import gpt_sizes
from octet.worker import initialize
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.gpt import GPT
from octet.worker.prepare.blocks import WARM_UP_STEPS, CompileWatch, checkpoint_blocks, compile_blocks
from octet.worker.train.reports import compile_events
from tests.kit.families import FAMILIES, batch_of, fit_loss_scale
from tests.kit.training import train, with_training

IN_EVERY_RUN = {("gpt", "O2", "full"), ("swin", "O2", "selective"), ("gpt", "fp32", "selective")}
BLOCKS = {
    "gpt": ["Block"],
    "llama": ["Block"],
    "transformers-llama": ["LlamaDecoderLayer"],
    "roberta": ["RobertaLayer"],
    "vit": ["ViTLayer"],
    "deit": ["ViTLayer"],
    "swin": ["SwinLayer", "SwinLayer"],
}


def settings() -> list[Any]:
    return [
        pytest.param(family, level, kind, marks=() if (family, level, kind) in IN_EVERY_RUN else pytest.mark.matrix)
        for family in FAMILIES
        for level in LEVELS
        for kind in ("selective", "full")
    ]


def gradients(family: str, level: str, kind: Any) -> tuple[list[torch.Tensor], int]:
    """The loss and all gradients of one backward pass, and the bytes that the forward pass has kept for it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[family]()
    model, _ = initialize(model, torch.optim.AdamW(model.parameters()), level)
    fit_loss_scale(model)
    checkpoint_blocks(model, kind)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.random.fork_rng():
        torch.manual_seed(1)  # Swin drops paths at random
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model.loss(batch_of(family)).loss
        loss.backward()
    found = [loss.detach(), *(parameter.grad + 0 for parameter in model.parameters() if parameter.grad is not None)]
    return found, sum(kept.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_each_family_are_found(family: str) -> None:
    model, _ = initialize(FAMILIES[family](), opt_level="O2")
    assert [type(block).__name__ for block in repeated_blocks(model)] == BLOCKS[family]


def test_a_model_without_repetition_has_no_blocks() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))) == []


@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize(("family", "level", "kind"), settings())
def test_checkpointing_keeps_less_and_changes_no_bit(family: str, level: str, kind: Any) -> None:
    expected, num_bytes = gradients(family, level, "none")
    found, num_bytes_kept = gradients(family, level, kind)
    assert num_bytes_kept < num_bytes
    for value, expected_value in zip(found, expected, strict=True):
        assert value.isfinite().all()
        assert torch.equal(value, expected_value)


class Products(TorchDispatchMode):
    """Counts FP8 products."""

    num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = torch.ops.octet
        self.num_products += func.overloadpacket in (ops.matmul, ops.linear_output)
        self.num_products += 2 * (func.overloadpacket is torch.ops.octet.linear_gradients)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_accelerator", [False, True])
def test_selective_checkpointing_repeats_no_product(is_accelerator: bool) -> None:
    """On an accelerator a layer's pass is one op, unless its product is to be kept and its codes are not."""
    tokens = torch.randint(0, 64, (2, 17))
    found = {}
    for kind in ("none", "selective", "full"):
        with cpu_as_accelerator() if is_accelerator else nullcontext():
            model, _ = initialize(GPT(gpt_sizes(64, 2, 2, 64, 16)), opt_level="O2", statistics_every=0)
            checkpoint_blocks(model, kind)
            loss = model.loss({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}).loss
            with Products() as products:
                loss.backward()
        found[kind] = products.num_products
    num_layers = 2 * 4
    assert found == {"none": 2 * num_layers, "selective": 2 * num_layers, "full": 3 * num_layers}


class ChangesInPlace(nn.Module):
    """A block that changes what its first layer returns."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        hidden: Tensor = self.one(input)
        hidden += 1.0
        return input + self.other(hidden.sigmoid())


@pytest.mark.parametrize("is_accelerator", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)])
@pytest.mark.parametrize("products", [(), ("output",)])
def test_selective_checkpointing_keeps_a_product_that_a_model_changes(
    products: tuple[str, ...], shape: tuple[int, ...], bias: bool, is_accelerator: bool
) -> None:
    found = []
    for kind in ("none", "selective"):
        torch.manual_seed(0)
        model = nn.Sequential(ChangesInPlace(bias=bias), ChangesInPlace(bias=bias))
        with cpu_as_accelerator() if is_accelerator else nullcontext():
            model, _ = initialize(model, opt_level="te", auto_filter=False, recipe={"high_precision_gemms": products})
            assert checkpoint_blocks(model, kind) == 2 * (kind == "selective")
            model(torch.randn(shape, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for expected, gradient in zip(*found, strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor, when it is imported
def test_graphs_of_blocks_call_our_ops_without_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/worker/kernels has a graph that does so. torch caches such graphs by a key of their own."""
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN as written

    output, clip = (f"torch.ops.octet.{name}.default" for name in ("linear_output", "clip_"))
    monkeypatch.delitem(written, output, raising=False)
    model, _ = initialize(GPT(gpt_sizes(64, 1, 2, 64, 16)), opt_level="O2")
    with torch.compiler.config.patch(cache_key_tag="mine"):
        compile_blocks(model, backend="aot_eager")
        assert output not in written
        assert torch.compiler.config.cache_key_tag == "mine"
        for _ in range(2):
            compile_blocks(model)
            assert torch.compiler.config.cache_key_tag == "mineoctet-direct"
    assert output in written
    assert clip not in written  # a graph calls it by the names of its arguments


@pytest.mark.matrix
def test_a_job_checkpoints_and_trains_as_without(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    curves = []
    for kind in ("none", "full"):
        document = with_training(spec_document, "O2", activation_checkpointing=kind)
        recorder, _ = train(document, tmp_path / kind)
        curves.append(recorder.losses())
    assert curves[0] == curves[1]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("level", ["fp32", "fp16-amp", "te", "O2", "O3-split"])
def test_blocks_compile_once_without_a_graph_break(
    tmp_path: Path, spec_document: dict[str, Any], level: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with and without statistics, three blocks, accumulation, an evaluation: nothing is compiled after step 3."""
    torch.compiler.reset()
    monkeypatch.setattr("octet.worker.prepare.blocks.compile_blocks", lambda model: compile_blocks(model, backend="aot_eager"))
    document = with_training(
        spec_document, level, steps=6, micro_batch_size=2, activation_checkpointing=kind, compile="on", eval_every=3
    )
    document["model"] = document["model"] | {"num_layers": 3}
    if LEVELS[level].has_own_fp8:
        document["precision"] = {"level": level, "statistics_every": 2}
    JobSpec.model_validate(document)
    torch._dynamo.utils.counters.clear()
    compiled, _ = train(document, tmp_path / "compiled")
    eager, _ = train(with_training(document, compile="off") | {"precision": document["precision"]}, tmp_path / "eager")
    events = [event for event in compiled.of(EventReport) if event.type.startswith("training.")]
    assert [event.type for event in events] == ["training.compiled"], [event.message for event in events]
    assert f"first {WARM_UP_STEPS} steps" in events[0].message
    assert not torch._dynamo.utils.counters["graph_break"]
    assert compiled.losses() == eager.losses()


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize("level", ["te", "O2", "O3-split"])
def test_a_resumed_job_compiles_nothing_after_its_third_step(
    tmp_path: Path, spec_document: dict[str, Any], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step with statistics is the fifth of the attempt."""
    monkeypatch.setattr("octet.worker.prepare.blocks.compile_blocks", lambda model: compile_blocks(model, backend="aot_eager"))
    document = with_training(spec_document, level, steps=11, checkpoint_every=6, compile="on")
    document["precision"] = {"level": level, "statistics_every": 5}
    whole, _ = train(document, tmp_path)
    torch.compiler.reset()
    resumed, _ = train(document, tmp_path, whole.checkpoints()[-1:])
    assert [event.type for event in resumed.of(EventReport)] == ["training.compiled"]
    assert resumed.losses() == whole.losses()[6:]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize(
    ("family", "level"),
    [
        *(pytest.param("gpt", level, marks=pytest.mark.system) for level in ("te", "ao")),
        *(pytest.param(family, "O2", marks=pytest.mark.matrix) for family in FAMILIES),
        *(pytest.param("gpt", level, marks=pytest.mark.matrix) for level in LEVELS if level not in ("te", "ao", "O2")),
    ],
)
def test_no_family_breaks_a_graph_on_an_accelerator(family: str, level: str) -> None:
    """Steps with and without statistics: nothing is compiled after the third, and each block is one graph."""
    torch.compiler.reset()
    model = FAMILIES[family]()
    options = {"statistics_every": 2} if LEVELS[level].has_own_fp8 else {}
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, **options)
    fit_loss_scale(model)
    compile_blocks(model, backend="aot_eager")
    watch, reports = CompileWatch(), []
    with cpu_as_accelerator():
        for _ in range(WARM_UP_STEPS + 3):
            model.loss(batch_of(family)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reports += watch.after_step()
    events = [report for report in reports if isinstance(report, EventReport)]
    assert [event.type for event in events] == ["training.compiled"], [event.message for event in events]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize("level", ["bf16-amp", "O2"])
def test_all_blocks_share_one_graph(level: str) -> None:
    """More blocks than torch compiles of one function: with a graph for each, the last ones would run eagerly."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = GPT(gpt_sizes(32, torch._dynamo.config.recompile_limit + 2, 2, 256, 16))
    model, _ = initialize(model, torch.optim.AdamW(model.parameters()), level)
    compile_blocks(model, backend="aot_eager")
    tokens = torch.randint(0, 256, (1, 17))
    with cpu_as_accelerator():
        model.loss({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}).loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize(
    "level",
    [pytest.param("delayed", marks=pytest.mark.system), *(pytest.param(level, marks=pytest.mark.matrix) for level in LEVELS)],
)
def test_several_passes_of_a_graph_wait_for_their_backward_passes(level: str) -> None:
    """This happens in a pipeline: its first stages begin new micro-batches before the last stage has ended one."""
    torch.compiler.reset()
    options: dict[str, Any] = {"statistics_every": 2} if level == "delayed" or LEVELS[level].has_own_fp8 else {}
    options |= {"recipe": {"scaling": "delayed", "amax_history_length": 2}} if level == "delayed" else {}
    tokens, found = torch.randint(0, 64, (3, 2, 17), generator=torch.Generator().manual_seed(0)), []
    for is_compiled in (False, True):
        model = GPT(gpt_sizes(32, 2, 2, 64, 16))
        model, optimizer = initialize(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), "te" if level == "delayed" else level, **options
        )
        fit_loss_scale(model)
        if is_compiled:
            compile_blocks(model, backend="aot_eager")
        for _ in range(2):
            losses = [model.loss({"tokens": part[:, :-1], "targets": part[:, 1:]}).loss for part in tokens]
            for loss in losses:
                loss.backward()
            found.append([*losses, *(parameter.grad + 0 for parameter in model.parameters() if parameter.grad is not None)])
            optimizer.step()
            optimizer.zero_grad()
    for eager, compiled in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(value, expected) for value, expected in zip(compiled, eager, strict=True))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_events_tell_of_the_warm_up_and_of_what_is_compiled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from octet.worker.prepare import blocks

    graphs = [0]
    monkeypatch.setattr(blocks, "_num_graphs", lambda: graphs[0])
    watch = blocks.CompileWatch()
    events = []
    for num_graphs in (2, 3, 4, 4, 6, 6):
        graphs[0] = num_graphs
        events.append(watch.after_step())
    kinds = [[getattr(report, "type", None) or report.phase for report in reports] for reports in events]
    assert kinds == [[], [], ["warmed_up", "training.compiled"], [], ["training.recompiled"], []]
    assert events[2][1].data["graphs"] == 4
    assert events[4][0].data["graphs"] == 2


def test_a_graph_that_is_broken_is_told_once_with_its_reason() -> None:
    class Breaking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x + 1

    torch.compiler.reset()
    watch, block = CompileWatch(), torch.compile(Breaking(), backend="eager")
    reports = []
    for _ in range(2):
        block(torch.ones(2))
        reports += watch.after_step()
    [event] = reports
    assert isinstance(event, EventReport)
    assert (event.type, event.data["graph_breaks"]) == ("training.graph_broken", 1)
    assert "graph_break" in event.message


@pytest.mark.parametrize(
    ("training", "tensor", "device", "reason"),
    [
        ({}, 1, "cuda", None),
        ({"saved_activations": "fp8"}, 1, "cuda", None),
        ({"compile": "off"}, 2, "cuda", None),
        ({}, 2, "cpu", None),
        ({}, 2, "cuda", "with parallelism.sequence layers take FP8 codes from exchanges that torch cannot trace"),
    ],
)
def test_a_job_on_cuda_says_why_its_blocks_are_not_compiled(
    spec_document: dict[str, Any], training: dict[str, Any], tensor: int, device: str, reason: str | None
) -> None:
    document = spec_document | {"precision": {"level": "O2"}, "training": spec_document["training"] | training}
    document |= {"resources": {"workers": tensor}, "parallelism": {"tensor": tensor, "sequence": tensor > 1}}
    config = resolve(JobSpec.model_validate(document), RankEnv(world_size=tensor))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    events = list(compile_events(config, model, torch.device(device)))
    expected = [] if reason is None else [("training.not_compiled", f"blocks run without torch.compile: {reason}")]
    assert [(event.type, event.message) for event in events] == expected


def test_a_model_without_blocks_says_so(spec_document: dict[str, Any]) -> None:
    config = resolve(JobSpec.model_validate(spec_document), RankEnv())
    (event,) = compile_events(config, nn.Linear(4, 4), torch.device("cuda"))
    assert event.message == "blocks run without torch.compile: the model repeats none"
