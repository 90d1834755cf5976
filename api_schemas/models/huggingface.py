"""Any architecture of `architectures.py`, through transformers' own classes, from a configuration or a folder with weights.

The control plane does not import transformers, so it counts neither parameters nor FLOPs of this family: a rank does, and
reports them when it starts. A folder is read by the same rules as data: at submission `config.json` and, of quantized
weights, the headers of their files; all of it in the rank.
"""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from octet.api_schemas.base import Contract, SpecConflict, refusal
from octet.api_schemas.data.files import ANY_FILE, Files, absolute_path
from octet.api_schemas.inputs import ImageInput, Task, TokenInput
from octet.api_schemas.models.architectures import (
    ARCHITECTURES,
    DIVIDED_BY_RANKS,
    KEEPS_DOCUMENTS_APART,
    POSITIONS_AFTER_PADDING,
    TASKS,
)
from octet.api_schemas.models.base import Capabilities, FamilySizes, FamilySpec, Size, UncountedSizes
from octet.api_schemas.models.shapes import ParameterShape, Shapes
from octet.api_schemas.models.weight_files import check_folder

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 1 << 20
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The fields that have the number of experts of each mixture, one of them in an architecture that has mixtures."""
LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
CLOSED_FIELDS = frozenset({"architectures", "attn_implementation", "auto_map", "dtype", "model_type", "quantization_config"})
"""Fields of transformers' configurations that a job does not set: they load code or weights, or contradict the level."""

CONFIG_FIELDS = "config_fields.json"
"""The file with the fields of each architecture: those that its configuration declares, or its network reads."""

ConfigField = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]


class HuggingFaceSizes(UncountedSizes):
    """The sizes that tie a network of transformers to its data. null: only the rank knows, or the task has no such size."""

    declared: ClassVar[Capabilities] = Capabilities(tensor=True, fused_loss=True, expert=True)

    architecture: str | None
    vocab_size: Size | None = None
    max_sequence_length: Size | None = None
    mask_token: int | None = None
    image_size: Size | None = None
    num_channels: Size | None = None
    num_classes: Size | None = None
    tokens_per_image: Size | None = None
    num_experts: Size | None = None
    num_experts_per_token: Size | None = None

    @property
    def task(self) -> Task:
        """The architecture's task. Before a folder is read it counts as a language model."""
        return "next_token" if self.architecture is None else TASKS[self.architecture]

    @property
    def takes(self) -> TokenInput | ImageInput:
        """Images for a classifier, else tokens."""
        if self.task != "image_class":
            apart = None if self.architecture is None else self.architecture in KEEPS_DOCUMENTS_APART
            return TokenInput(self.vocab_size, self.max_sequence_length, self.mask_token, apart)
        sizes = (self.image_size, self.num_channels, self.num_classes, self.tokens_per_image)
        image_size, num_channels, num_classes, tokens_per_image = (size or 1 for size in sizes)
        return ImageInput(image_size, num_channels, num_classes, tokens_per_image)

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the architecture. A folder counts as able before it is read, and a rank checks it."""
        is_divided = self.architecture is None or self.architecture in DIVIDED_BY_RANKS
        has_experts = self.architecture is None or not known_fields(self.architecture).isdisjoint(EXPERT_FIELDS)
        return replace(self.declared, tensor=is_divided, fused_loss=self.task != "image_class", expert=has_experts)

    @property
    def divided_sizes(self) -> Mapping[str, int]:
        """Tokens; a rank checks what else the network divides. Nothing is known of a folder before it is read."""
        return {} if self.vocab_size is None else {"config.vocab_size": self.vocab_size}


class NetworkShapes(Contract):
    """The parameters of a network that transformers builds, found by building it without values.

    is_of_level: its level divides experts of a mixture into layers, so that other levels have other parameters.
    """

    parameters: tuple[ParameterShape, ...]
    buffer_bytes: int
    is_of_level: bool


class CountedSizes(HuggingFaceSizes):
    """The sizes of a network whose parameters are known."""

    network: NetworkShapes

    def parameters(self) -> Shapes:
        return iter(self.network.parameters)

    @property
    def buffer_bytes(self) -> int:
        return self.network.buffer_bytes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape.shape) for shape in self.network.parameters if shape.tied_to is None)


class _Fields(NamedTuple):
    """A configuration, and the names under which messages speak of its fields."""

    values: Mapping[str, Any]
    prefix: str

    def number(self, *names: str) -> int | None:
        """Return the first of these fields that is set, as a positive integer; None if none is. Raises SpecConflict."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, list) and value and len(set(map(str, value))) == 1:
                value = value[0]  # transformers writes the sides of a square as a list
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1_048_576:
                raise SpecConflict(
                    f"{self.prefix}{name}", value, "an integer from 1 to 1048576", f"Change {self.prefix}{name}."
                )
            return value
        return None

    def required(self, name: str) -> int:
        """Return a field that must be set. Raises SpecConflict."""
        value = self.number(name)
        if value is None:
            field = f"{self.prefix}{name}"
            raise SpecConflict(
                field, None, f"an integer: the data has to fit {name}, whatever transformers' default is", f"Set {field}."
            )
        return value


