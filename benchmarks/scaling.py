"""Predict weak scaling on H100s from counted bytes and roofline times. Nothing here has been measured on a GPU.

    python -m benchmarks.scaling [--out FOLDER]

Bytes on the wire and in memory are counted by the library's own step (`benchmarks/wire_bytes.py`). Products take the times of
`benchmarks/gpu/roofline.py`; what else a step does takes the time of its bytes. The network is NVLink inside a node of 8, and
one 400 Gb/s port for each GPU between nodes. Every rate is a constant below, with its source; the document repeats them.

Shape suffixes: M tokens of a micro-batch on one GPU, H hidden size, D data parallel ranks.
"""

import argparse
import gc
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import product
from math import ceil, log2
from pathlib import Path

import torch

from benchmarks.figures import OUT, Figure, add_write_option, write
from benchmarks.gpu.networks import Way, build_gpt, in_fp8, prepare, save_memory
from benchmarks.gpu.roofline import Rates, bf16_work, fp8_work, rates_of
from benchmarks.wire_bytes import Traffic, count
from octet.api_schemas.layout import WideDtype
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.gpt import GPTSizes, gpt_sizes
from octet.worker.models import TrainedModel
from octet.worker.planning.fake_gpu import DEVICE_TYPE, fake_gpu, see_within
from octet.worker.planning.live_bytes import LiveBytes
from octet.worker.planning.trace import with_fake_values

COUNTED_RANKS, NODE = 8, 8
RATES = rates_of("own")

NVLINK_BYTES_PER_S = 0.8 * 450e9
"""H100 SXM: 900 GB/s of NVLink in both directions together by its data sheet; of one direction, four fifths."""
PORT_BYTES_PER_S = 0.9 * 50e9
"""One 400 Gb/s port for each GPU, as DGX H100 has; a tenth for headers and imbalance."""
MESSAGE_S, HOP_S = 2e-6, 10e-6
"""A message of an exchange to one peer on another node; a step of a collective between nodes. Assumed."""
ATTENTION_FLOPS_PER_S = 0.35 * 989e12
"""FlashAttention-2, which torch has, reaches 35 % of an H100's bf16 rate (abstract of arXiv 2407.08608)."""
BYTES_PER_ACTIVATION = {"bf16-amp": 96, "FP8": 78}
"""Bytes that norms, residual stream and GELU of a block read and write, for each token and hidden element, in both passes.

Residual and norms in fp32: 2 × (4+2 forward, 2+4+4 backward) + 2 × (4+2+4) = 52. GELU on 4 H in bf16: 4 × (2+2+2+2+2+1) = 44;
where a layer takes the activation over (`activate_again`), its output is not written in bf16: 26.
"""
SEQUENCE_LENGTH, VOCABULARY = 2048, 50304
RANKS = (8, 64, 512, 4096)
GPT_125M = gpt_sizes(768, 12, 12, VOCABULARY, SEQUENCE_LENGTH)
GPT_6_7B = gpt_sizes(4096, 32, 32, VOCABULARY, SEQUENCE_LENGTH)
GPT_175B = gpt_sizes(12288, 96, 96, VOCABULARY, SEQUENCE_LENGTH)


@dataclass(frozen=True)
class Layout:
    """The degrees by which GPUs share a GPT: tensor within a node, stages of a pipeline, data parallel ranks with ZeRO 1.

    chunks: parts of the depth that a GPU has (an interleaved schedule has several).
    """

    tensor: int
    pipeline: int
    data: int
    sequences_per_step: int
    chunks: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"tensor {self.tensor} × pipeline {self.pipeline} × data {self.data}"


FP8_LM_175B = Layout(8, 4, 4, 512)
"""GPT-175B in table 5 of the FP8-LM paper (arXiv 2310.18313), v2: 128 GPUs, a million tokens a step."""
PAPER_HELD, PAPER_S = 40.3 / 66.1, 0.73
"""In the same table: memory of a GPU to bf16's, both at micro-batches of one sequence ("39 % less"), and a step's time at
micro-batches of four to Transformer Engine's at one ("37 % faster")."""


