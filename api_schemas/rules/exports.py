"""Rules of what a rank can write as an export."""

from octet.api_schemas.export import CALIBRATION_TOKENS
from octet.api_schemas.models import families_with
from octet.api_schemas.rules.precision import levels_where
from octet.api_schemas.rules.rule import Rule, below, differs, equals, multiple_of, none_of

FORMAT, LAYOUT, ACTIVATIONS, WHEN = "export.format", "export.layout", "export.activations", "export.when"
LIMIT = "export.max_kl_divergence"
EVERY = "evaluation.every"
_NOT_CONVERTING = levels_where(lambda level: level.gemm == "fp32")

EXPORT = below(
    differs("export", None),
    Rule(
        "export",
        must=none_of("model.family", *families_with("users_code")),
        got="export with model.family {model.family}",
        allowed="none with this family",
        why="its code is the user's, and transformers has no form for it",
        change="Remove export, and read the checkpoint's tensors.safetensors.",
    ),
    *below(
        equals(FORMAT, "fp8"),
        Rule(
            FORMAT,
            must=none_of("precision.level", *_NOT_CONVERTING),
            allowed="bf16 or fp32 at level {precision.level}",
            why="it converts no layer to be written as codes",
            change="Change export.format, or choose another precision.level, such as O2.",
        ),
        Rule(
            FORMAT,
            must=equals("adapter", None),
            allowed="bf16 or fp32 with adapter",
            why="adapters are small, and merged weights are the folder's own, not codes",
            change="Change export.format.",
        ),
        Rule(
            ACTIVATIONS,
            when=(equals(LAYOUT, "hf-fp8-block"),),
            must=equals(ACTIVATIONS, "dynamic"),
            allowed="dynamic with layout hf-fp8-block",
            why="servers of this layout always multiply in FP8",
            change="Set export.activations to dynamic, or remove export.layout.",
        ),
    ),
    *(
        Rule(
            field,
            when=(differs(FORMAT, "fp8"),),
            must=equals(field, default),
            allowed=f"{default} with format {{export.format}}",
            why="it says how FP8 weights are written and used",
            change=f"Remove {field}, or set export.format to fp8.",
        )
        for field, default in ((LAYOUT, "compressed-tensors"), (ACTIVATIONS, "none"))
    ),
    Rule(
        "export.calibration_tokens",
        when=(differs(ACTIVATIONS, "static"),),
        must=equals("export.calibration_tokens", CALIBRATION_TOKENS),
        allowed="none with activations {export.activations}",
        why="only static scales are found by calibration",
        change="Remove export.calibration_tokens, or set export.activations to static.",
    ),
    Rule(
        "export.merge",
        when=(equals("adapter", None),),
        must=equals("export.merge", False),
        allowed="false without adapter",
        change="Remove export.merge.",
    ),
    Rule(
        LIMIT,
        when=(equals("export.compared_tokens", 0),),
        must=equals(LIMIT, None),
        allowed="none with compared_tokens 0",
        why="nothing is compared then",
        change="Remove export.max_kl_divergence, or export.compared_tokens.",
    ),
    Rule(
        "training.eval_every",
        when=(equals(WHEN, "best"),),
        must=differs("training.eval_every", 0),
        got="0 with export.when best",
        allowed="at least 1",
        why="the best checkpoint is that with the lowest evaluation loss",
        change="Set training.eval_every to checkpoint_every, or export.when to end.",
    ),
    Rule(
        "training.keep.best",
        when=(equals(WHEN, "best"),),
        must=differs("training.keep.best", 0),
        got="0 with export.when best",
        allowed="at least 1",
        why="the best checkpoint has to stay until the end",
        change="Remove training.keep.best, or set export.when to end.",
    ),
)

EVALUATION = below(
    differs("evaluation", None),
    Rule(
        "evaluation",
        must=differs("export", None),
        got="evaluation without export",
        allowed="with export",
        why="tasks are run on what is exported",
        change="Add export with format bf16, or remove evaluation.",
    ),
    Rule(
        "evaluation",
        must=equals("model.sizes.task", "next_token"),
        got="evaluation with a model of task {model.sizes.task}",
        allowed="with models that predict the next token",
        why="tasks ask for the probability of a text",
        change="Remove evaluation.",
    ),
    *below(
        differs(EVERY, 0),
        Rule(
            EVERY,
            when=(differs("export", None),),
            must=equals(WHEN, "every_checkpoint"),
            allowed="0 with export.when {export.when}, whose one export is evaluated",
            change="Remove evaluation.every, or set export.when to every_checkpoint.",
        ),
        *(
            rule
            for field, why in (
                ("training.checkpoint_every", "an export is made of a checkpoint"),
                ("training.eval_every", "scores stand with the loss of the same step"),
            )
            for rule in (
                Rule(
                    field,
                    must=differs(field, 0),
                    allowed="at least 1 with evaluation.every",
                    why=why,
                    change=f"Set {field} to evaluation.every, or remove evaluation.every.",
                ),
                Rule(
                    EVERY,
                    when=(differs(field, 0),),
                    must=multiple_of(EVERY, field),
                    allowed="a multiple of {name}, {value}",
                    why=why,
                    change=f"Change evaluation.every, or {field}.",
                ),
            )
        ),
    ),
)
