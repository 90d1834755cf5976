"""Rules of adapters, of an average of the weights, of the options that save memory, and of CUDA graphs."""

from octet.api_schemas.models import families_with
from octet.api_schemas.rules.parallelism import (
    CONTEXT,
    IN_CHUNKS,
    IN_SHARDS,
    IN_STAGES,
    PIPELINE,
    TENSOR,
    WHOLE_BATCHES,
    ZERO_STAGE,
)
from octet.api_schemas.rules.precision import levels_where
from octet.api_schemas.rules.rule import Condition, Rule, Table, above, below, differs, equals, none_of, one_of

AVERAGE = "training.ema_decay"
RESIDUAL = "training.residual_stream"
SAVED = "training.saved_activations"
FUSED_LOSS = "training.fused_loss"
RELEASE = "training.gradient_release"
OFFLOAD = "training.offload_optimizer"
KERNEL = "training.attention_kernel"
GRAPH = "training.cuda_graph"
CHECKPOINTING = "training.activation_checkpointing"
ADAPTED = differs("adapter", None)
DIVIDED_STATES = above(ZERO_STAGE, 0)
SCALED_LOSS = levels_where(lambda level: level.loss_scaling)

ADAPTER = below(
    ADAPTED,
    Rule(
        "training.optimizer.name",
        must=differs("training.optimizer.name", "muon"),
        allowed="adamw, adam, lion or sgd with adapter",
        why="muon orthogonalizes the update of a whole weight, and an adapter's two factors are none",
        change="Choose another training.optimizer.name.",
    ),
    Rule(
        "model.path",
        must=differs("model.files", None),
        got="None",
        allowed="the folder of a saved model",
        why="adapters change a model that was trained before",
        change="Set model.path, or remove adapter.",
    ),
    Rule(
        ZERO_STAGE,
        must=equals(ZERO_STAGE, 0),
        allowed="0 with adapter",
        why="the optimizer's states of adapters are too small to divide among ranks",
        change="Remove parallelism.zero_stage.",
    ),
)

MOVING_AVERAGE = tuple(
    Rule(
        AVERAGE,
        when=(other,),
        must=equals(AVERAGE, None),
        allowed="none with adapter or parallelism.zero_stage",
        why="the average is of all weights, whole on every rank",
        change="Remove training.ema_decay.",
    )
    for other in (ADAPTED, DIVIDED_STATES)
)

MEMORY = (
    Rule(
        RESIDUAL,
        when=(differs(RESIDUAL, "fp32"),),
        must=none_of("precision.level", *levels_where(lambda level: level.gemm not in ("bf16", "fp8"))),
        allowed="fp32 at level {precision.level}",
        why="its layers return {precision.storage.gemm}",
        change="Remove training.residual_stream, or choose another precision.level, such as bf16-amp or O2.",
    ),
    *below(
        differs(SAVED, "exact"),
        Rule(
            SAVED,
            must=equals(CHECKPOINTING, "none"),
            got="fp8 with activation_checkpointing {training.activation_checkpointing}",
            allowed="exact with activation_checkpointing",
            why="checkpointing decides itself what blocks keep",
            change="Set training.saved_activations to exact, or change the other.",
        ),
        Rule(
            SAVED,
            must=differs(ZERO_STAGE, 3),
            got="fp8 with parallelism.zero_stage 3",
            allowed="exact at parallelism.zero_stage 3",
            why="its hooks of blocks read what the forward pass returns",
            change="Set training.saved_activations to exact, or change the other.",
        ),
    ),
    *below(
        equals(FUSED_LOSS, True),
        Rule(
            FUSED_LOSS,
            must=equals("model.sizes.capabilities.fused_loss", True),
            got="true with model.family {model.family}",
            allowed="false unless the model predicts tokens and its loss is ours",
            change="Remove training.fused_loss.",
        ),
        Rule(
            FUSED_LOSS,
            must=none_of("precision.level", *SCALED_LOSS),
            allowed="false at level {precision.level}",
            why="it scales the loss by the gradient of the logits, which do not exist",
            change="Remove training.fused_loss, or choose another precision.level, such as bf16-amp.",
        ),
        Rule(
            FUSED_LOSS,
            must=equals("precision.convert_heads", False),
            allowed="false with precision.convert_heads",
            why="the products of a fused loss are in 16 bits or fp32",
            change="Remove training.fused_loss or precision.convert_heads.",
        ),
    ),
    *below(
        equals(RELEASE, True),
        Rule(
            RELEASE,
            must=differs("training.optimizer.name", "sgd"),
            got="true with optimizer.name sgd",
            allowed="false with optimizer.name sgd, whose step gradient_clip bounds",
            why="with gradient_release there is no such norm",
            change="Choose another training.optimizer.name, or remove training.gradient_release.",
        ),
        Rule(
            RELEASE,
            must=equals("training.gradient_clip", None),
            got="true with gradient_clip {training.gradient_clip:g}",
            allowed="false with gradient_clip",
            why="the norm of all gradients is known only when the first are stepped and gone",
            change="Set training.gradient_clip to null, or remove training.gradient_release.",
        ),
        Rule(
            RELEASE,
            when=WHOLE_BATCHES,
            must=equals("batch.num_micro_batches", 1),
            got="true with {batch.num_micro_batches} micro-batches",
            allowed="false with several micro-batches",
            why="a gradient is complete only after the last",
            change="Remove training.gradient_release, or change the other.",
        ),
        Rule(
            RELEASE,
            when=WHOLE_BATCHES,
            must=equals("batch.num_data_ranks", 1),
            got="true with {batch.num_data_ranks} ranks",
            allowed="false on several ranks, with ZeRO or without",
            why="a gradient is complete only when all ranks' are averaged",
            change="Remove training.gradient_release, or change the other.",
        ),
        Rule(
            RELEASE,
            must=none_of("precision.level", *SCALED_LOSS),
            allowed="false at level {precision.level}",
            why="a step that overflows is skipped as a whole, after the last gradient",
            change="Remove training.gradient_release, or change the other.",
        ),
    ),
    Rule(
        OFFLOAD,
        when=(equals(OFFLOAD, True),),
        must=equals(ZERO_STAGE, 0),
        allowed="false at parallelism.zero_stage {parallelism.zero_stage}",
        why="ZeRO divides the states among the ranks' devices",
        change="Remove training.offload_optimizer or parallelism.zero_stage.",
    ),
)