@dataclass(frozen=True)
class Run:
    """A level on data parallel ranks. wide: dtype of the traffic that is not in FP8. two_level: see `exchange_s`."""

    level: str
    zero_stage: int
    wide: WideDtype = "bf16"
    two_level: bool = False

    def __str__(self) -> str:
        return f"{self.level}, ZeRO {self.zero_stage}, rest in {self.wide}" + (", in two levels" if self.two_level else "")

    def traffic(self, sizes: GPTSizes) -> Traffic:
        """Return the bytes that one of COUNTED_RANKS sends in a step of one micro-batch."""
        return count(sizes, self.level, self.zero_stage, COUNTED_RANKS, self.wide)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: computing, the optimizer, and communication that nothing hides."""

    compute_s: float
    optimizer_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.optimizer_s + self.exposed_s


def linear_s(level: str, m: int, k: int, n: int, rates: Rates = RATES) -> float:
    """Seconds of a linear layer, forward and backward, quantization included. m tokens, k in features, n out features."""
    row = LEVELS[level]
    weights = "scaled" if row.weight != "fp32" else "fp32"
    return (fp8_work(weights, "tensor") if row.has_own_fp8 else bf16_work(weights)).seconds(m, k, n, rates)


def block_s(sizes: GPTSizes, level: str, num_tokens: int, tensor: int = 1, rates: Rates = RATES) -> float:
    """Seconds of one block, forward and backward, on one of `tensor` GPUs that share it."""
    h, m = sizes.hidden_size, num_tokens
    column, row = ((h, 3 * h), (h, 4 * h)), ((h, h), (4 * h, h))
    products_s = sum(linear_s(level, m, k, n // tensor, rates) for k, n in column)
    products_s += sum(linear_s(level, m, k // tensor, n, rates) for k, n in row)
    # Causal: half of 2 · 2 · M · T · H forward, and 2.5 times that backward
    attention_s = 3.5 * 2 * m * sizes.max_sequence_length * h / tensor / ATTENTION_FLOPS_PER_S
    kind = "FP8" if LEVELS[level].has_own_fp8 else "bf16-amp"
    return products_s + attention_s + BYTES_PER_ACTIVATION[kind] * m * h / tensor / rates.copy_bytes_per_s


def compute_s(sizes: GPTSizes, level: str, num_tokens: int, rates: Rates = RATES) -> float:
    """Seconds of one micro-batch's forward and backward pass."""
    return sizes.num_layers * block_s(sizes, level, num_tokens, rates=rates) + head_s(sizes, num_tokens, rates=rates)


def optimizer_s(sizes: GPTSizes, run: Run, num_ranks: int, rates: Rates = RATES) -> float:
    """The update reads all that its parameters hold and writes all but the gradients; under ZeRO ranks share the parameters."""
    held = count(sizes, run.level, 0, COUNTED_RANKS, run.wide).held
    num_bytes = 2 * sum(held.values()) - held["gradients"]
    return num_bytes / (num_ranks if run.zero_stage else 1) / rates.copy_bytes_per_s


def gather_s(num_bytes: float, num_ranks: int) -> float:
    """All-gather of `num_bytes` in all, to each rank: rings over NVLink, whose crossings share the 8 ports of a node."""
    nodes = ceil(num_ranks / NODE)
    received = num_bytes * (num_ranks - 1) / num_ranks
    if nodes == 1:
        return received / NVLINK_BYTES_PER_S
    return max(received / NVLINK_BYTES_PER_S, received / NODE / PORT_BYTES_PER_S) + HOP_S * ceil(log2(nodes))