class HuggingFaceSpec(FamilySpec):
    """A network of transformers: `architecture` with fields of its configuration, or the folder of a saved model."""

    sizes_type: ClassVar[type[FamilySizes]] = HuggingFaceSizes
    architectures: ClassVar[Mapping[Task, tuple[str, ...]]] = ARCHITECTURES

    family: Literal["huggingface"] = "huggingface"
    preset: None = None
    architecture: str | None = Field(
        default=None, max_length=64, description="transformers' model_type, such as llama or qwen3"
    )
    config: dict[ConfigField, JsonValue] = Field(
        default_factory=dict, max_length=128, description="fields of the architecture's configuration, with transformers' names"
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="absolute path of a folder with config.json and safetensors, plain or FP8, as the workers see it",
    )
    mask_token: int | None = Field(
        default=None, ge=0, description="the token that hides others, for masked models; default: the vocabulary's last"
    )

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        return None if path is None else absolute_path("model.path", path)

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.architecture is None):
            raise refusal(
                "architecture",
                got=f"architecture {self.architecture} and path {self.path}",
                allowed="one of them: an architecture to train from random values, or the folder of a saved model",
                change="Set model.architecture or model.path.",
            )
        if self.path is not None and self.config:
            change = "Remove model.config, or change the folder's config.json."
            raise refusal("config", got=self.config, allowed="no fields next to model.path", change=change)
        closed = sorted(CLOSED_FIELDS & self.config.keys())
        if closed:
            allowed = "fields that describe the network; precision and code are the job's"
            raise refusal(f"config.{closed[0]}", got=self.config[closed[0]], allowed=allowed, change="Remove it.")
        if self.architecture is not None:
            try:
                self._read(self.architecture, _Fields(self.config, "config."))
            except SpecConflict as conflict:
                raise conflict.as_refusal() from None
            self._check_names(self.architecture)
        return self

    def _check_names(self, architecture: str) -> None:
        """Refuse fields that the architecture does not have. Raises the error of a validator."""
        known = known_fields(architecture)
        unknown = sorted(self.config.keys() - known) if known else []
        if unknown:
            close = difflib.get_close_matches(unknown[0], sorted(known), n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            allowed = f"the fields of {architecture}: {', '.join(sorted(known))}"
            change = f"Remove it or correct its name.{hint}"
            raise refusal(f"config.{unknown[0]}", got=self.config[unknown[0]], allowed=allowed, change=change)

    @property
    def title(self) -> str:
        """The architecture, or the folder's name."""
        return self.architecture or Path(self.path or "").name

    @property
    def files(self) -> str | None:
        """The folder of the saved model."""
        return self.path

    @property
    def sizes(self) -> HuggingFaceSizes:
        """The sizes that the spec says; nothing is known of a folder."""
        if self.architecture is None:
            return HuggingFaceSizes(architecture=None)
        return self._read(self.architecture, _Fields(self.config, "config."))

    def read_sizes(self, files: Files = ANY_FILE) -> HuggingFaceSizes:
        """Return the sizes, of a folder from its config.json. Raises SpecConflict or OSError."""
        if self.path is None:
            return self.sizes
        return self.sizes_of(self.read_config(files))

    def sizes_of(self, config: Mapping[str, Any]) -> HuggingFaceSizes:
        """Return the sizes of a folder with this configuration. Raises SpecConflict."""
        try:
            found = self._read(str(config.get("model_type")), _Fields(config, f"{CONFIG_NAME} "))
        except SpecConflict as conflict:
            field = "mask_token" if conflict.field == "mask_token" else "path"
            got = conflict.got if conflict.field == field else f"{conflict.field} {conflict.got}"
            raise SpecConflict(f"model.{field}", got, conflict.allowed, conflict.change) from None
        if found.task == "masked_token" and self.mask_token is None:
            allowed = "the number of the tokenizer's mask token, which config.json does not say"
            raise SpecConflict("model.mask_token", None, allowed, "Set model.mask_token.")
        return found

    def read_config(self, files: Files = ANY_FILE) -> dict[str, Any]:
        """Read the configuration of a folder. Raises SpecConflict or OSError."""
        path = Path(self.path or "") / CONFIG_NAME
        try:
            config = json.loads(files.read(path, MAX_CONFIG_BYTES))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            allowed = f"a folder with {CONFIG_NAME} and weights, as save_pretrained writes it"
            raise SpecConflict("model.path", self.path, allowed, "Change model.path.") from None
        except SpecConflict as conflict:
            raise conflict.moved_to("model.path") from None
        except (ValueError, RecursionError):
            raise SpecConflict(
                "model.path", path, "a configuration in JSON of at most 1 MiB", "Save the model again."
            ) from None
        if not isinstance(config, dict):
            raise SpecConflict("model.path", path, "a configuration: a JSON object", "Save the model again.")
        return config

    def check_weights(self, files: Files = ANY_FILE) -> None:
        """Check the form of quantized weights by the headers of their files. Raises SpecConflict or OSError."""
        if self.path is not None:
            try:
                check_folder(Path(self.path), self.read_config(files), files)
            except SpecConflict as conflict:
                raise conflict.moved_to("model.path") from None

    def _read(self, architecture: str, fields: _Fields) -> HuggingFaceSizes:
        if architecture not in TASKS:
            raise _unknown(architecture)
        task = TASKS[architecture]
        if task == "image_class":
            self._refuse_mask_token(architecture)
            return _image_sizes(architecture, fields)
        vocab_size, longest = fields.required("vocab_size"), fields.number(*LENGTH_FIELDS)
        if task == "next_token":
            self._refuse_mask_token(architecture)
            return HuggingFaceSizes(
                architecture=architecture,
                vocab_size=vocab_size,
                max_sequence_length=longest,
                num_experts=fields.number(*EXPERT_FIELDS),
                num_experts_per_token=fields.number("num_experts_per_tok"),
            )
        mask_token = vocab_size - 1 if self.mask_token is None else self.mask_token
        if mask_token >= vocab_size:
            raise SpecConflict("mask_token", mask_token, f"below vocab_size, {vocab_size}", "Change model.mask_token.")
        if longest is not None and architecture in POSITIONS_AFTER_PADDING:
            longest = max(1, longest - 2)
        return HuggingFaceSizes(
            architecture=architecture, vocab_size=vocab_size, max_sequence_length=longest, mask_token=mask_token
        )

    def _refuse_mask_token(self, architecture: str) -> None:
        if self.mask_token is not None:
            allowed = f"no mask_token: {architecture} does not predict masked tokens"
            raise SpecConflict("mask_token", self.mask_token, allowed, "Remove model.mask_token.")


@cache
def known_fields(architecture: str) -> frozenset[str]:
    """Return the fields that a job may set for an architecture; none for an architecture that is not listed."""
    table: dict[str, str] = json.loads(Path(__file__).with_name(CONFIG_FIELDS).read_text())
    fields = table.get(architecture)
    return frozenset() if fields is None else frozenset((table["all"] + " " + fields).split())


def _image_sizes(architecture: str, fields: _Fields) -> HuggingFaceSizes:
    labels = fields.values.get("id2label")
    named = {"num_labels": len(labels)} if isinstance(labels, dict) and labels else {}
    num_classes = _Fields({**fields.values, **named}, fields.prefix).required("num_labels")
    image_size = fields.required("image_size")
    patch_size = fields.number("patch_size")
    return HuggingFaceSizes(
        architecture=architecture,
        image_size=image_size,
        num_channels=fields.number("num_channels") or 3,
        num_classes=num_classes,
        tokens_per_image=max(1, image_size // patch_size) ** 2 if patch_size else 1,
    )


def _unknown(architecture: str) -> SpecConflict:
    longer = [name for name in TASKS if name.startswith(f"{architecture}_")]  # gemma3, whose text model is gemma3_text
    close = longer or difflib.get_close_matches(architecture, list(TASKS), n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    allowed = f"one of the {len(TASKS)} architectures that `octet models --json` lists, such as llama, qwen3, bert or swin"
    return SpecConflict("architecture", architecture, allowed, f"no such architecture.{hint} Change the architecture.")
