"""Rules of the degrees of parallelism, of the batches that they divide and of elastic jobs.

A strategy is one tuple of rules here and one module in `worker/parallel/`.
"""

from collections.abc import Mapping

from octet.api_schemas.models import families_with
from octet.api_schemas.rules.parts import PIPELINE_SCHEDULE
from octet.api_schemas.rules.precision import levels_where
from octet.api_schemas.rules.rule import (
    Amount,
    Condition,
    Field,
    Rule,
    Table,
    above,
    below,
    differs,
    equals,
    multiple_of,
    none_of,
    one_of,
)

PIPELINE = "parallelism.pipeline"
TENSOR = "parallelism.tensor"
CONTEXT = "parallelism.context"
EXPERT = "parallelism.expert"
SEQUENCE = "parallelism.sequence"
SCHEDULE = "parallelism.schedule"
ZERO_STAGE = "parallelism.zero_stage"
WORKERS = "resources.workers"
MIN_WORKERS = "resources.min_workers"
LENGTH = "training.sequence_length"
BATCH = "training.global_batch_size"
MICRO_BATCH = "training.micro_batch_size"

IN_STAGES, IN_SHARDS, IN_CHUNKS, IN_EXPERTS = (above(degree, 1) for degree in (PIPELINE, TENSOR, CONTEXT, EXPERT))
TORCHAO = levels_where(lambda level: level.engine == "torchao")
UNDIVIDED_LEVELS = levels_where(lambda level: level.loss_scaling or level.engine == "torchao")
"""Levels whose layers or losses ranks have not been proven to divide."""
STACKED_LEVELS = levels_where(lambda level: level.gemm != "fp8" or level.engine == "torchao")
"""Levels that leave the experts of a mixture in one tensor, or convert layers by other rules than ours."""


def _proven_apart(degree: str, divided: str) -> tuple[Rule, ...]:
    """Return the rules of the options that save memory: none has been proven together with a degree. divided: by ranks."""
    return tuple(
        Rule(
            f"training.{option}",
            must=equals(f"training.{option}", default),
            allowed=f"{str(default).lower()} with {degree}",
            why=f"it has not been proven for {divided} that ranks divide",
            change=f"Remove training.{option}, or set {degree} to 1.",
        )
        for option, default in (
            ("fused_loss", False),
            ("saved_activations", "exact"),
            ("gradient_release", False),
            ("offload_optimizer", False),
        )
    )


def _no_average(degree: str, why: str) -> Rule:
    return Rule(
        "training.ema_decay",
        must=equals("training.ema_decay", None),
        allowed=f"none with {degree}",
        why=why,
        change="Remove training.ema_decay.",
    )


def _no_adapter(degree: str, why: str) -> Rule:
    return Rule(
        degree,
        must=equals("adapter", None),
        allowed="1 with adapter",
        why=why,
        change=f"Set {degree} to 1.",
    )


def _ranks_for(degree: str, *others: str) -> Rule:
    return Rule(
        WORKERS,
        must=multiple_of(WORKERS, *others, degree),
        allowed="a multiple of {name}, {value}",
        change=f"Change resources.workers or {degree}.",
    )


def _families(degree: str, capability: str, which: str = "") -> Rule:
    return Rule(
        "model",
        must=equals(f"model.sizes.capabilities.{capability}", True),
        got="{model.title}",
        allowed=f"with {degree}: {', '.join(families_with(capability))}{which}",
        change=f"Change the model, or set {degree} to 1.",
    )


def _levels(degree: str, refused: tuple[str, ...], which: str, change: str) -> Rule:
    return Rule(
        "precision.level",
        must=none_of("precision.level", *refused),
        allowed=f"with {degree}: {which}",
        change=f"{change}, or set {degree} to 1.",
    )


