"""Record what runs produce: `python -m tests.golden.record` writes golden.json.

It has losses, states and the parts of a checkpoint after 20 steps, for each level and each kind of recipe on one rank, for
each level on two, and hashes of what quantizers and the optimizer store. A change of golden.json is a change of the
numbers: give the reason in the commit.
"""

import hashlib
import json
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas import CheckpointReport, JobSpec, StepReport
from octet.api_schemas.levels import LEVELS
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.kernels import gradient_reference, reference
from octet.worker.kernels.scales import ScaledCodes, ScaleKind
from octet.worker.mesh import Mesh
from octet.worker.optim import Hyperparameters, LowBitAdamW
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder

GOLDEN = Path(__file__).with_name("golden.json")
E4M3, E5M2, FP16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16
RECORDED_KINDS = (ScaleKind.TENSOR, ScaleKind.ROW, ScaleKind.BLOCK_1X128, ScaleKind.BLOCK_128X128)

RUNS: dict[str, dict[str, Any]] = {name: {"level": name} for name in LEVELS} | {
    "te, window of 4": {"level": "te", "recipe": {"scaling": "delayed", "amax_history_length": 4}},
    "O2, row": {"level": "O2", "recipe": {"granularity": "row"}},
    "O2, block": {"level": "O2", "recipe": {"granularity": "block"}},
    "O3, block, hybrid": {"level": "O3", "recipe": {"granularity": "block", "format": "HYBRID"}},
    "O3-split, grad_weight in bf16": {"level": "O3-split", "recipe": {"high_precision_gemms": ["grad_weight"]}},
    "O1, fp32 accumulation": {"level": "O1", "gradient_accumulation": "fp32"},
}


def document(precision: dict[str, Any], corpus: Path, workers: int) -> dict[str, Any]:
    """Return the job spec of a golden run."""
    return {
        "name": "golden",
        "model": {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 64},
        "precision": {"statistics_every": 5, **precision} if _samples(precision) else precision,
        "data": {"path": str(corpus)},
        "training": {
            "steps": 20,
            "global_batch_size": 8,
            "micro_batch_size": 4 // workers,
            "sequence_length": 32,
            "optimizer": {"learning_rate": 3e-3},
            "schedule": {"warmup_steps": 4},
            "eval_batches": 1,
            "seed": 1,
        },
        "resources": {"workers": workers},
    }


def _samples(precision: dict[str, Any]) -> bool:
    return LEVELS[precision["level"]].has_own_fp8


def machine() -> str:
    """Hash some arithmetic: on other processors, matrix products and exponentials may differ in their last bits."""
    x = uneven(96, 64)
    results = (x @ x.t(), functional.gelu(x, approximate="tanh"), x.softmax(-1), functional.layer_norm(x, (64,)), x.exp())
    return digest(list(results))


def train(name: str, env: RankEnv, corpus: Path, folder: Path) -> dict[str, Any]:
    """Train a golden job on one rank and return its results."""
    torch.set_num_threads(1)
    config = resolve(JobSpec.model_validate(document(RUNS[name], corpus, env.world_size)), env)
    recorder = Recorder()
    job_dir = folder / str(env.world_size) / name.replace(" ", "_")
    with Mesh(env, torch.device("cpu")) as mesh:
        trainer = Trainer(config, mesh, recorder, job_dir)
        summary = trainer.run()
    state = digest({"model": exact_state_dict(trainer.model), "optimizer": trainer.optimizer.state_dict()})
    result: dict[str, Any] = {"losses": [report.loss for report in recorder.of(StepReport)], "state": state}
    result |= {"evaluation_loss": summary.evaluation_loss, "memory_bytes": summary.memory_bytes}
    if env.world_size == 1:
        (saved,) = recorder.of(CheckpointReport)
        result["checkpoint"] = parts_of(job_dir / "checkpoints" / saved.name)
    return result


def train_on_rank(rank: int, ports: dict[str, int], corpus: str, folder: str) -> None:
    """Run golden jobs as one of two ranks. ports: port of each job's rendezvous, by run."""
    envs = {name: RankEnv(rank=rank, world_size=2, master_port=port) for name, port in ports.items()}
    results = {name: train(name, env, Path(corpus), Path(folder)) for name, env in envs.items()}
    Path(folder, f"rank{rank}of2.json").write_text(json.dumps(results))


def train_on_two_ranks(corpus: Path, folder: Path, levels: Iterable[str] = LEVELS) -> list[dict[str, dict[str, Any]]]:
    """Return the results of each rank, by run. Two processes do all runs, since starting them takes longer than a run."""
    run_ranks(train_on_rank, ({name: free_port() for name in levels}, str(corpus), str(folder)), 2)
    return [json.loads((folder / f"rank{rank}of2.json").read_text()) for rank in range(2)]


