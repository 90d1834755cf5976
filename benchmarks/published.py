"""Predict what others have published: memory, speed and traffic of their runs, beside the same settings here.

    python -m benchmarks.published [--write docs/plans.md]

Nothing runs on a GPU. Memory is planned as `octet plan` does, of a pipeline that of its first rank. A published peak is what
one version of somebody's software reserved; a planned one is what tensors of an eager step hold, without the allocator's and
NCCL's shares. Where a system stores what none of our levels does, the row has the same run in its formats too
(`in_their_formats`), with those shares. Speeds are `benchmarks/scaling.py`'s, or the range of a plan. The table is to be read,
and is no gate.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.networks import build_gpt
from benchmarks.scaling import (
    FP8_LM_175B,
    GPT_6_7B,
    GPT_175B,
    Layout,
    Run,
    kept_by_block,
    large_models,
    large_step_s,
)
from octet.api_schemas import GPTSizes, JobSpec
from octet.api_schemas.models.gpt import gpt_sizes
from octet.api_schemas.plan import CONTEXT_BYTES, TraceRequest
from octet.api_schemas.planned_states import states_of
from octet.api_schemas.resources import PoolConfig
from octet.api_schemas.step_prediction import Exchanged, step_prediction
from octet.client.planner import trace_here
from octet.worker.planning.moments import peak_of, traces_of

OTHERS_NCCL_BYTES = 4_340_000_000
"""NCCL after an all-to-all on 8 H100 whose channels nobody has limited (NCCL issue 1685)."""
GIB, GB = float(1 << 30), 1e9
BEGIN, END = "<!-- benchmarks.published -->\n", "<!-- end -->\n"
LLAMA_3_8B = {"preset": "llama-8b"}
LLAMA_2_7B = {
    **{"family": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_layers": 32, "num_heads": 32},
    **{"num_key_value_heads": 32, "vocab_size": 32000, "max_sequence_length": 4096, "tie_embeddings": False},
}
GPT_7B = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 50304, "max_sequence_length": 2048}
GPT_13B = GPT_7B | {"hidden_size": 5120, "num_layers": 40, "num_heads": 40}
TITAN = "torchtitan, Llama 3 8B, FSDP2, selective checkpointing, bf16"
TITAN_JOB = {"zero_stage": 3, "activation_checkpointing": "selective"}
COAT = "COAT (arXiv 2410.19313), Llama 2 7B, 4 GPUs"
FP8_LM = "FP8-LM (arXiv 2310.18313), table 5"
RESERVED = "published is reserved memory, and theirs recomputes other ops"
TE_COPIES = "Transformer Engine keeps FP8 and bf16 copies; `te` here is its recipe, not its storage"
NEMO = "NVIDIA NeMo 24.07, Megatron Core, DGX H100, FP8"


class Stored(NamedTuple):
    """Bytes of a parameter: weights with their copies, gradients, and what a distributed optimizer divides over its ranks.

    activations: bytes that a block keeps of each token and hidden element; None for as many as at our level.
    """

    weights: float
    gradients: float
    states: float
    activations: int | None = None


MEGATRON = Stored(2, 4, 12)
"""Weights in bf16, gradients in fp32; master weights and both moments in fp32."""
TE_ACTIVATIONS = 2 + 1 + 6 + 2 + 1 + 2 + 1 + 8 + 4
"""Bytes in Transformer Engine 1.1, which MS-AMP pins: each norm's input and output, q, k and v, attention's output, the
projection's input, GELU's input and output; inputs of products in codes (layernorm_linear.py, layernorm_mlp.py, linear.py)."""
TRANSFORMER_ENGINE = Stored(2 + 2, 4, 12, TE_ACTIVATIONS)
"""The same, and E4M3 codes of each weight, once for rows and once for columns, kept over micro-batches."""
MS_AMP = Stored(1 + 1, 1, 2 + 1 + 2, TE_ACTIVATIONS)
"""E4M3 weights, gradients in FP8; master weights and second moments in fp16, first moments in FP8. Its GPTs ran in Transformer
Engine's layers (MS-AMP-Examples, gpt3/pretrain_13b_megatron.sh), which keep the transposed codes (msamp/te: extension.py)."""
OF_LEVEL = {"bf16-amp": MEGATRON, "te": TRANSFORMER_ENGINE, "O3": MS_AMP}


