"""Rules within one part of a job: a recipe, the length of a run, the numbers of an optimizer and of a schedule."""

from octet.api_schemas.rules.rule import Condition, Rule, Table, differs, equals, none_of

STEPS, EPOCHS = "training.steps", "training.epochs"


def _numbers(part: str, *readers: tuple[str, object, tuple[str, ...]]) -> tuple[Rule, ...]:
    """Return the rules of a spec whose `name` decides which numbers have an effect: field, default, names that read it."""
    # The default has no effect on others: a stored spec has every field.
    return tuple(
        Rule(
            f"training.{part}.{field}",
            when=(none_of(f"training.{part}.name", *names),),
            must=equals(f"training.{part}.{field}", default),
            got=f"{{training.{part}.{field}!s}} with the {part} {{training.{part}.name}}",
            allowed=f"{field} with the {part} {' or '.join(names)}",
            change=f"Remove training.{part}.{field}, or choose another training.{part}.name.",
        )
        for field, default, names in readers
    )


OPTIMIZER = Table(
    *_numbers(
        "optimizer",
        ("betas", (0.9, 0.95), ("adamw", "adam", "lion", "muon")),
        ("eps", 1e-8, ("adamw", "adam", "muon")),
        ("momentum", 0.9, ("muon", "sgd")),
    )
)

LEARNING_RATE = Table(
    *_numbers(
        "schedule",
        ("final_fraction", 0.1, ("cosine", "linear", "polynomial", "warmup_stable_decay")),
        ("power", 1.0, ("polynomial",)),
        ("decay_fraction", 0.1, ("warmup_stable_decay",)),
    )
)

TRAINING = Table(
    Rule(
        "training.gradient_clip",
        when=(equals("training.optimizer.name", "sgd"),),
        must=differs("training.gradient_clip", None),
        got="null",
        allowed="a largest norm",
        why="with the optimizer sgd it bounds a step, and stored weights are scaled by the bound",
        change="Set training.gradient_clip, or choose another training.optimizer.name.",
    ),
    Rule(
        STEPS,
        when=(equals(EPOCHS, None),),
        must=differs(STEPS, None),
        got="null",
        allowed="one of training.steps and training.epochs",
        change="Set training.steps or training.epochs, not both.",
    ),
    Rule(
        STEPS,
        when=(differs(EPOCHS, None),),
        must=equals(STEPS, None),
        got="steps {training.steps} and epochs {training.epochs:g}",
        allowed="one of training.steps and training.epochs",
        change="Set training.steps or training.epochs, not both.",
    ),
)

PIPELINE_SCHEDULE = Table(
    Rule(
        "parallelism.schedule",
        must=Condition("parallelism.schedule", "is not", "zero-bubble"),
        allowed="1f1b, interleaved",
        why="zero-bubble computes the gradients of inputs and of weights apart, which an FP8 layer computes in one pass, and "
        "leaves out the hooks that hold gradients in FP8",
        change="Set parallelism.schedule to interleaved.",
    ),
)

RECIPE = Table(
    Rule(
        "precision.recipe.granularity",
        when=(equals("precision.recipe.scaling", "delayed"),),
        must=equals("precision.recipe.granularity", "tensor"),
        allowed="tensor, if scaling is delayed",
        why="a history keeps one amax per tensor",
        change="Set recipe.granularity to tensor, or recipe.scaling to current.",
    ),
    Rule(
        "precision.recipe.granularity",
        when=(equals("precision.recipe.fast_grad_input", True),),
        must=equals("precision.recipe.granularity", "tensor"),
        allowed="tensor, with fast_grad_input",
        why="products by other scales have no fast accumulation",
        change="Set recipe.granularity to tensor, or recipe.fast_grad_input to false.",
    ),
    Rule(
        "precision.recipe.high_precision_gemms",
        when=(equals("precision.recipe.fast_grad_input", True),),
        must=equals("precision.recipe.grad_input_in_bf16", False),
        allowed="products without grad_input, with fast_grad_input",
        why="a product in bf16 has no fast accumulation",
        change="Take grad_input out of recipe.high_precision_gemms, or set recipe.fast_grad_input to false.",
    ),
)
