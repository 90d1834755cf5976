"""Trace steps and print what was found, as a process of its own: the fake device stays registered."""

import json
import sys
from typing import Any
from unittest import mock

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from octet.api_schemas import JobSpec
from octet.api_schemas.peak import PEAK_CLASSES
from octet.api_schemas.plan import PlanRequest, TraceReply, TraceRequest, candidates, rows_of, sizes_with, trace_key
from octet.api_schemas.planned_states import states_of_rank
from octet.api_schemas.preset_peaks import preset_job
from octet.worker.planning import stages
from octet.worker.planning import trace as trace_module
from octet.worker.planning.fakes import Fakes
from octet.worker.planning.moments import counts, depth_of, extrapolate, peak_of, traces_of
from octet.worker.planning.presets import peak_of_preset
from octet.worker.planning.trace import find_network, trace

NUM_BLOCKS = 6
GPT = {"hidden_size": 2048, "num_layers": NUM_BLOCKS, "num_heads": 4, "vocab_size": 640, "max_sequence_length": 64}
LLAMA = GPT | {"family": "llama", "num_key_value_heads": 2, "intermediate_size": 5632}
SAVING = {"fused_loss": True, "saved_activations": "fp8", "gradient_release": True, "gradient_clip": None}
RESIDUAL = {"residual_stream": "bf16"}
ALL_FP8 = {"auto_filter": False}
IMAGES = {"image_size": 32, "patch_size": 4, "num_channels": 3, "num_classes": 16}
VIT = {
    **{"hidden_size": 1024, "num_hidden_layers": NUM_BLOCKS, "num_attention_heads": 16, "intermediate_size": 4096},
    **{"image_size": 32, "patch_size": 4, "num_labels": 16},
}
QWEN3 = {
    "family": "huggingface",
    "architecture": "qwen3",
    "config": {
        **{
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        **{"num_hidden_layers": NUM_BLOCKS, "vocab_size": 640, "max_position_embeddings": 64},
    },
}
MIXTURE = {
    "family": "huggingface",
    "architecture": "qwen3_moe",
    "config": {
        **{"hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 1024, "num_experts": 8},
        **{"num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
        **{"num_hidden_layers": NUM_BLOCKS, "vocab_size": 640, "max_position_embeddings": 64},
    },
}
IN_STAGES = {
    **{"model": GPT | {"num_layers": 16}, "workers": 3, "parallelism": {"pipeline": 3}},
    "training": {"micro_batch_size": 1, "global_batch_size": 8},
}
"""Ranks with 5, 5 and 6 blocks, and more micro-batches than are traced."""
CASES: dict[str, dict[str, Any]] = {
    **{f"gpt {level}": {"level": level} for level in ("fp32", "fp16-amp", "bf16-amp", "O1", "O2", "O3-split-8bit")},
    **{f"llama {level}": {"model": LLAMA, "level": level} for level in ("te", "O2-8bit", "O3", "O3-split")},
    "llama fp32": {"model": LLAMA, "level": "fp32"},
    "llama ao": {"model": LLAMA, "level": "ao"},
    **{f"mixture {level}": {"model": MIXTURE, "level": level} for level in ("fp32", "bf16-amp", "O2", "O3-split-8bit")},
    "accumulation": {"training": {"micro_batch_size": 1, "global_batch_size": 8}},
    "checkpointing": {"model": LLAMA, "training": {"activation_checkpointing": "full"}},
    "muon": {"model": LLAMA, "training": {"optimizer": {"name": "muon"}}},
    "muon O3": {"model": LLAMA, "level": "O3", "training": {"optimizer": {"name": "muon"}}},
    "muon O3-split": {"model": LLAMA, "level": "O3-split", "training": {"optimizer": {"name": "muon"}}},
    "muon, ZeRO 1": {"workers": 4, "training": {"optimizer": {"name": "muon"}}, "parallelism": {"zero_stage": 1}},
    "saving": {"model": LLAMA, "training": SAVING},
    "ZeRO 1": {"level": "O3", "workers": 4, "parallelism": {"zero_stage": 1}},
    "ZeRO 2": {"workers": 4, "parallelism": {"zero_stage": 2}},
    "ZeRO 3": {"model": LLAMA, "workers": 4, "parallelism": {"zero_stage": 3}},
    "context": {"model": LLAMA, "workers": 2, "parallelism": {"context": 2}},
    "context, ZeRO 1": {"workers": 4, "parallelism": {"context": 2, "zero_stage": 1}},
    **{f"pipeline, rank {rank}": IN_STAGES | {"pipeline_rank": rank} for rank in range(3)},
    **{f"pipeline in bf16, rank {rank}": IN_STAGES | {"pipeline_rank": rank, "level": "bf16-amp"} for rank in range(3)},
    "pipeline, residual stream in bf16": IN_STAGES | {"pipeline_rank": 1, "training": IN_STAGES["training"] | RESIDUAL},
    "roberta": {"model": GPT | {"family": "roberta", "num_heads": 16}},
    "deit": {"model": IMAGES | {"family": "deit", "hidden_size": 1024, "num_layers": NUM_BLOCKS, "num_heads": 16}},
    "swin": {
        "model": IMAGES | {"family": "swin", "embed_dim": 128, "depths": [2, 2], "num_heads": [4, 8], "window_size": 4},
        "level": "bf16-amp",
    },
    "vit of transformers": {
        "model": {"family": "huggingface", "architecture": "vit", "config": VIT},
        "level": "O3-split",
    },
    **{f"transformers {level}": {"model": QWEN3, "level": level} for level in ("bf16-amp", "O2")},
    "transformers, ZeRO 3": {"model": QWEN3, "workers": 2, "parallelism": {"zero_stage": 3}},
    "transformers, tensor": {"model": QWEN3, "workers": 2, "parallelism": {"tensor": 2, "sequence": True}},
    "pipeline, interleaved": {
        **{"model": LLAMA | {"num_layers": 24}, "workers": 16, "training": {"micro_batch_size": 1, "global_batch_size": 16}},
        "parallelism": {"pipeline": 4, "schedule": "interleaved", "tensor": 2, "zero_stage": 1, "sequence": True},
        "pipeline_rank": 1,
    },
    "tensor": {"model": LLAMA, "workers": 2, "parallelism": {"tensor": 2, "sequence": True}},
}


def spec_of(model: Any = GPT, level: str = "O2", workers: int = 1, training: Any = None, parallelism: Any = None) -> JobSpec:
    filters = ALL_FP8 if level[0] == "O" or level == "te" else {}
    is_vision = model.get("family") in ("deit", "swin") or model.get("architecture") == "vit"
    defaults = {"steps": 1, "global_batch_size": 2 * workers, "compile": "off"} | ({} if is_vision else {"sequence_length": 64})
    document = {
        "name": "trace",
        "model": model,
        "precision": {"level": level, **filters},
        "data": {"source": "images", "path": "/data.npz"} if is_vision else {"source": "tokens", "path": "/data"},
        "training": defaults | (training or {}),
        "parallelism": parallelism or {},
        "resources": {"workers": workers},
    }
    return JobSpec.model_validate(document)


def found(pipeline_rank: int = 0, **case: Any) -> dict[str, Any]:
    """Return the peak and the states, extrapolated and with all blocks, and the states in closed form."""
    spec = spec_of(**case)
    _, (few, _) = counts(spec)
    network = find_network(spec, None)
    tracing = traces_of(spec, few, pipeline_rank, None, network)
    moments = extrapolate([tracing.traces], tracing.blocks, tracing.depth)
    depth = None if network else depth_of(spec, pipeline_rank)
    with mock.patch.object(stages, "shortened", _whole), mock.patch.object(stages, "composed", lambda phases, *_: phases):
        whole = trace(spec, depth, few, pipeline_rank)
    sizes = sizes_with(spec, network and network.shapes)
    whole_peak = max((moment for phase in whole.phases for moment in phase), key=lambda moment: moment.num_bytes)
    return {
        "sent": moments.sent,
        "whole_sent": whole.sent,
        "by_class": moments.by_class,
        "whole_by_class": dict(zip(PEAK_CLASSES, whole_peak.by_class, strict=True)),
        "peak": max(first for first, _ in moments.moments),
        "whole_peak": whole_peak.num_bytes,
        "before": (moments.before, whole.num_bytes_before),
        "held": moments.held,
        "whole_held": whole.held,
        "planned": states_of_rank(spec, sizes, pipeline_rank).held,
        "num_parameters": len(list(sizes.parameters() or ())),
    }


def shared(name: str) -> dict[str, dict[str, Any]]:
    """Return each level's row by its own trace, and by that of the first level with the same passes."""
    case = {key: value for key, value in CASES[name].items() if key != "level"}
    rank = case.pop("pipeline_rank", 0)
    firsts: dict[str, TraceReply] = {}
    results = {}
    for level in ("O1", "O2", "O2-8bit", "O3", "O3-split", "O3-split-8bit"):
        spec = spec_of(level=level, **case)
        network = find_network(spec, None)
        _, (few, _) = counts(spec)
        peak = peak_of(spec, [traces_of(spec, few, rank, None, network)])
        own = TraceReply(id=f"0.{rank}", peak=peak, network=network and network.shapes)
        replies = own, firsts.setdefault(trace_key(TraceRequest(id="0.0", job=spec)), own)
        rows = [row for reply in replies for row in rows_of(candidates(PlanRequest(job=spec, levels=(level,))), [], [reply])]
        own_row, shared_row = (row.model_dump(include={"peak_bytes", "peak_by_class", "states_agree"}) for row in rows)
        num_parameters = len(list(sizes_with(spec, own.network).parameters() or ()))
        results[level] = {"own": own_row, "shared": shared_row, "num_parameters": num_parameters}
    return results


def _whole(spec: JobSpec, pipeline_rank: int) -> tuple[JobSpec, int, int]:
    """Trace every micro-batch of a pipeline, on as many ranks as it has."""
    return spec, pipeline_rank, spec.batch.num_micro_batches


def wider() -> dict[str, Any]:
    """Return the peak at four times the micro-batch, by its lines and by tracing it."""
    spec = spec_of(LLAMA)
    _, sequences = counts(spec)
    peak = peak_of(spec, [traces_of(spec, number) for number in sequences])
    by_lines = max(line.base + 4 * line.growth for line in peak.by_micro_batch)
    moments = [moment for phase in trace(spec, NUM_BLOCKS, 8).phases for moment in phase]
    return {"peak": by_lines, "whole_peak": max(moment.num_bytes for moment in moments)}


def of_preset() -> dict[str, Any]:
    """Return the peak of a preset's job with four times the tokens in shorter sequences, as shipped and as traced."""
    document = preset_job("gpt-1.3b", "O2").model_dump(mode="json", exclude_unset=True)
    document["training"] |= {"sequence_length": 1024, "global_batch_size": 32}
    spec = JobSpec.model_validate(document)
    [shipped] = rows_of(candidates(PlanRequest(job=spec, levels=("O2",))), [], [])
    traced = peak_of(spec, [traces_of(spec, number) for number in counts(spec)[1]])
    return {"shipped": shipped.peak_bytes, "traced": traced.bytes}


def by_torch() -> dict[str, tuple[bool, int]]:
    """Return by case whether moments are those of torch's own fake tensors, and their number."""

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeTensorMode.__torch_dispatch__(mode, func, types, args, kwargs or {})

    results = {}
    for name in ("gpt bf16-amp", "muon", "saving", "ZeRO 3", "mixture O2", "swin", "llama ao", "pipeline, rank 1"):
        case = dict(CASES[name])
        rank = case.pop("pipeline_rank", 0)
        spec = spec_of(**case)
        (few, _), (size, _) = counts(spec)
        num_blocks = None if name == "swin" else few
        own = trace(spec, num_blocks, size, rank)
        with mock.patch.object(Fakes, "__torch_dispatch__", dispatch):
            results[name] = (trace(spec, num_blocks, size, rank) == own, sum(map(len, own.phases)))
    return results


def packed(model: dict[str, Any]) -> dict[str, Any]:
    """Return by whether documents share rows: the peak, ops of attention, and storages of T × T elements."""
    results: dict[str, Any] = {}
    sizes = model | {"num_heads": 16, "max_sequence_length": 1024}
    spec = spec_of(sizes, training={"sequence_length": 1024, "micro_batch_size": 1})
    for data in ({"source": "tokens", "path": "/data"}, {"source": "text", "path": "/data", "packing": True}):
        document = spec.model_dump(mode="json", exclude_unset=True) | {"data": data}
        squares: list[str] = []

        class Curve(trace_module.Curve):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                made = super().__torch_dispatch__(func, types, args, kwargs)
                of_rows = [part for part in tree_leaves(made) if isinstance(part, Tensor) and part.shape[-2:] == (1024, 1024)]
                squares.extend(str(func) for _ in of_rows)  # noqa: B023 - it is called within the turn
                return made

        with mock.patch.object(trace_module, "Curve", Curve):
            phases = trace(JobSpec.model_validate(document), 2, 1).phases
        moments = [moment for phase in phases for moment in phase]
        ops = sorted({moment.op for moment in moments if "attention" in moment.op})
        peak = max(moment.num_bytes for moment in moments)
        results["packed" if "packing" in data else "whole"] = {"peak": peak, "ops": ops, "squares": squares}
    return results


if __name__ == "__main__":
    name = sys.argv[1]
    functions = {
        "wider": wider,
        "of preset": of_preset,
        "by torch": by_torch,
        "shared": lambda: shared(sys.argv[2]),
        "preset": lambda: peak_of_preset(*sys.argv[2:]),
        "packed gpt": lambda: packed(GPT),
        "packed llama": lambda: packed(LLAMA),
    }
    sys.stdout.write(json.dumps(functions[name]() if name in functions else found(**CASES[name])))