def parts_of(checkpoint: Path) -> dict[str, str]:
    """Return dtype and shape of the tensors in a checkpoint, by name."""
    with safe_open(checkpoint / "tensors.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        slices = {name: file.get_slice(name) for name in sorted(file.keys())}
        return {name: f"{part.get_dtype()} {part.get_shape()}" for name, part in slices.items()}


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Numbers from Python's own generator; each run of 64 has its own magnitude, 2^-12 to 2^6."""
    numbers, count = random.Random(seed), torch.Size(shape).numel()
    magnitudes = [2.0 ** int(numbers.random() * 19 - 12) for _ in range(count // 64 + 1)]
    return torch.tensor([(2 * numbers.random() - 1) * magnitudes[index // 64] for index in range(count)]).view(shape)


def hard_matrix() -> Tensor:
    """Return a matrix, 257 x 260, with tiles of zeros, one huge element and three that are not finite."""
    x = uneven(257, 260)
    x[:130, :130] = 0
    x[3, 140] = torch.finfo(torch.float32).max
    x[128, 5], x[256, 200], x[256, 131] = torch.nan, torch.inf, -torch.inf
    return x


def quantizer_hashes(kernels: Any = reference, of_gradients: Any = gradient_reference) -> dict[str, str]:
    """Hash codes and scales of each quantizer, for each kind of scale and format.

    kernels, of_gradients: the modules that compute them.
    """
    found: dict[str, str] = {}
    for label, x in (("uneven", uneven(130, 257)), ("hard", hard_matrix())):
        for kind in RECORDED_KINDS:
            for dtype in (E4M3, E5M2, FP16):
                name = f"{label}, {kind.value}, {str(dtype).removeprefix('torch.')}"
                codes, dequant_scale = kernels.quantize(x, dtype, kind, 0, None)
                found[f"quantize, {name}"] = digest([codes, dequant_scale])
                values = kernels.dequantize(ScaledCodes(codes, dequant_scale, kind), torch.float32)
                found[f"dequantize, {name}"] = digest([values])
                if dtype != FP16:
                    parts = kernels.quantize_operand(x, dtype, kind, 1, "both")
                    found[f"quantize_operand, {name}"] = digest(list(parts))
        window = (torch.tensor(3.0), torch.tensor(False))
        found[f"delayed, {label}"] = digest(list(kernels.quantize_operand(x, E4M3, ScaleKind.TENSOR, 0, "both", *window)))
    codes, dequant_scale = kernels.quantize(uneven(65, 128), E4M3, ScaleKind.TENSOR, 0, None)
    of_gradients.accumulate_(codes, dequant_scale, uneven(65, 128, seed=1), 0.5, (7, 3, 11))
    found["accumulate_"] = digest([codes, dequant_scale])
    shards = [kernels.quantize(uneven(4160, seed=seed), E4M3, ScaleKind.TENSOR, 0, None) for seed in range(3)]
    mean = of_gradients.mean_of_shards(torch.stack([codes for codes, _ in shards]), torch.stack([scale for _, scale in shards]))
    found["mean_of_shards"] = digest(list(mean))
    return found


def optimizer_hashes(*, fused: bool = False) -> dict[str, str]:
    """Hash the tensors after three optimizer steps, for each level that stores less than fp32."""
    from octet.worker.fp8.weight import Float8Weight
    from octet.worker.fp8.weights import encode_weight

    found = {}
    for name, row in LEVELS.items():
        if row.weight == "fp32":
            continue
        values = uneven(48, 129)
        stored = encode_weight(values, row)
        assert stored is not None
        weight = Float8Weight(*stored)
        if row.master_weight == "fp16+scale":
            weight.state.wide, weight.state.is_assigned = values, True
        parameter = nn.Parameter(weight)
        options = Hyperparameters(lr=1e-2, exp_avg_codec=row.exp_avg, exp_avg_sq_codec=row.exp_avg_sq)
        optimizer = LowBitAdamW([parameter], options, seed=5, fused=fused)
        for step in range(3):
            parameter.grad = Float8Gradient.quantize(uneven(48, 129, seed=10 + step), RoundingPosition(0, 0))
            optimizer.step()
        held = [weight.codes, weight.dequant_scale, weight.values_amax, weight.residual]
        state = {key: part for key, part in optimizer.state[parameter].items() if key != "step"}
        found[name] = digest([*(part for part in held if part is not None), state])
    return found


def digest(value: Any) -> str:
    """Hash all tensors in nested dicts and lists to one value. All NaNs count as equal."""
    found = hashlib.sha256()
    entries = sorted(value.items(), key=lambda item: str(item[0])) if isinstance(value, dict) else enumerate(value)
    for name, part in entries:
        if isinstance(part, dict | list):
            found.update(f"{name}{digest(part)}".encode())
        elif isinstance(part, Tensor):
            found.update(f"{name}{part.dtype}{tuple(part.shape)}".encode())
            part = part.detach().contiguous().reshape(-1)
            if part.is_floating_point() and part.itemsize > 1:
                part = part.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)
            found.update(part.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder / "corpus")
        alone = {run: train(run, RankEnv(), corpus, folder) for run in RUNS}
        trained = {"rank0of1": alone, "rank0of2": train_on_two_ranks(corpus, folder)[0]}
    golden = {"machine": machine(), "trained": trained, "quantizers": quantizer_hashes(), "optimizer": optimizer_hashes()}
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
