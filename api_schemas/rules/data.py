"""Rules of a model and its data, and of the numbers that depend on the length of a run."""

from octet.api_schemas.inputs import DEFAULT_SEQUENCE_LENGTH
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
    one_of,
)

TAKES = "model.sizes.takes"
LENGTH = "training.sequence_length"
WARM_UP = "training.schedule.warmup_steps"
IMAGES = equals(f"{TAKES}.kind", "images")
TOKENS = equals(f"{TAKES}.kind", "tokens")
MASKED = differs(f"{TAKES}.mask_token", None)

MODEL_AND_DATA = Table(
    Rule(
        "data.source",
        must=Condition("data.gives", "is", Field(f"{TAKES}.kind")),
        allowed="a source of {model.sizes.takes.kind}, which the model reads",
        change="Change data.source or model.family.",
    ),
    Rule(
        "model.num_channels",
        when=(IMAGES, equals("data.is_varied", True)),
        must=one_of(f"{TAKES}.num_channels", 1, 3),
        got="{model.sizes.takes.num_channels}",
        allowed="1 (grey) or 3 (RGB) with data.augmentation",
        change="Change model.num_channels or remove data.augmentation.",
    ),
    Rule(
        LENGTH,
        when=(IMAGES,),
        must=equals(LENGTH, DEFAULT_SEQUENCE_LENGTH),  # a stored spec has every field: the default means that none was set
        allowed="no training.sequence_length",
        why="the model takes {model.sizes.takes.tokens_per_image} tokens from an image",
        change="Remove training.sequence_length.",
    ),
    *below(
        TOKENS,
        Rule(
            LENGTH,
            when=(differs(f"{TAKES}.max_sequence_length", None),),
            must=Condition(LENGTH, "at most", Field(f"{TAKES}.max_sequence_length")),
            allowed="at most the model's max_sequence_length, {value}",
            change="Shorten training.sequence_length or raise model.max_sequence_length.",
        ),
        Rule(
            "data.source",
            when=(MASKED,),
            must=equals("data.has_targets", False),
            allowed="a source whose tokens can be hidden, such as text or tokens",
            why="the model predicts masked tokens",
            change="Change data.source, or train a model that predicts the next token.",
        ),
        Rule(
            "data.packing",
            when=(equals(f"{TAKES}.keeps_documents_apart", False),),
            must=equals("data.is_packed", False),
            got="True",
            allowed="false",
            why="the model's attention does not end at a document's border, so documents in one row would see each other",
            change="Remove data.packing, or train a model that keeps documents apart: gpt, llama, and most decoders of "
            "transformers.",
        ),
        Rule(
            "model.vocab_size",
            when=(differs(f"{TAKES}.vocab_size", None),),
            must=Condition(f"{TAKES}.vocab_size", "at least", Field("data.min_vocab_size")),
            got="{model.sizes.takes.vocab_size}",
            allowed="at least {value}, the vocabulary of source {data.source}",
            change="Raise model.vocab_size.",
        ),
        Rule(
            "model.mask_token",
            when=(MASKED, above("data.min_vocab_size", 1)),
            must=Condition(f"{TAKES}.mask_token", "at least", Field("data.min_vocab_size")),
            got="{model.sizes.takes.mask_token}",
            allowed="at least {value}",
            why="source {data.source} has all tokens below",
            change="Raise model.vocab_size, whose last token is the mask, or change model.mask_token.",
        ),
    ),
)
"""Checked when a job is read, and again once the files of its model are read."""

TOKENIZER = (
    Rule(
        "data.tokenizer",
        when=(equals("data.reads_tokenizer", True), equals("model.files", None)),
        must=differs("data.tokenizer", None),
        allowed="the folder of a tokenizer, or the folder of a saved model in model.path",
        change="Set data.tokenizer or model.path.",
    ),
)

TARGETS = (
    Rule(
        "training.label_smoothing",
        when=(differs("model.sizes.task", "image_class"),),
        must=equals("training.label_smoothing", 0),
        allowed="0 with a model that predicts tokens",
        why="smoothed targets are for classes of images",
        change="Remove training.label_smoothing.",
    ),
)

SCHEDULE = Table(
    *below(
        (above(WARM_UP, 0), differs("training.steps", None)),
        Rule(
            WARM_UP,
            must=Condition(WARM_UP, "below", Amount(("training.steps",))),
            allowed="fewer than training.steps, {value}",
            change="Shorten the warm-up or train for more steps.",
        ),
        Rule(
            WARM_UP,
            when=(equals("training.schedule.name", "warmup_stable_decay"),),
            must=Condition(WARM_UP, "at most", Field("training.most_warmup_steps")),
            allowed="at most {value}",
            why="the last {training.num_decay_steps} of {training.steps} steps are the decay",
            change="Shorten the warm-up or lower training.schedule.decay_fraction.",
        ),
    )
)
"""Checked when a job is read, and in the rank where `training.epochs` gives the number of steps."""