_ONE_DIVISION_OF_TOKENS = Rule(
    CONTEXT,
    must=equals(CONTEXT, 1),
    allowed="1 with parallelism.pipeline, which is combined with tensor and data parallel ranks and zero_stage 0 or 1",
    change="Set parallelism.context or parallelism.pipeline to 1.",
)
_STAGES_WITH_ZERO = Rule(
    ZERO_STAGE,
    must=one_of(ZERO_STAGE, 0, 1),
    allowed="0 or 1 with parallelism.pipeline",
    why="stages 2 and 3 would exchange gradients, or gather weights, for each micro-batch",
    change="Lower it, or set parallelism.pipeline to 1.",
)
_STAGED_LEVELS = _levels(PIPELINE, TORCHAO, "every level but ao, whose layers have not been proven there", "Use te")
_SEQUENCE_OF_SHARDS = Rule(
    SEQUENCE,
    when=(equals(SEQUENCE, True),),
    must=IN_SHARDS,
    allowed="false with parallelism.tensor 1",
    why="it divides the tokens over the ranks that divide the layers",
    change="Set parallelism.tensor to 2 or more, or remove parallelism.sequence.",
)
_EXPERTS_WITH_DATA = (
    *(
        Rule(
            EXPERT,
            must=equals(other, 1),
            allowed=f"1 with {other}; expert ranks are combined with data parallel ranks and zero_stage 0 or 1",
            change=f"Set {EXPERT} or {other} to 1.",
        )
        for other in (TENSOR, CONTEXT, PIPELINE)
    ),
    Rule(
        ZERO_STAGE,
        must=one_of(ZERO_STAGE, 0, 1),
        allowed=f"0 or 1 with {EXPERT}",
        why="stages 2 and 3 divide gradients and weights over all data parallel ranks, which hold different experts",
        change=f"Lower it, or set {EXPERT} to 1.",
    ),
)
DEGREES = Table(
    *PIPELINE_SCHEDULE,
    *below(IN_STAGES, _ONE_DIVISION_OF_TOKENS, _STAGES_WITH_ZERO, _STAGED_LEVELS),
    *below(IN_EXPERTS, *_EXPERTS_WITH_DATA),
    _SEQUENCE_OF_SHARDS,
)
"""Rules of the degrees alone, which `octet.parallelize` checks too."""

PIPELINE_RULES = (
    Rule(
        SCHEDULE,
        when=(equals(PIPELINE, 1),),
        must=equals(SCHEDULE, "1f1b"),
        allowed="1f1b where parallelism.pipeline is 1",
        why="there is no pipeline",
        change="Set parallelism.pipeline, or remove parallelism.schedule.",
    ),
    *below(
        IN_STAGES,
        _ONE_DIVISION_OF_TOKENS,
        _STAGES_WITH_ZERO,
        Rule(
            WORKERS,
            must=multiple_of(WORKERS, PIPELINE, TENSOR),
            allowed="a multiple of {name}, {value}",
            change="Change resources.workers or a degree.",
        ),
        _STAGED_LEVELS,
        _no_adapter(PIPELINE, "adapters are small and whole on every rank"),
        _no_average(PIPELINE, "the average is of all weights, whole on every rank"),
        *_proven_apart(PIPELINE, "blocks"),
        _families(PIPELINE, "pipeline"),
        *below(
            equals("model.sizes.capabilities.pipeline", True),
            Rule(
                "model.num_layers",
                must=Condition("model.sizes.num_layers", "at least", Field("parallelism.num_stages")),
                got="{model.sizes.num_layers}",
                allowed="at least {value}, one block for each stage of the pipeline",
                change="Change model.num_layers or parallelism.pipeline.",
            ),
            Rule(
                "model.num_layers",
                when=(equals(SCHEDULE, "interleaved"),),
                must=multiple_of("model.sizes.num_layers", "parallelism.num_stages"),
                got="{model.sizes.num_layers}",
                allowed="a multiple of {value}",
                why="with schedule interleaved each of {parallelism.pipeline} ranks has two runs of as many blocks",
                change="Change model.num_layers or parallelism.pipeline.",
            ),
        ),
    ),
)

SEQUENCE_RULES = (
    _SEQUENCE_OF_SHARDS,
    Rule(
        LENGTH,
        when=(equals(SEQUENCE, True),),
        must=multiple_of(LENGTH, TENSOR),
        allowed="a multiple of {name}, {value}, with parallelism.sequence",
        why="each rank has as many tokens",
        change="Change training.sequence_length, or remove parallelism.sequence.",
    ),
)