def exchange_s(num_bytes: float, num_ranks: int, *, two_level: bool = False) -> float:
    """Return the seconds in which each rank sends every other its share of `num_bytes`, as `Axis.start_exchange` does.

    Nearly all of it goes through the rank's own port. two_level: a node's ranks add up first, and an eighth goes between nodes,
    as NCCL's reduce-scatter moves wide gradients; Octet does not, since codes would be rounded once more.
    """
    nodes, inside = ceil(num_ranks / NODE), min(num_ranks, NODE)
    if nodes == 1:
        return num_bytes * (num_ranks - 1) / num_ranks / NVLINK_BYTES_PER_S
    if two_level:
        between_s = num_bytes / NODE * (nodes - 1) / nodes / PORT_BYTES_PER_S + MESSAGE_S * (nodes - 1)
        return num_bytes * (NODE - 1) / NODE / NVLINK_BYTES_PER_S + between_s
    through_port = num_bytes * (num_ranks - inside) / num_ranks / PORT_BYTES_PER_S + MESSAGE_S * (num_ranks - inside)
    return max(num_bytes * (inside - 1) / num_ranks / NVLINK_BYTES_PER_S, through_port)


def step_time(sizes: GPTSizes, run: Run, num_ranks: int) -> StepTime:
    """Return the time of a step of one sequence on every rank.

    The exchange hides behind the backward pass (two thirds of the time).
    Gathers of stages 0 to 2 hide behind nothing; those of stage 3 hide behind the passes.
    """
    traffic = run.traffic(sizes)
    whole = COUNTED_RANKS / (COUNTED_RANKS - 1)  # of all ranks' shares, this rank sent all but its own
    one_s = compute_s(sizes, run.level, sizes.max_sequence_length)
    exchanged, gathered = traffic.sent_by("exchange") * whole, traffic.sent_by("gather") * whole
    exposed_s = max(0.0, exchange_s(exchanged, num_ranks, two_level=run.two_level) - one_s * 2 / 3)
    if run.zero_stage == 3:
        exposed_s += max(0.0, gather_s(gathered, num_ranks) - one_s)
    else:
        exposed_s += gather_s(gathered, num_ranks)
    return StepTime(one_s, optimizer_s(sizes, run, num_ranks), exposed_s)


BASELINES = (Run("bf16-amp", 1, two_level=True), Run("te", 1, two_level=True))
"""The strongest that Octet's levels are compared with: what others train with, exchanged in two levels."""
RUNS = (
    Run("bf16-amp", 1, "fp32"),
    Run("bf16-amp", 1),
    *BASELINES,
    Run("O2", 1),
    Run("O3", 1),
    Run("O3-split", 1),
    Run("O3-split", 3),
)


