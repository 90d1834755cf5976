"""Count the launches of blocks, of statistics and of clipping, on the fake GPU: nothing is launched.

    python -m benchmarks.gpu.launches

An op of torch counts as one launch, however many it makes; of our own ops each Triton kernel counts. Bytes are those of the
tensors of activations that a launch is given or returns; what is read only while a window fills counts none. Layers have run
once before.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from benchmarks.figures import Figure, add_write_option, write
from octet.api_schemas import GPTSizes
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.llama import LlamaSizes
from octet.api_schemas.precision import DEFAULT_STATISTICS_EVERY
from octet.worker import initialize
from octet.worker.common.wrap import wrapper_of
from octet.worker.fp8.experts import ExpertsForward
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.models import gpt, llama
from octet.worker.optim import clip_grad_norm_
from octet.worker.planning.fake_gpu import DEVICE_TYPE, fake_gpu, see_within
from octet.worker.planning.live_bytes import LiveBytes

TOKENS, HIDDEN = 8192, 1024
CASES: tuple[tuple[str, dict[str, object]], ...] = (
    ("te", {}), ("O2", {}), ("O2", {"scaling": "delayed", "amax_history_length": 4}),
)  # fmt: skip
NUM_LAYERS = (4, 24)
OPTIMIZER_LEVELS = tuple(name for name, level in LEVELS.items() if level.has_own_fp8)
NO_LAUNCH = frozenset(
    (
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "detach",
        "detach_",
        "_unsafe_view",
        "resize_",
        "alias",
    )
) | {"device", "_record_function_enter_new", "_record_function_exit"}


class Launches(TorchDispatchMode):
    """Counts launches by name, and the bytes of activations that they move."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if any(issubclass(kind, Float8Gradient) for kind in types):
            return NotImplemented  # what it does with codes and scales is seen next
        found = see_within(self, func, args, options)
        if func.namespace == "octet":  # what our implementation does has been counted
            return found
        result = func(*args, **options) if found is NotImplemented else found
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_LAUNCH:
            self._count(name, (args, options, result))
        return result

    def launch(self, kernel: Any, *args: Any, **_options: Any) -> None:
        """Take the place of a Triton kernel's launch."""
        name = kernel.fn.__name__
        is_idle = name == "_amax_flat" and args[2] is not None
        first_read = 1 if name == "complete_kernel" else 0  # its values are read only while a window fills
        if name == "_measure_sample":
            self._count_sample(*args)
        else:
            self._count(name, () if is_idle else args[first_read:])

    def _count_sample(self, x: Tensor, *args: Any) -> None:
        """Count the rows that `measurement.measure` reads of an operand and of its codes."""
        codes, (num_rows, num_columns) = args[2], args[10:12]
        self.by_name["_measure_sample"] += 1
        self.num_bytes += num_rows * num_columns * (x.itemsize + codes.itemsize)

    def _count(self, name: str, arguments: Any) -> None:
        self.by_name[name] += 1
        self.num_bytes += self.bytes_of(arguments)

    def bytes_of(self, arguments: Any) -> int:
        """The bytes of the activations among a launch's arguments, each counted once."""
        tensors = {id(part): part for part in tree_leaves(arguments) if isinstance(part, Tensor)}
        return sum(part.nbytes for part in tensors.values() if part.numel() >= TOKENS * HIDDEN)


def count(work: Any) -> Launches:
    """Call `work` and count what it launches."""
    launches = Launches()
    run = mock.patch.object(JITFunction, "run", lambda kernel, *args, **options: launches.launch(kernel, *args, **options))
    with run, launches:
        work()
    return launches


def count_second(model: nn.Module, given: tuple[Any, ...], gradient: Tensor) -> Launches:
    """Count a model's second forward and backward pass, in which nothing is added to gradients of the first."""
    model(*given).backward(gradient)
    for tensor in (given[0], *model.parameters()):
        tensor.grad = None
    return count(lambda: model(*given).backward(gradient))


def linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False, device=DEVICE_TYPE)