TENSOR_RULES = (
    *below(
        IN_SHARDS,
        _ranks_for(TENSOR),
        _levels(
            TENSOR,
            UNDIVIDED_LEVELS,
            "fp32, bf16-amp, te and the levels O1 to O3, whose layers and losses ranks can divide",
            "Change precision.level",
        ),
        Rule(
            "training.optimizer.name",
            must=differs("training.optimizer.name", "muon"),
            allowed="adamw, adam, lion or sgd with parallelism.tensor",
            why="each rank has a part of a matrix, and muon orthogonalizes whole ones",
            change="Choose another training.optimizer.name, or set parallelism.tensor to 1; parallelism.zero_stage divides "
            "muon's states, too.",
        ),
        _no_adapter(TENSOR, "adapters are whole on every rank"),
        _no_average(TENSOR, "the average is of all weights, whole on every rank"),
        *_proven_apart(TENSOR, "layers"),
        _families(
            TENSOR,
            "tensor",
            " (its architectures that have a plan for it, such as llama, mistral, qwen2, qwen3, gemma2 and gpt_neox)",
        ),
        Rule(
            "model.{key}",
            each="model.sizes.divided_sizes",
            must=multiple_of("model.sizes.divided_sizes", TENSOR),
            got="{size}",
            allowed="a multiple of {name}, {value}",
            why="each rank has as many",
            change="Change model.{key} or parallelism.tensor.",
        ),
    ),
    *SEQUENCE_RULES,
)

CONTEXT_RULES = below(
    IN_CHUNKS,
    _ranks_for(CONTEXT, TENSOR),
    _families(CONTEXT, "context", ", whose attention gathers keys and values"),
    _levels(
        CONTEXT,
        UNDIVIDED_LEVELS,
        "fp32, bf16-amp, te and the levels O1 to O3, which have been proven with it",
        "Change precision.level",
    ),
    Rule(
        LENGTH,
        must=multiple_of(LENGTH, CONTEXT, times=2),
        allowed="a multiple of {name}, {value}",
        why="each rank has two chunks of a sequence",
        change="Change training.sequence_length or parallelism.context.",
    ),
    Rule(
        LENGTH,
        when=(equals(SEQUENCE, True),),
        must=multiple_of(LENGTH, TENSOR, CONTEXT),
        allowed="a multiple of {name}, {value}, with parallelism.sequence",
        why="each rank has as many tokens in blocks",
        change="Change training.sequence_length or a degree.",
    ),
    _no_average(CONTEXT, "the average is evaluated on whole sequences"),
    *_proven_apart(CONTEXT, "tokens"),
)

EXPERT_RULES = below(
    IN_EXPERTS,
    *_EXPERTS_WITH_DATA,
    _ranks_for(EXPERT),
    _levels(
        EXPERT,
        STACKED_LEVELS,
        "te and the levels O1 to O3, which hold each expert as a layer of its own",
        "Change precision.level",
    ),
    _no_adapter(EXPERT, "adapters are whole on every rank"),
    _no_average(EXPERT, "the average is of all weights, whole on every rank"),
    *_proven_apart(EXPERT, "experts"),
    _families(EXPERT, "expert", " (its mixtures of experts, such as qwen3_moe, mixtral, deepseek_v3, gpt_oss and olmoe)"),
    Rule(
        "model",
        when=(equals("model.sizes.capabilities.expert", True), differs("model.sizes.num_experts", None)),
        must=multiple_of("model.sizes.num_experts", EXPERT),
        got="{model.sizes.num_experts} experts",
        allowed="a number of experts that is a multiple of {name}, {value}",
        why="each rank holds as many",
        change=f"Change the model or {EXPERT}.",
    ),
)

STRATEGIES: Mapping[str, tuple[Rule, ...]] = {
    "Pipeline": PIPELINE_RULES,
    "Tensor and sequence": TENSOR_RULES,
    "Context": CONTEXT_RULES,
    "Expert": EXPERT_RULES,
}