class Published(NamedTuple):
    """A published peak: its unit, the same as a job, why the two differ, and the bytes that the system stores, if not ours."""

    setting: str
    peak: float
    unit: float
    job: JobSpec
    why: str
    stored: Stored | None = None


PARALLELISM = ("zero_stage", "tensor", "sequence", "pipeline", "schedule")


def job_of(model: Any, level: str, workers: int, micro_batch_size: int, sequence_length: int, **options: Any) -> JobSpec:
    """Return a job. options: of training or, by their names, of parallelism and precision."""
    parallelism = {name: options.pop(name) for name in PARALLELISM if name in options}
    replicas = workers // parallelism.get("tensor", 1) // parallelism.get("pipeline", 1)
    samples = micro_batch_size * replicas
    precision = {name: options.pop(name) for name in ("gradient_accumulation",) if name in options}
    if not level.endswith("amp"):
        precision["auto_filter"] = False
    return JobSpec.model_validate(
        {
            "name": "published",
            "model": model,
            "precision": {"level": level, **precision},
            "data": {"source": "tokens", "path": "/data"},
            "training": {
                **{"steps": 1, "micro_batch_size": micro_batch_size, "global_batch_size": samples},
                **{"sequence_length": sequence_length, "residual_stream": "bf16", **options},
            },
            "parallelism": {"wide_communication": "bf16", **parallelism} if workers > 1 else {},
            "resources": {"workers": workers},
        }
    )


def titan(workers: int, micro_batch_size: int, level: str = "bf16-amp") -> JobSpec:
    """Return a job as torchtitan's published runs are set."""
    return job_of(LLAMA_3_8B, level, workers, micro_batch_size, 8192, **TITAN_JOB)


def coat(level: str) -> JobSpec:
    """Return a job as COAT's runs of Llama 2 7B are set, as far as they say."""
    return job_of(LLAMA_2_7B, level, 4, 2, 2048, zero_stage=3)


def fp8_lm(model: Any, level: str, micro_batch_size: int, **options: Any) -> JobSpec:
    """Return a job as the FP8-LM paper's are set: 32 H100, a distributed optimizer."""
    return job_of(model, level, 32, micro_batch_size, 2048, zero_stage=1, **options)


def fp8_lm_175b(level: str, micro_batch_size: int) -> JobSpec:
    """Return a job as the paper's runs of GPT-175B are set: a million tokens a step on 128 H100, gradients in FP8 at O3."""
    layout = FP8_LM_175B
    degrees = {"tensor": layout.tensor, "sequence": True, "pipeline": layout.pipeline, "zero_stage": 1}
    summed = {"gradient_accumulation": "fp8"} if level == "O3" else {}
    model, samples = {"preset": "gpt-175b"}, layout.sequences_per_step
    return job_of(model, level, layout.num_gpus, micro_batch_size, 2048, global_batch_size=samples, **degrees, **summed)


def fp8_lm_row(name: str, peak: float, job: JobSpec, why: str) -> Published:
    """Return a row of the paper's table, with what its system stores."""
    return Published(f"{FP8_LM}: {name}", peak, GB, job, why, OF_LEVEL[job.precision.level])