ATTENTION_KERNEL = below(
    differs(KERNEL, "torch"),
    Rule(
        KERNEL,
        must=none_of("precision.level", *levels_where(lambda level: level.gemm == "fp32")),
        allowed="torch at level {precision.level}",
        why="FlashAttention-3 attends in 16 bits",
        change="Remove training.attention_kernel, or choose another precision.level, such as bf16-amp or O2.",
    ),
    Rule(
        KERNEL,
        must=equals("model.sizes.capabilities.flash_attention", True),
        got="{training.attention_kernel} with model.family {model.family}",
        allowed="torch, or fa3 with " + ", ".join(families_with("flash_attention")),
        why="the attention of other families may have masks and dropout, which FlashAttention-3 does not take",
        change="Remove training.attention_kernel.",
    ),
)

DIVERGENCE = Rule(
    "precision.ladder",
    when=(equals("training.on_divergence", "continue"),),
    must=equals("precision.ladder", ()),
    got="training.on_divergence continue",
    allowed="a ladder with on_divergence stop",
    why="a job goes on at the next level once its loss would stop it",
    change="Remove training.on_divergence or precision.ladder.",
)

LOOP_ONLY = Table(
    Rule(
        "precision.torchao.fsdp_float8_all_gather",
        when=(differs("precision.torchao", None),),
        must=equals("precision.torchao.fsdp_float8_all_gather", False),
        allowed="false",
        why="it is of torch's FSDP2; a job shards by zero_stage 3, and gathers as parallelism.wide_communication says",
        change="Remove it.",
    ),
)
"""Options that a call of the library accepts and a job would ignore. Checked at submission: stored jobs may have one."""


def _no_graph(why: str, *when: Condition) -> Rule:
    return Rule(
        GRAPH,
        when=when,
        must=one_of(GRAPH, "auto", "off"),
        allowed="auto, which records nothing then, or off",
        why=why,
        change="Nothing has to change.",
    )


CUDA_GRAPHS = (
    *(
        _no_graph(
            f"ranks meet inside of passes with {degree} {{{degree}}}, which no recording has been shown to repeat", divided
        )
        for degree, divided in ((PIPELINE, IN_STAGES), (TENSOR, IN_SHARDS), (CONTEXT, IN_CHUNKS))
    ),
    _no_graph(
        "parallelism.zero_stage 3 gives weights other memory in each pass", above("layout.num_ranks", 1), equals(ZERO_STAGE, 3)
    ),
    _no_graph(
        "passes of model.family {model.family} may wait for the device; known: " + ", ".join(families_with("cuda_graphs")),
        equals("model.sizes.capabilities.cuda_graphs", False),
    ),
    _no_graph(
        "activation_checkpointing {training.activation_checkpointing} sets the state of random numbers inside a pass",
        differs(CHECKPOINTING, "none"),
    ),
    _no_graph("gradient_release steps parameters inside the backward pass", equals(RELEASE, True)),
    _no_graph("offload_optimizer copies states between the host and the device in streams of its own", equals(OFFLOAD, True)),
    _no_graph("the host waits once a step of muon for whether gradients are finite", equals("training.optimizer.name", "muon")),
)
"""`training.cuda_graph: auto` records nothing if one applies: a replay could not repeat the step."""