COMPILING = (
    Rule(
        "training.compile",
        when=(IN_CHUNKS,),
        must=differs("training.compile", "on"),
        allowed="off or auto",
        why="with parallelism.context {parallelism.context} torch cannot trace the attention to keys that ranks gather",
        change="Remove training.compile, or parallelism.context.",
    ),
    Rule(
        "training.compile",
        when=(equals(SEQUENCE, True),),
        must=differs("training.compile", "on"),
        allowed="off or auto",
        why="with parallelism.sequence layers take FP8 codes from exchanges that torch cannot trace",
        change="Remove training.compile, or parallelism.sequence.",
    ),
)
"""`training.compile: auto` leaves blocks as they are if one applies."""

_READERS = Amount((WORKERS,), (TENSOR, CONTEXT, PIPELINE))
_SHARE = Amount((BATCH, TENSOR, CONTEXT, PIPELINE), (WORKERS,))
_RANKS_FIT = multiple_of(WORKERS, TENSOR, CONTEXT, PIPELINE)
_BATCH_FITS = Condition(BATCH, "multiple of", _READERS)
_MICRO_BATCHES_FIT = Condition("batch.micro_batch_size", "divisor of", _SHARE)
WHOLE_BATCHES = (_RANKS_FIT, _BATCH_FITS, _MICRO_BATCHES_FIT)
"""The batch divides among the ranks, so that there is a number of micro-batches."""

BATCHES = (
    Rule(
        BATCH,
        when=(_RANKS_FIT,),
        must=_BATCH_FITS,
        allowed="a multiple of {name}, {value}",
        change="Change training.global_batch_size or resources.workers.",
    ),
    Rule(
        MICRO_BATCH,
        when=(_RANKS_FIT, _BATCH_FITS),
        must=_MICRO_BATCHES_FIT,
        got="{batch.micro_batch_size}",
        allowed="a divisor of {name}, {value}",
        change="Change training.micro_batch_size.",
    ),
    *below(
        (IN_STAGES, *WHOLE_BATCHES),
        Rule(
            MICRO_BATCH,
            when=(equals(SCHEDULE, "1f1b"),),
            must=Condition("batch.num_micro_batches", "at least", Field(PIPELINE)),
            got="{batch.micro_batch_size}",
            allowed="a size that gives each rank at least {value} micro-batches in a step with parallelism.pipeline "
            "{value}; it gives {batch.num_micro_batches}",
            change="Lower training.micro_batch_size, or raise training.global_batch_size.",
        ),
        Rule(
            MICRO_BATCH,
            when=(equals(SCHEDULE, "interleaved"),),
            must=multiple_of("batch.num_micro_batches", PIPELINE),
            got="{batch.micro_batch_size}",
            allowed="a size that gives each rank a multiple of {value} micro-batches in a step with parallelism.pipeline "
            "{value} and schedule interleaved; it gives {batch.num_micro_batches}",
            change="Lower training.micro_batch_size, or raise training.global_batch_size.",
        ),
    ),
)

ELASTIC = below(
    differs(MIN_WORKERS, None),
    *(
        Rule(
            MIN_WORKERS,
            when=(above(degree, 1),),
            must=equals(MIN_WORKERS, None),
            allowed=f"null with {degree}",
            why="going on with other ranks has been proven for data and tensor ranks",
            change=f"Remove resources.min_workers, or set {degree} to 1.",
        )
        for degree in (PIPELINE, CONTEXT, EXPERT)
    ),
    Rule(
        MIN_WORKERS,
        must=Condition(MIN_WORKERS, "at most", Field(WORKERS)),
        allowed="at most resources.workers, {value}",
        change="Lower resources.min_workers.",
    ),
    Rule(
        MIN_WORKERS,
        when=(*WHOLE_BATCHES, *(equals(degree, 1) for degree in (PIPELINE, CONTEXT, EXPERT))),
        must=Condition(MIN_WORKERS, "one of", Field("possible_worker_counts")),
        allowed="{value}",
        why="training.global_batch_size {training.global_batch_size} in micro-batches of {batch.micro_batch_size} divides "
        "among so many ranks, in groups of parallelism.tensor {parallelism.tensor}",
        change="Change resources.min_workers or training.global_batch_size.",
    ),
)