TENSOR_2: dict[str, Any] = {"tensor": 2, "sequence": True}
LEFT = "what is left: the allocator's share, which plans take at 7 %"
KEPT = "Transformer Engine's layers keep 27 bytes of a token's element in a block; by both published peaks at"
SLOPE, SLOPE_OF_175B = f"{KEPT} 7B it is 35", f"{KEPT} 175B it is 19"
SLOPE_AND_BF16 = "bf16 lacks 6 of the 10 GB, too; 35 bytes of a token's element in a block, as at 7B, would be 3 more"
COPY_FOR_ALL = "predicted has fp32 weights and one copy of them in bf16 for all micro-batches in flight: 11 GB"
LARGEST_BUFFERS = "NCCL's buffers are the largest that were published"
PEAKS: tuple[Published, ...] = (
    Published(
        f"{TITAN}; 8 H100, 1 × 8192, compiled (torchao's docs)", 47.65, GIB, titan(8, 1), f"{RESERVED}; 33.71 on B200, later"
    ),
    Published(
        f"{TITAN}; 8 H100, 2 × 8192, eager", 82.4, GIB, titan(8, 2), f"{RESERVED}; eager keeps more than our option does"
    ),
    Published(f"{TITAN}; 8 H100, 2 × 8192, compiled", 77.0, GIB, titan(8, 2), RESERVED),
    Published(f"{TITAN}; 128 H100, 2 × 8192, eager", 67.0, GIB, titan(128, 2), RESERVED),
    Published(f"{TITAN}; 128 H100, 2 × 8192, compiled", 62.0, GIB, titan(128, 2), RESERVED),
    Published(f"{COAT}, bf16 (2 × 2048 taken)", 55.1, GB, coat("bf16-amp"), "micro-batch not stated"),
    Published(f"{COAT}, Transformer Engine", 51.1, GB, coat("te"), TE_COPIES),
    fp8_lm_row("GPT 7B, micro-batch 2, bf16", 69.6, fp8_lm(GPT_7B, "bf16-amp", 2), LEFT),
    fp8_lm_row("GPT 7B, micro-batch 2, Transformer Engine", 77.3, fp8_lm(GPT_7B, "te", 2), LEFT),
    fp8_lm_row("GPT 7B, micro-batch 2, MS-AMP O3", 49.4, fp8_lm(GPT_7B, "O3", 2), SLOPE),
    fp8_lm_row("GPT 7B, micro-batch 4, MS-AMP O3", 69.3, fp8_lm(GPT_7B, "O3", 4), SLOPE),
    fp8_lm_row("GPT 13B, tensor 2, bf16", 68.2, fp8_lm(GPT_13B, "bf16-amp", 2, **TENSOR_2), LEFT),
    fp8_lm_row("GPT 13B, tensor 2, MS-AMP O3", 48.9, fp8_lm(GPT_13B, "O3", 2, **TENSOR_2), SLOPE_AND_BF16),
    # 66.1 and 40.3 agree with the abstract ("39 % less"); no stored copy of the table was found to check 69.6 and 57.7 against.
    fp8_lm_row(f"GPT 175B, {FP8_LM_175B}, micro-batch 1, bf16", 66.1, fp8_lm_175b("bf16-amp", 1), COPY_FOR_ALL),
    fp8_lm_row(f"GPT 175B, {FP8_LM_175B}, micro-batch 1, Transformer Engine", 69.6, fp8_lm_175b("te", 1), LARGEST_BUFFERS),
    fp8_lm_row(f"GPT 175B, {FP8_LM_175B}, micro-batch 1, MS-AMP O3", 40.3, fp8_lm_175b("O3", 1), LEFT),
    fp8_lm_row(f"GPT 175B, {FP8_LM_175B}, micro-batch 4, MS-AMP O3", 57.7, fp8_lm_175b("O3", 4), SLOPE_OF_175B),
)


class Result(NamedTuple):
    """A row of the table: the figures as texts in one unit. difference: of the last figure there is; None within a range."""

    setting: str
    published: str
    predicted: str
    in_their_formats: str
    difference: float | None
    why: str


