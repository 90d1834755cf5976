"""Predict what others have published: memory of their runs beside the plans that `octet plan` makes of the same settings.

    python -m benchmarks.published [--write docs/plans.md]

Nothing runs on a GPU. A published peak is what one version of somebody's software reserved; a planned one is what tensors of an
eager step hold, without the allocator's and NCCL's shares. So the table is to be read, and is no gate: where a system stores
something else than any of our levels does, the row says what.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octet.api_schemas import JobSpec
from octet.api_schemas.plan import TraceReply, TraceRequest
from octet.api_schemas.planned_states import states_of

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
EMBEDDING = f"{RESERVED}; our ZeRO 3 keeps embedding and head whole on each rank"
MEGATRON = "Megatron 2023: bf16 weights beside fp32 gradients, dropout masks, NCCL's buffers, reserved memory"
TE_COPIES = "Transformer Engine keeps FP8 and bf16 copies; `te` here is its recipe, not its storage"
MS_AMP = "their fixed part is 4.4 bytes a parameter, not the 2.2 that their formats need"


def job_of(model: Any, level: str, workers: int, micro_batch_size: int, sequence_length: int, **options: Any) -> JobSpec:
    """Return a job. options: of training or, by their names, of parallelism."""
    parallelism = {name: options.pop(name) for name in ("zero_stage", "tensor", "sequence") if name in options}
    samples = micro_batch_size * (workers // parallelism.get("tensor", 1))
    filters = {} if level.endswith("amp") else {"auto_filter": False}
    return JobSpec.model_validate(
        {
            "name": "published",
            "model": model,
            "precision": {"level": level, **filters},
            "data": {"source": "tokens", "path": "/data"},
            "training": {
                **{"steps": 1, "micro_batch_size": micro_batch_size, "global_batch_size": samples},
                **{"sequence_length": sequence_length, "residual_stream": "bf16", **options},
            },
            "parallelism": {"wide_communication": "bf16", **parallelism} if workers > 1 else {},
            "resources": {"workers": workers},
        }
    )


def titan(workers: int, micro_batch_size: int) -> JobSpec:
    """Return a job as torchtitan's published runs are set."""
    return job_of(LLAMA_3_8B, "bf16-amp", workers, micro_batch_size, 8192, **TITAN_JOB)


def coat(level: str) -> JobSpec:
    """Return a job as COAT's runs of Llama 2 7B are set, as far as they say."""
    return job_of(LLAMA_2_7B, level, 4, 2, 2048, zero_stage=3)


def fp8_lm(model: Any, level: str, micro_batch_size: int, **options: Any) -> JobSpec:
    """Return a job as the FP8-LM paper's are set: 32 H100, a distributed optimizer."""
    return job_of(model, level, 32, micro_batch_size, 2048, zero_stage=1, **options)


PEAKS: tuple[tuple[str, float, float, JobSpec, str], ...] = (
    (f"{TITAN}; 8 H100, 1 × 8192, compiled (torchao's docs)", 47.65, GIB, titan(8, 1), f"{RESERVED}; 33.71 on B200, later"),
    (f"{TITAN}; 8 H100, 2 × 8192, eager", 82.4, GIB, titan(8, 2), f"{RESERVED}; eager keeps more than our option does"),
    (f"{TITAN}; 8 H100, 2 × 8192, compiled", 77.0, GIB, titan(8, 2), RESERVED),
    (f"{TITAN}; 128 H100, 2 × 8192, eager", 67.0, GIB, titan(128, 2), EMBEDDING),
    (f"{TITAN}; 128 H100, 2 × 8192, compiled", 62.0, GIB, titan(128, 2), f"{EMBEDDING}: both cancel"),
    (f"{COAT}, bf16 (2 × 2048 taken)", 55.1, GB, coat("bf16-amp"), "micro-batch not stated"),
    (f"{COAT}, Transformer Engine", 51.1, GB, coat("te"), TE_COPIES),
    (f"{FP8_LM}: GPT 7B, micro-batch 2, bf16", 69.6, GB, fp8_lm(GPT_7B, "bf16-amp", 2), MEGATRON),
    (f"{FP8_LM}: GPT 7B, micro-batch 2, Transformer Engine", 77.3, GB, fp8_lm(GPT_7B, "te", 2), TE_COPIES),
    (f"{FP8_LM}: GPT 7B, micro-batch 2, MS-AMP O3", 49.4, GB, fp8_lm(GPT_7B, "O3", 2), MS_AMP),
    (f"{FP8_LM}: GPT 7B, micro-batch 4, MS-AMP O3", 69.3, GB, fp8_lm(GPT_7B, "O3", 4), MS_AMP),
    (f"{FP8_LM}: GPT 13B, tensor 2, bf16", 68.2, GB, fp8_lm(GPT_13B, "bf16-amp", 2, tensor=2, sequence=True), MEGATRON),
    (f"{FP8_LM}: GPT 13B, tensor 2, MS-AMP O3", 48.9, GB, fp8_lm(GPT_13B, "O3", 2, tensor=2, sequence=True), MS_AMP),
)
"""Setting, published peak, its unit, the same as a job, and why the two differ."""


class Result(NamedTuple):
    """A row of the table: the figures as texts in one unit."""

    setting: str
    published: str
    predicted: str
    difference: float
    why: str


def peaks() -> list[int]:
    """Return the peak of each published setting, as the planner's process traces them. Raises RuntimeError with its reason."""
    requests = [TraceRequest(id=str(index), job=job) for index, (*_, job, _why) in enumerate(PEAKS)]
    lines = "".join(f"{request.model_dump_json()}\n" for request in requests)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "octet.worker.planning")
    done = subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        reply = TraceReply.model_validate_json(line)
        if reply.peak is None:
            raise RuntimeError(f"{PEAKS[int(reply.id)][0]}: {reply.reason}")
        found[int(reply.id)] = reply.peak.bytes
    return [found[index] for index in range(len(PEAKS))]


def compared(setting: str, published: float, predicted: float, unit: str, why: str) -> Result:
    """Return the row of two figures in the same unit."""
    texts = (f"{number} {unit}".rstrip() for number in (f"{published:g}", f"{predicted:.{3 if published < 1 else 1}f}"))
    return Result(setting, *texts, predicted / published - 1, why)


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


def results() -> list[Result]:
    """Return every row."""
    units = {GIB: "GiB", GB: "GB"}
    rows = [
        compared(setting, published, found / unit, units[unit], why)
        for (setting, published, unit, _, why), found in zip(PEAKS, peaks(), strict=True)
    ]
    return rows + closed_forms()


def table(rows: Sequence[Result]) -> str:
    """Format the rows in Markdown."""
    lines = ["| setting | published | planned | difference | why |", "| --- | ---: | ---: | ---: | --- |"]
    lines += [f"| {row.setting} | {row.published} | {row.predicted} | {row.difference:+.1%} | {row.why} |" for row in rows]
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