def block(family: str, level: str, recipe: dict[str, object], statistics_every: int = 0) -> Launches:
    """Count the forward and backward pass of one block of a GPT or a Llama, eagerly; its residual stream is fp32.

    statistics_every: 1 to count a step that samples its operands.
    """
    sizes = {"hidden_size": HIDDEN, "num_layers": 1, "num_heads": 16, "vocab_size": 64, "max_sequence_length": TOKENS}
    with fake_gpu(), torch.device(DEVICE_TYPE):
        if family == "gpt":
            layers: nn.Module = gpt.Block(GPTSizes.model_validate(sizes))
        else:
            sizes |= {"num_key_value_heads": 16, "intermediate_size": 4 * HIDDEN, "rope_theta": 10000, "tie_embeddings": False}
            layers = llama.Block(LlamaSizes.model_validate(sizes))
        model, _ = initialize(layers, None, level, recipe=recipe, statistics_every=statistics_every, auto_filter=False)
        x = torch.randn(4, TOKENS // 4, HIDDEN, requires_grad=True)
        turns = llama.rotation(TOKENS // 4, HIDDEN // 16, 10000, x.device)
        return count_second(model, (x,) if family == "gpt" else (x, turns), x.detach())


def experts(level: str, num_experts: int) -> Launches:
    """Count the forward and backward pass of a mixture's experts, with 16 rows for each; router and sorting are not counted."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": num_experts, "experts_implementation": "eager"}
    with fake_gpu(), torch.device(DEVICE_TYPE):
        model, _ = initialize(Qwen3MoeExperts(Qwen3MoeConfig(**sizes)), None, level, statistics_every=0, auto_filter=False)
        forward = wrapper_of(model, ExpertsForward)
        assert forward is not None
        x, counts = torch.randn(16 * num_experts, 128, requires_grad=True), [16] * num_experts
        for _ in range(2):  # tables are sent once
            model.zero_grad()
            counted = count(lambda: forward.multiply(x, counts).sum().backward())
        return counted


@dataclass(frozen=True)
class Sampling:
    """Launches and bytes that sampling adds to a block's step."""

    num_launches: int
    num_bytes: int
    plain: Launches

    @property
    def shares(self) -> tuple[float, float]:
        """Return the shares of launches and bytes over all steps between two samples, at the default interval."""
        launches = self.num_launches / (DEFAULT_STATISTICS_EVERY * self.plain.by_name.total())
        return launches, self.num_bytes / (DEFAULT_STATISTICS_EVERY * self.plain.num_bytes)


def sampling(family: str, level: str, recipe: dict[str, object]) -> Sampling:
    """Count what statistics add to a block's step that samples them. The bytes of other activations count as in `block`."""
    sampled, plain = (block(family, level, recipe, every) for every in (1, 0))
    added = sampled.by_name.total() - plain.by_name.total(), sampled.num_bytes - plain.num_bytes
    assert sampled.by_name["_measure_sample"] > plain.by_name["_measure_sample"] == 0
    return Sampling(*added, plain)


def clipping(num_layers: int, level: str, clip: Callable[..., Any]) -> tuple[Launches, int]:
    """Count clipping by the norm of so many layers of 512 × 512. Also returns the bytes that it takes at its peak."""
    with fake_gpu():
        layers = nn.Sequential(*(linear(512, 512) for _ in range(num_layers)))
        model, _ = initialize(layers, None, level, statistics_every=0, auto_filter=False)
        model(torch.randn(64, 512, device=DEVICE_TYPE)).sum().backward()
        launches = count(lambda: clip(model.parameters(), 1.0))
        with LiveBytes(see_within=see_within) as live:
            clip(model.parameters(), 1.0)
        return launches, live.peak_bytes


def optimizer_step(num_layers: int, level: str) -> Launches:
    """Count AdamW's second step of so many layers of 512 × 512, with biases and norms."""
    with fake_gpu(), torch.device(DEVICE_TYPE):
        layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512)) for _ in range(num_layers)))
        adamw = torch.optim.AdamW(layers.parameters())
        model, optimizer = initialize(layers, adamw, level, statistics_every=0, auto_filter=False)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(64, 512)).sum().backward()
            counted = count(optimizer.step)
        return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write_option(parser)
    options = parser.parse_args()
    figures: list[Figure] = []
    for family in ("gpt", "llama"):
        for level, recipe in CASES:
            found = block(family, level, recipe)
            moved = f"{found.by_name.total()} launches, {found.num_bytes / 1e9:.3f} GB of activations"
            sys.stdout.write(f"block of {family}, {level} {recipe or ''}: {moved}\n")
            if level == "O2" and not recipe:
                name = f"launches: a block of {family} at O2, eager, forward and backward"
                figures.append(Figure(name, str(found.by_name.total())))
    for level, num_experts in itertools.product(("te", "O2", "O3"), (4, 128)):
        by_name = experts(level, num_experts).by_name
        sys.stdout.write(f"{num_experts} experts, {level}: {by_name.total()} launches {dict(by_name)}\n")
    for family, (level, recipe) in itertools.product(("gpt", "llama"), CASES):
        added = sampling(family, level, recipe)
        launches, num_bytes = added.shares
        counted = f"{added.num_launches} launches, {added.num_bytes / 1e9:.3f} GB in the step that is sampled"
        shared = f"{launches:.2%} of the launches and {num_bytes:.2%} of the bytes of {DEFAULT_STATISTICS_EVERY} steps"
        sys.stdout.write(f"statistics, block of {family}, {level} {recipe or ''}: {counted}; {shared}\n")
    for level, num_layers in itertools.product(OPTIMIZER_LEVELS, NUM_LAYERS):
        by_name = optimizer_step(num_layers, level).by_name
        sys.stdout.write(f"AdamW's step, {num_layers} layers, {level}: {by_name.total()} launches {dict(by_name)}\n")
    for level, num_layers in itertools.product(("O1", "O2", "O3-split", "O2-8bit", "te"), NUM_LAYERS):
        for name, clip in (("ours", clip_grad_norm_), ("torch's", nn.utils.clip_grad_norm_)):
            found, peak_bytes = clipping(num_layers, level, clip)
            launched = f"{found.by_name.total()} launches {dict(found.by_name)}"
            sys.stdout.write(f"clip {num_layers} layers, {level}, {name}: {launched}; {peak_bytes:,} bytes\n")
    if options.write:
        write(options.write, figures, "python -m benchmarks.gpu.launches", "no GPU (counted)", is_timed=False)


if __name__ == "__main__":
    main()