def table(columns: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown. columns: separated by commas."""
    names = columns.split(", ")
    return [f"| {' | '.join(cells)} |" for cells in (names, ["---"] + ["---:"] * (len(names) - 1), *rows)]


def bytes_table(sizes: GPTSizes) -> list[str]:
    """List the bytes that a rank sends and holds."""
    rows = []
    for level, stage, wide in product(("bf16-amp", "O2", "O3", "O3-split"), (0, 1, 3), ("fp32", "bf16")):
        found = count(sizes, level, stage, COUNTED_RANKS, wide)
        same, widest = (count(sizes, "bf16-amp", stage, COUNTED_RANKS, dtype).sent_by() for dtype in (wide, "fp32"))
        sent = (found.sent_by("exchange"), found.sent_by("gather"), found.sent_by())
        ratios = (found.sent_by() / same, found.sent_by() / widest)
        megabytes, shares = (f"{num_bytes / 1e6:,.0f}" for num_bytes in sent), (f"{ratio:.2f}" for ratio in ratios)
        rows.append((level, wide, str(stage), *megabytes, *shares, f"{sum(found.held.values()) / 1e9:.2f}"))
    columns = "level, not in FP8, ZeRO, exchanged (MB), gathered (MB), all (MB), to bf16-amp, to bf16-amp in fp32, held (GB)"
    return table(columns, rows)


def scaling_table(sizes: GPTSizes) -> list[str]:
    """List the steps of weak scaling: one sequence on every rank."""
    rows = []
    for run in RUNS:
        first = 0.0
        for num_ranks in RANKS:
            time, *bases = (step_time(sizes, each, num_ranks) for each in (run, *BASELINES))
            rate = sizes.max_sequence_length / time.total_s
            first = first or rate
            cells = (f"{time.total_s:.3f}", f"{time.exposed_s / time.total_s:.0%}", f"{rate / 1e3:.1f}", f"{rate / first:.0%}")
            rows.append((str(run), str(num_ranks), *cells, *(f"{base.total_s / time.total_s:.2f}" for base in bases)))
    columns = "run, GPUs, step (s), not hidden, k tokens/s of a GPU, to 8 GPUs"
    return table(f"{columns}, speed to bf16-amp in two levels, to te in two levels", rows)


def chunk_s(sizes: GPTSizes, run: Run, layout: Layout, sequences: int, *, hides_wire: bool = False) -> float:
    """Seconds of a micro-batch on one chunk of the pipeline, forward and backward, with sequence parallelism.

    A block gathers its tokens six times (two layers forward; both and their saved inputs backward) and scatters sums four
    times. What is gathered is in codes at levels whose gradients travel in FP8, what is summed in bf16. hides_wire: all of it
    hides behind the products.
    """
    m = sequences * sizes.max_sequence_length
    gathered_bytes = 1 if LEVELS[run.level].gradient_communication == "fp8" else 2
    moved = (6 * gathered_bytes + 4 * 2) * m * sizes.hidden_size * (layout.tensor - 1) / layout.tensor
    block = block_s(sizes, run.level, m, layout.tensor) + (0.0 if hides_wire else moved / NVLINK_BYTES_PER_S)
    return sizes.num_layers / layout.pipeline / layout.chunks * block


def head_s(sizes: GPTSizes, num_tokens: int, tensor: int = 1, rates: Rates = RATES) -> float:
    """Seconds of the head and its loss, forward and backward; the head multiplies in bf16 at every level."""
    h, v = sizes.hidden_size, sizes.vocab_size / tensor
    return 3 * 2 * num_tokens * h * v / rates.gemm_flops_per_s["bf16"] + 8 * num_tokens * v / rates.copy_bytes_per_s


def large_step_s(sizes: GPTSizes, run: Run, layout: Layout, sequences: int, *, hides_wire: bool = False) -> float:
    """Seconds of a step: 1F1B with micro-batches of `sequences`, the exchange of gradients, and the update.

    The last stage has the head, so all wait for it once a micro-batch. Gradients are complete with the last micro-batch. Ranks
    of a data parallel axis that share a node send between nodes once for all of them. hides_wire: the exchange and the gather
    hide behind one micro-batch and what a tensor degree moves behind products, as with Megatron's overlaps; Octet has none.
    """
    num_micro_batches = layout.sequences_per_step // layout.data // sequences
    chunk, bubbles = chunk_s(sizes, run, layout, sequences, hides_wire=hides_wire), layout.pipeline - 1
    last_s = head_s(sizes, sequences * sizes.max_sequence_length, layout.tensor)
    computed_s = (num_micro_batches * layout.chunks + bubbles) * chunk + num_micro_batches * last_s
    shared = layout.tensor * layout.pipeline
    on_node = max(1, NODE // layout.tensor)
    wire_s = count(sizes, run.level, 1, layout.data, run.wide).sent_by() / shared / on_node / PORT_BYTES_PER_S
    hidden_s = chunk + last_s if hides_wire else 0.0
    return computed_s + max(0.0, wire_s - hidden_s) + optimizer_s(sizes, run, layout.data) / shared


@dataclass(frozen=True)
class Kept:
    """Bytes that a block of a level keeps for the backward pass: of each sequence, and once, such as weights in bf16."""

    sequence: float
    once: float


@cache
def kept_by_block(level: str, sizes: GPTSizes) -> Kept:
    """Count on a fake GPU what one more block keeps, with one sequence and with two."""
    one, two = (_kept_bytes(level, sizes, 3, batch) - _kept_bytes(level, sizes, 2, batch) for batch in (1, 2))
    return Kept(two - one, 2 * one - two)


def _kept_bytes(level: str, sizes: GPTSizes, num_layers: int, batch_size: int) -> int:
    """Return the bytes that a forward pass adds to the live ones. The vocabulary is small, since the head does not count."""
    config = sizes.model_copy(update={"num_layers": num_layers, "vocab_size": 256})
    gc.collect()
    with fake_gpu() as device, LiveBytes(see_within=see_within, device_type=DEVICE_TYPE) as live, with_fake_values():
        way = Way(level, level, options=in_fp8(level), savings={"residual_stream": "bf16"})
        model, optimizer = prepare(build_gpt(config, device), way)
        save_memory(model, optimizer, way, device)
        tokens_BT = torch.zeros(batch_size, sizes.max_sequence_length, dtype=torch.int64, device=device)
        assert isinstance(model, TrainedModel)
        before = live.num_bytes
        loss = model.loss({"tokens": tokens_BT, "targets": tokens_BT}).loss
        kept_bytes = live.num_bytes - before
        del loss
    return kept_bytes


@dataclass(frozen=True)
class LargeModel:
    """The bytes that a GPU of the first stage holds of a GPT that GPUs share, and the seconds of a step.

    states: of its blocks, and of the embedding; gradients are whole, since they add up over micro-batches. casts: copies of
    weights in 16 bits, which Octet's wide levels keep from the forward to the backward pass, once. activations: of as many
    micro-batches as there are stages, as 1F1B keeps them.
    """

    level: str
    sequences: int
    states: float
    embedding: float
    casts: float
    activations: float
    step_s: float

    @property
    def held(self) -> float:
        return self.states + self.embedding + self.casts + self.activations


LARGE_LEVELS = ("bf16-amp", "te", "O2", "O3", "O3-split", "O3-split-8bit")


def large_models(sizes: GPTSizes = GPT_175B, layout: Layout = FP8_LM_175B) -> list[LargeModel]:
    """Return a GPT at each level with micro-batches of one sequence and of four."""
    found = []
    stage_layers = sizes.num_layers // layout.pipeline
    for level in LARGE_LEVELS:
        kept = kept_by_block(level, sizes)
        stage, longer = (
            _stage_bytes(sizes.model_copy(update={"num_layers": num_layers}), level, layout.data)
            for num_layers in (stage_layers, 2 * stage_layers)
        )
        states, embedding = (longer - stage) / layout.tensor, (2 * stage - longer) / layout.tensor
        casts, blocks = kept.once * stage_layers / layout.tensor, stage_layers / layout.tensor
        for sequences in (1, 4):
            activations = sequences * layout.pipeline * kept.sequence * blocks
            seconds = large_step_s(sizes, Run(level, 1), layout, sequences)
            found.append(LargeModel(level, sequences, states, embedding, casts, activations, seconds))
    return found


def _stage_bytes(sizes: GPTSizes, level: str, num_ranks: int) -> float:
    """Return what a rank holds under ZeRO 1 with whole gradients, as it does until the last micro-batch."""
    shared, whole = (count(sizes, level, zero_stage, num_ranks, "bf16").held for zero_stage in (1, 0))
    return sum(shared.values()) - shared["gradients"] + whole["gradients"]


def large_model_table(models: Sequence[LargeModel]) -> list[str]:
    """List a GPU's memory and a step's time."""
    first, te = models[0], next(each for each in models if each.level == "te")
    rows = []
    for each in models:
        parts = (each.states, each.embedding, each.casts, each.activations, each.held)
        gigabytes = (f"{num_bytes / 1e9:.1f}" for num_bytes in parts)
        ratios = f"{each.held / first.held - 1:+.0%}", f"{each.step_s:.1f}", f"{each.step_s / te.step_s:.2f}"
        rows.append((each.level, str(each.sequences), *gigabytes, *ratios))
    columns = (
        "level, sequences of a micro-batch, states of blocks (GB of a GPU), of the embedding, weights cast, activations, all"
    )
    return table(f"{columns}, to bf16-amp, step (s), to te at 1", rows)


def figures(models: Sequence[LargeModel]) -> list[Figure]:
    """Return what 4,096 GPUs would gain, and what GPT-175B would hold and take beside the papers' figures."""
    own, base = (step_time(GPT_6_7B, run, 4096) for run in (Run("O2", 1), BASELINES[0]))
    weak = "GPT 6.7 B on 4,096 GPUs, a sequence each, ZeRO 1, O2"
    large = f"GPT-175B on {FP8_LM_175B.num_gpus} GPUs, O2 at"
    by_case = {(each.level, each.sequences): each for each in models}
    one, four, amp, te = (by_case[case] for case in (("O2", 1), ("O2", 4), ("bf16-amp", 1), ("te", 1)))
    memory, time = f"{one.held / amp.held:.2f}", f"{four.step_s / te.step_s:.2f}"
    return [
        Figure(f"scaling, predicted: {weak} / {BASELINES[0].level} in two levels, tokens per second",
               f"{base.total_s / own.total_s:.2f}"),
        Figure(f"scaling, predicted: {weak}, not hidden (% of the step)", f"{own.exposed_s / own.total_s * 100:.0f}"),
        Figure(f"scaling, predicted: {large} 1 sequence / bf16-amp at 1, memory of a GPU", memory, goal=f"<= {PAPER_HELD:.2f}"),
        Figure(f"scaling, predicted: {large} 4 sequences / te at 1, time of a step", time, goal=f"<= {PAPER_S}"),
    ]  # fmt: skip


def report(command: str, models: Sequence[LargeModel]) -> str:
    """Return the whole document."""
    rates = {"NVLink, one direction": NVLINK_BYTES_PER_S, "a port": PORT_BYTES_PER_S, "copies": RATES.copy_bytes_per_s}
    flops = RATES.gemm_flops_per_s | {"attention": ATTENTION_FLOPS_PER_S}
    lines = [
        f"# Many H100s, predicted, {datetime.now(UTC):%Y-%m-%d}",
        f"`{command}`, torch {torch.__version__}, Python {platform.python_version()}. No GPU was used, and no second process.",
        "Bytes are counted by the library's own step on fake tensors, as the first of 8 ranks that torch's fake process group "
        "stands for. Times are computed, every layer multiplying in FP8 where its level does, from these rates, whose sources "
        f"`benchmarks/scaling.py` names. GB/s: {', '.join(f'{name} {rate / 1e9:,.0f}' for name, rate in rates.items())}. "
        f"TFLOP/s: {', '.join(f'{name} {rate / 1e12:,.0f}' for name, rate in flops.items())}. Between nodes, µs: "
        f"{MESSAGE_S * 1e6:.0f} for each peer of an exchange, {HOP_S * 1e6:.0f} for each doubling of the nodes of a gather. "
        f"Bytes of a block's activations for each token and hidden element: {BYTES_PER_ACTIVATION}.",
        "## Bytes of a step, one of 8 ranks: GPT-3 125M",
        *bytes_table(GPT_125M),
        "## The same: GPT 6.7 B",
        *bytes_table(GPT_6_7B),
        f"## Weak scaling: GPT 6.7 B, one sequence of {SEQUENCE_LENGTH} tokens on each GPU",
        *scaling_table(GPT_6_7B),
        f"## GPT-175B on {FP8_LM_175B.num_gpus} GPUs: {FP8_LM_175B} with sequence parallelism and ZeRO 1, "
        f"{FP8_LM_175B.sequences_per_step} sequences a step",
        *large_model_table(models),
        "The first stage, which holds most: with 1F1B the activations of as many micro-batches as there are stages. They are "
        "counted block by block on a fake GPU, with a residual stream in bf16, and none is computed again. `docs/plans.md` has "
        "these and other published runs beside what was published, and why they differ. Not in the sums: NCCL's buffers, "
        "workspaces, the allocator's share, and the logits, which the last stage holds, with one micro-batch's activations.",
    ]
    return "\n".join(line if line.startswith("|") else f"\n{line}\n" for line in lines).strip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the table")
    add_write_option(parser)
    options = parser.parse_args()
    models = large_models()
    text = report("python -m benchmarks.scaling", models)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{datetime.now(UTC):%Y-%m-%d}-scaling.md").write_text(text)
    sys.stdout.write(text)
    if options.write:
        write(options.write, figures(models), "python -m benchmarks.scaling", "no GPU (predicted for H100s)", is_timed=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