def in_their_formats(sizes: GPTSizes, level: str, stored: Stored, layout: Layout, sequences: int) -> float:
    """Return the bytes of a GPU of the first stage in a system's formats, with the context and NCCL's buffers of a plan.

    Embeddings are in Megatron's formats. A pipeline's first stage has no logits.
    """
    stage = sizes.model_copy(update={"num_layers": sizes.num_layers // layout.pipeline})
    num_parameters = build_gpt(stage, torch.device("meta")).num_parameters / layout.tensor
    num_embedded = (sizes.vocab_size + sizes.max_sequence_length) * sizes.hidden_size / layout.tensor

    def bytes_of(formats: Stored) -> float:
        return formats.weights + formats.gradients + formats.states / layout.data

    states = (num_parameters - num_embedded) * bytes_of(stored) + num_embedded * bytes_of(MEGATRON)
    blocks = stage.num_layers * layout.pipeline / layout.tensor
    kept = kept_by_block(level, sizes).sequence
    if stored.activations is not None:
        kept = stored.activations * sizes.max_sequence_length * sizes.hidden_size
    activations = sequences * kept * blocks
    num_logits = sequences * sizes.max_sequence_length * sizes.vocab_size / layout.tensor if layout.pipeline == 1 else 0
    return states + activations + 6 * num_logits + CONTEXT_BYTES + OTHERS_NCCL_BYTES


def layout_of(job: JobSpec) -> Layout:
    """Return the layout of a job with tensor and pipeline ranks at most."""
    tensor, pipeline = job.parallelism.tensor, job.parallelism.pipeline
    return Layout(tensor, pipeline, job.resources.workers // tensor // pipeline, job.training.global_batch_size)


def peaks() -> list[int]:
    """Return the peak of each published setting, as the planner's process traces them. Raises RuntimeError with its reason."""
    requests = [TraceRequest(id=str(index), job=row.job) for index, row in enumerate(PEAKS)]
    found = {}
    for reply in trace_here(requests):
        if reply.peak is None:
            raise RuntimeError(f"{PEAKS[int(reply.id)].setting}: {reply.reason}")
        found[int(reply.id)] = reply.peak.bytes
    return [found[index] for index in range(len(PEAKS))]


def compared(setting: str, published: float, predicted: float, unit: str, why: str, theirs: float | None = None) -> Result:
    """Return the row of two figures in the same unit, or of three: theirs is the one in the system's formats."""
    digits = 0 if published >= 1000 else 3 if published < 1 else 2 if published < 10 and not unit else 1
    texts = [f"{published:,g} {unit}".rstrip(), f"{predicted:,.{digits}f} {unit}".rstrip()]
    texts.append("" if theirs is None else f"{theirs:.1f} {unit}")
    return Result(setting, *texts, (predicted if theirs is None else theirs) / published - 1, why)


def within(setting: str, published: float, ends: tuple[float, float], unit: str, why: str) -> Result:
    """Return the row of a range; the difference is to the end that a figure lies beyond."""
    low, high = ends
    difference = low / published - 1 if published < low else high / published - 1 if published > high else None
    return Result(setting, f"{published:,g} {unit}", f"{low:,.0f} to {high:,.0f} {unit}", "", difference, why)


def memory() -> list[Result]:
    """Return the rows of peaks."""
    units, rows = {GIB: "GiB", GB: "GB"}, []
    for row, found in zip(PEAKS, peaks(), strict=True):
        theirs = None
        if row.stored is not None:
            sizes = row.job.model.sizes
            assert isinstance(sizes, GPTSizes)
            sequences = row.job.training.micro_batch_size
            assert sequences is not None
            theirs = in_their_formats(sizes, row.job.precision.level, row.stored, layout_of(row.job), sequences) / row.unit
        rows.append(compared(row.setting, row.peak, found / row.unit, units[row.unit], row.why, theirs))
    return rows


def closed_forms() -> list[Result]:
    """Return what needs no trace: states alone."""
    eight_bit, wide = (moments(job_of(LLAMA_2_7B, level, 1, 1, 2048)) for level in ("O2", "bf16-amp"))
    of_llama = "FP8-LM, RLHF of LLaMA-7B: optimizer states, FP8 / bf16 (5,669 of 15,116 MB)"
    return [
        compared(f"{COAT}, bf16: optimizer states", 13.1, moments(coat("bf16-amp")) / GB, "GB", "8 bytes a parameter"),
        compared(of_llama, 0.375, eight_bit / wide, "", "embedding and head stay wide here"),
    ]


def moments(job: JobSpec) -> int:
    """Return the bytes of both moments on a rank."""
    held = states_of(job, job.model.sizes).held
    return held["exp_avg"] + held["exp_avg_sq"]


def activations() -> Result:
    """Return what a block keeps in bf16 for each token and hidden element."""
    sizes = GPT_6_7B
    kept = kept_by_block("bf16-amp", sizes).sequence / sizes.max_sequence_length / sizes.hidden_size
    setting = "Megatron's formula (arXiv 2205.05198): bytes that a block keeps for each token and hidden element, no dropout"
    return compared(setting, 32, kept, "bytes", "34, less two masks of dropout")


DAY_2023 = "a prediction has no gaps between launches and full overlap within a step; software of 2023"
IDEAL = "a prediction has no gaps between launches"
PIPELINED = "our te quantizes its fp32 weights in each micro-batch, Transformer Engine once a step"
SPEEDS = (
    (f"{NEMO}: GPT3-5B, 64 GPUs", 23_574, gpt_sizes(4096, 24, 32, 51200, 2048), Layout(1, 1, 64, 2048), 4, IDEAL),
    (f"{NEMO}: GPT3-20B, tensor 2, 64 GPUs", 5_894, gpt_sizes(6144, 44, 48, 51200, 2048), Layout(2, 1, 32, 256), 2, IDEAL),
    (f"{NEMO}: GPT3-175B, tensor 4, pipeline 8 in 6 chunks, 128 GPUs", 745, GPT_175B, Layout(4, 8, 4, 256, 6), 1, PIPELINED),
    (f"{NEMO}: GPT3-175B, tensor 4, pipeline 8 in 6 chunks, 512 GPUs", 832, GPT_175B, Layout(4, 8, 16, 2048, 6), 2, PIPELINED),
)
"""Setting, published tokens per second of a GPU, sizes, layout, sequences of a micro-batch, and why they differ."""
FP8_LM_SPEEDS = (
    ("bf16", "bf16-amp", 2, 159),
    ("Transformer Engine", "te", 2, 225),
    ("MS-AMP O3", "O3", 2, 220),
    ("MS-AMP O3", "O3", 4, 231),
)
"""GPT 7B in the FP8-LM paper: setting, level, sequences of a micro-batch, samples per second of 32 GPUs."""
TITAN_SPEEDS = ((8, "bf16-amp", 6_667), (128, "bf16-amp", 6_514), (8, "te", 8_532), (128, "te", 8_380))
"""torchtitan's 2 × 8192, compiled: GPUs, level (float8 is Octet's te by its products), tokens per second of a GPU."""


def speeds() -> list[Result]:
    """Return the rows of speed."""
    rows = []
    for setting, published, sizes, layout, sequences, why in SPEEDS:
        seconds = large_step_s(sizes, Run("te", 1), layout, sequences, hides_wire=True)
        rate = layout.sequences_per_step * sizes.max_sequence_length / layout.num_gpus / seconds
        rows.append(compared(setting, published, rate, "tokens/s of a GPU", why))
    sizes, layout = GPT_6_7B, Layout(1, 1, 32, 2048)
    for setting, level, sequences, published in FP8_LM_SPEEDS:
        rate = layout.sequences_per_step / large_step_s(sizes, Run(level, 1), layout, sequences, hides_wire=True)
        name = f"{FP8_LM}: GPT 7B, micro-batch {sequences}, {setting}"
        rows.append(compared(name, published, rate, "samples/s", DAY_2023))
    step_s = {(each.level, each.sequences): each.step_s for each in large_models()}
    for setting, level, published in (("bf16", "bf16-amp", 1.75), ("Transformer Engine", "te", 1.37)):
        name = f"{FP8_LM}: GPT 175B, speed of MS-AMP O3 at micro-batch 4 / {setting} at 1"
        rows.append(compared(name, published, step_s[level, 1] / step_s["O3", 4], "", DAY_2023))
    return rows + nemo_speeds() + [titan_speed(*row) for row in TITAN_SPEEDS]


def titan_speed(workers: int, level: str, published: float) -> Result:
    """Return a row of torchtitan's speeds beside the range that a plan has for a pool of H100s."""
    name = f"{TITAN.replace('bf16', 'bf16' if level == 'bf16-amp' else 'float8')}; {workers} H100 of 500 W, 2 × 8192, compiled"
    return planned_speed(name, published, titan(workers, 2, level), None, "a plan's range; the cards have 500 W and 2.4 TB/s")


def nemo_speeds() -> list[Result]:
    """Return NeMo's rows beside the ranges of plans, by the bytes that traces count. A pipeline's may take two minutes."""
    rows = []
    for name, published, sizes, layout, sequences, _ in SPEEDS:
        job = nemo(sizes, layout, sequences)
        exchanged = peak_of(job, [traces_of(job, sequences, layout.pipeline // 2)]).exchanged
        rows.append(planned_speed(name, published, job, exchanged, "a plan's range; of a pipeline its rank in the middle"))
    return rows


def nemo(sizes: GPTSizes, layout: Layout, sequences: int) -> JobSpec:
    """Return a run of NeMo as a job. Our pipelines have two chunks at most."""
    model = {"family": "gpt"} | {name: getattr(sizes, name) for name in GPT_7B}
    schedule = {"pipeline": layout.pipeline, "schedule": "interleaved"} if layout.pipeline > 1 else {}
    layers = {"tensor": layout.tensor, "sequence": True} if layout.tensor > 1 else {}
    samples = layout.sequences_per_step
    return job_of(
        model,
        "te",
        layout.num_gpus,
        sequences,
        sizes.max_sequence_length,
        global_batch_size=samples,
        zero_stage=1,
        **schedule,
        **layers,
    )


def planned_speed(name: str, published: float, job: JobSpec, exchanged: Exchanged | None, why: str) -> Result:
    """Return a row of a speed beside the range that a plan has for a pool of H100s."""
    workers = job.resources.workers
    pool = PoolConfig(name="gpu", node_label=("octet/pool", "gpu"), slots=workers, accelerator="cuda", device="H100 SXM5")
    found = step_prediction(job, job.model.sizes, states_of(job, job.model.sizes), pool, exchanged)
    assert found is not None
    tokens = job.training.global_batch_size * job.tokens_per_sample / workers
    return within(name, published, (tokens / found.most_s, tokens / found.least_s), "tokens/s of a GPU", why)


def results() -> list[Result]:
    """Return every row."""
    return [*memory(), *closed_forms(), activations(), *speeds()]


def table(rows: Sequence[Result]) -> str:
    """Format the rows in Markdown."""
    lines = [
        "| setting | published | predicted | in their formats | difference | why |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        difference = "within" if row.difference is None else f"{row.difference:+.1%}"
        lines.append(
            f"| {row.setting} | {row.published} | {row.predicted} | {row.in_their_formats} | {difference} | {row.why} |"
        )
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Replace the table between its two marks in a page. Raises ValueError for a page without them."""
    page = path.read_text()
    if BEGIN not in page or END not in page:
        raise ValueError(f"{path} has no {BEGIN.strip()} and {END.strip()}; allowed: a page with both. Restore them from git.")
    path.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _found: f"{BEGIN}\n{text}\n{END}", page, flags=re.DOTALL))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it into a page if one is named."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table of this page")
    options = parser.parse_args(arguments)
    text = table(results())
    sys.stdout.write(text)
    if options.write:
        write(options.write, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
