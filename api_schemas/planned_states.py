"""The bytes that one rank of a job holds between steps and sends in each, in closed form: shapes times formats.

Classes are those of `octet.worker.memory_report`, at the moment when a job reports them: after an update, while gradients are
alive. The rank is the first of those that share a stage, whose share of each bucket is full; of a pipeline's ranks it is the
one that holds most. Layers that a GPU's table of speedups leaves in bf16 are not known here: under ZeRO they keep a whole INT8
residual at O3-split.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from octet.api_schemas.bucket_layout import MAX_ELEMENTS, BucketLayout, fill_buckets
from octet.api_schemas.conversion import MIN_FEATURES, is_hidden_matrix, names_at_the_ends, why_not_wanted
from octet.api_schemas.formats import gradient_bytes, moment_bytes, weight_bytes
from octet.api_schemas.job import JobSpec, ValidatedJob
from octet.api_schemas.models import FamilySizes
from octet.api_schemas.models.shapes import ParameterShape
from octet.api_schemas.optimization import MATRIX_STATES
from octet.api_schemas.planned_adapters import ELEMENT_BYTES, adapter_shapes, frozen_bytes
from octet.api_schemas.precision import PrecisionSpec
from octet.api_schemas.training import AdapterSpec

CLASSES = ("weights", "master_weights", "gradients", "exp_avg", "exp_avg_sq", "scales", "other")
NUM_MEASURES = 5
"""Numbers of a sample of statistics; each of a converted layer's three operands holds one sample."""
DELAYED_BYTES = 16
"""Bytes of delayed scaling in each operand, besides the window itself."""
LOSS_SCALING_BYTES = 24
MATRIX_DTYPE = ("bfloat16", 2)
"""The dtype in which accelerators gather the matrices that Muon orthogonalizes, and its bytes."""
ACTIVATION_DTYPE = ("bfloat16", 2)
"""The dtype of activations on accelerators, and its bytes."""
GRAD_OUTPUT_DTYPES = {"HYBRID": "float8_e5m2", "E4M3": "float8_e4m3fn"}
WIDE = {"fp32": ("float32", 4), "bf16": ("bfloat16", 2)}
WEIGHT_DTYPES = {"fp32": ("float32", 4), "fp16+scale": ("float16", 2), "fp8": ("float8_e4m3fn", 1)}
"""The dtypes in which gradients and weights travel, and their bytes."""


class NotPlanned(ValueError):
    """A job whose states cannot be computed from its spec, with the reason."""


class States(NamedTuple):
    """One rank's bytes. plain: the part of `held` that belongs to parameters outside of converted layers.

    host: optimizer states in host memory. sent: bytes of gradients and weights that the rank sends to its replicas in a step,
    by collective and dtype; what tensor, context and pipeline ranks exchange is not among them.
    """

    held: dict[str, int]
    plain: int
    host: int
    sent: dict[str, dict[str, int]]


class _Parameter(NamedTuple):
    """A parameter on a rank: its elements there, those of all tensor ranks, and the ranks that hold the same elements.

    home: what the rank holds a share of and gathers together under ZeRO 3, a block or a layer of the vocabulary; else None.
    num_gathers: of it in the passes of a micro-batch.
    """

    num_elements: int
    num_whole: int
    num_replicas: int
    home: str | None
    num_gathers: int
    is_converted: bool
    is_coded: bool
    """True if its gradient is held, and travels, in FP8."""
    is_matrix: bool = False
    """True if Muon orthogonalizes it; False for the parameters of another optimizer."""


def states_of(spec: JobSpec, sizes: FamilySizes) -> States:
    """Return the states of the rank that holds most. sizes: with what the model's files say. Raises NotPlanned."""
    return most_of(states_of_ranks(spec, sizes))


def most_of(ranks: Sequence[States]) -> States:
    """Return the states of the rank that holds most."""
    return max(ranks, key=lambda states: sum(states.held.values()))


def states_of_ranks(spec: JobSpec, sizes: FamilySizes) -> list[States]:
    """Return the states of each rank of the pipeline axis. Raises NotPlanned."""
    if not spec.precision.is_resolved:
        raise NotPlanned("its level is chosen before it starts")
    if spec.precision.norms != "fp32":
        raise NotPlanned("only a rank that builds the model knows which of its norms precision.norms gives bf16 weights")
    return [states_of_rank(spec, sizes, rank) for rank in range(spec.layout.pipeline)]


def validated(spec: JobSpec) -> ValidatedJob:
    """Resolve a spec, with the bytes that a rank would hold. It is not checked against a server's pools, nor its data."""
    sizes = spec.model.sizes
    try:
        states = states_of(spec, sizes).held
    except NotPlanned:
        states = None
    return ValidatedJob(
        spec=spec,
        sizes=sizes,
        num_parameters=sizes.num_parameters,
        recipe=spec.precision.resolved_recipe,
        num_block_weights=sizes.num_block_weights,
        micro_batch_size=spec.batch.micro_batch_size,
        gradient_accumulation=_held_gradients(spec.resolved_precision),
        tokens_per_step=spec.training.global_batch_size * spec.tokens_per_sample,
        states=states,
    )


def _held_gradients(precision: PrecisionSpec) -> Literal["fp8", "fp32"] | None:
    if not precision.is_resolved:
        return None
    return "fp8" if precision.holds_fp8_gradients else "fp32"


def states_of_rank(spec: JobSpec, sizes: FamilySizes, pipeline_rank: int = 0) -> States:
    """Return the states of one rank of the pipeline axis. Raises NotPlanned."""
    shapes = sizes.parameters()
    if shapes is None:
        raise NotPlanned(f"only a rank that builds a model of family {spec.model.family} knows its parameters")
    if spec.adapter is not None:
        return _with_adapters(spec, spec.adapter, sizes, list(shapes))
    return _Rank(spec, sizes, list(shapes), pipeline_rank).states()


def _with_adapters(spec: JobSpec, adapter: AdapterSpec, sizes: FamilySizes, shapes: Sequence[ParameterShape]) -> States:
    """Return the states of a rank whose model is frozen. Every rank has all of it, and of its adapters."""
    converted = converted_weights(shapes, spec.resolved_precision) if spec.precision.storage.has_own_fp8 else frozenset()
    rank = _Rank(spec, sizes, list(adapter_shapes(adapter, shapes)), 0)
    frozen, plain = frozen_bytes(rank.level, shapes, converted)
    trained = rank.states(len(converted))
    held = Counter(trained.held)
    for kind in ("weights", "gradients"):
        held[kind] = held[kind] * ELEMENT_BYTES[adapter.dtype] // ELEMENT_BYTES["fp32"]
    plain += sum(held.values())
    held.update(frozen)
    return trained._replace(held=dict(held), plain=plain)


def converted_weights(shapes: Sequence[ParameterShape], rules: PrecisionSpec) -> frozenset[str]:
    """Return the names of the weights whose layers a level converts."""
    return frozenset(name for name, reason in why_left(shapes, rules).items() if reason is None)


def why_left(shapes: Sequence[ParameterShape], rules: PrecisionSpec) -> dict[str, str | None]:
    """Return the weight of each linear layer with the reason for which a level leaves it in 16 bits, None where it does not."""
    linear = [shape for shape in shapes if shape.is_linear]
    ends = names_at_the_ends([shape.layer for shape in linear], rules)
    return {shape.name: why_not_wanted(shape.layer, rules, ends) or _why_not_possible(shape) for shape in linear}


def _why_not_possible(shape: ParameterShape) -> str | None:
    """Return what a rank's report of its conversion says of such a layer (`worker/fp8/convert.py`)."""
    if shape.tied_to is not None:
        return "its weight is shared with another module"
    outputs, inputs = shape.shape
    is_small = min(inputs, outputs) < MIN_FEATURES
    return f"{inputs} -> {outputs} features; FP8 products need at least {MIN_FEATURES}" if is_small else None


class _Rank:
    """The first of the ranks that hold one part of a pipeline, or the whole model without one."""

    def __init__(self, spec: JobSpec, sizes: FamilySizes, shapes: Sequence[ParameterShape], pipeline_rank: int) -> None:
        self.spec, self.sizes, self.shapes = spec, sizes, shapes
        self.precision, self.level = spec.resolved_precision, spec.precision.storage
        self.optimizer = spec.training.optimizer.name
        self.num_replicas = spec.layout.replicas
        self.zero = spec.parallelism.zero_stage if self.num_replicas > 1 else 0
        self.parameters = self._parameters(pipeline_rank)
        self.buckets = self._buckets()

    def _parameters(self, pipeline_rank: int) -> list[_Parameter]:
        """Return the parameters in the order in which the rank's part of the network registers them."""
        kept = _own_experts(_part_of_pipeline(self.spec, self.shapes, pipeline_rank), self.spec.layout.expert)
        converted = converted_weights(self.shapes, self.precision)
        names, held = {shape.name for shape in kept}, []
        for shape in kept:
            if shape.tied_to in names:
                continue
            num_whole = math.prod(shape.shape)
            num_elements = num_whole // (self.spec.parallelism.tensor if shape.divided_dim is not None else 1)
            is_converted = shape.name in converted and self.level.has_own_fp8
            is_coded = is_converted and self.precision.holds_fp8_gradients
            home, num_gathers = self._home(shape), 2
            if shape.is_vocabulary:  # the embedding's for its forward pass, the head's once for both passes
                num_gathers = 1 + any(other.tied_to == shape.name for other in kept)
            is_matrix = self.optimizer in MATRIX_STATES and is_hidden_matrix(shape)
            num_replicas = self.num_replicas // (1 if shape.expert is None else self.spec.layout.expert)
            held.append(_Parameter(num_elements, num_whole, num_replicas, home, num_gathers, is_converted, is_coded, is_matrix))
        return held

    def _home(self, shape: ParameterShape) -> str | None:
        if self.zero < 3:
            return None
        if shape.is_vocabulary:
            return shape.name
        return None if shape.block is None else f"block {shape.block}"

    def _buckets(self) -> list[list[_Parameter]]:
        """Return the buckets in which gradients travel, as `data_parallel.py` fills them; their order does not matter here."""
        kinds: dict[tuple[int, bool, bool, str | None], list[_Parameter]] = {}
        for parameter in reversed(self.parameters):
            in_codes = parameter.is_converted and self.level.weight != "fp32"
            kind = (parameter.num_replicas, parameter.is_coded, in_codes, parameter.home)
            kinds.setdefault(kind, []).append(parameter)
        return [
            kind[indices.start : indices.stop]
            for kind in kinds.values()
            for indices in fill_buckets([parameter.num_elements for parameter in kind], MAX_ELEMENTS)
        ]

    def states(self, num_frozen_layers: int = 0) -> States:
        """Add up the bytes of all parameters. num_frozen_layers: converted layers whose weights are not among them."""
        held, plain, host = dict.fromkeys(CLASSES, 0), 0, 0
        # A network has few kinds of buckets and of parameters, and many of each.
        for bucket, num_buckets in Counter(map(tuple, self.buckets)).items():
            found, offloaded = self._bucket_bytes(bucket)
            host += num_buckets * offloaded
            plain += 0 if bucket[0].is_converted else num_buckets * found.total()
            for kind, num_bytes in found.items():
                held[kind] += num_buckets * num_bytes
        held["other"] += self._other_bytes(num_frozen_layers)
        return States(held, plain, host, self._sent())

    def _bucket_bytes(self, bucket: Sequence[_Parameter]) -> tuple[Counter[str], int]:
        """Return the bytes of a bucket's parameters by class, and those of their states in host memory."""
        layout = BucketLayout(tuple(parameter.num_elements for parameter in bucket), bucket[0].num_replicas)
        found, host = Counter[str](), 0
        for (parameter, num_owned), times in Counter(zip(bucket, self._num_owned(layout), strict=True)).items():
            parts = [
                weight_bytes(self.level, parameter.is_converted, parameter.num_elements, num_owned),
                self._gradient_bytes(parameter, num_owned),
            ]
            moments = moment_bytes(self.level, self.optimizer, parameter.num_whole, num_owned, is_matrix=parameter.is_matrix)
            if self.spec.training.offload_optimizer:
                host += times * sum(moments.values())
            else:
                parts.append(moments)
            for part in parts:
                for kind, num_bytes in part.items():
                    found[kind] += times * num_bytes
        if self._divides(bucket[0]):
            self._correct_for_shares(found, bucket, layout.share_size)
        return found, host

    def _num_owned(self, layout: BucketLayout) -> Sequence[int]:
        """Return the elements of each parameter of a bucket that the rank steps."""
        if not self.zero or layout.num_ranks == 1:
            return layout.sizes
        lengths = {piece.index: piece.length for piece in layout.pieces(0)}
        return [lengths.get(index, 0) for index in range(len(layout.sizes))]

    def _gradient_bytes(self, parameter: _Parameter, num_owned: int) -> dict[str, int]:
        """Return the bytes of a gradient at the update; none where it was released, or no element is this rank's."""
        if self.spec.training.gradient_release or (self._divides(parameter) and not num_owned):
            return {}
        return gradient_bytes("fp8" if parameter.is_coded else "fp32", num_owned)

    def _divides(self, parameter: _Parameter) -> bool:
        """Return True if ZeRO divides the states of a parameter: several ranks hold it."""
        return self.zero > 0 and parameter.num_replicas > 1

    def _correct_for_shares(self, found: Counter[str], bucket: Sequence[_Parameter], share_size: int) -> None:
        """Count the shares of a bucket where ranks hold these, with their padding, and not each parameter's piece."""
        is_sum = self.zero >= 2 and self.spec.batch.num_micro_batches > 1
        if not bucket[0].is_coded and not is_sum:
            found["gradients"] = 4 * share_size
        if bucket[0].home is not None:  # a released weight keeps the memory of one element
            _, num_bytes = self._weight_dtype(bucket[0])
            found["weights"] = num_bytes * (share_size + len(bucket))

    def _weight_dtype(self, parameter: _Parameter) -> tuple[str, int]:
        return WEIGHT_DTYPES[self.level.weight if parameter.is_converted else "fp32"]

    def _other_bytes(self, num_frozen_layers: int) -> int:
        """Return the bytes of buffers, and of a moving average, which each rank holds whole."""
        training, recipe = self.spec.training, self.precision.resolved_recipe
        num_bytes = self.sizes.buffer_bytes + (LOSS_SCALING_BYTES if self.level.loss_scaling else 0)
        if training.ema_decay is not None:
            num_bytes += 4 * sum(math.prod(shape.shape) for shape in self.shapes if shape.tied_to is None)
        if recipe is not None and self.level.has_own_fp8:
            window = 4 * recipe.amax_history_length + DELAYED_BYTES if recipe.scaling == "delayed" else 0
            num_layers = num_frozen_layers + sum(parameter.is_converted for parameter in self.parameters)
            num_bytes += 3 * num_layers * (4 * NUM_MEASURES + window)
        return num_bytes

    def _sent(self) -> dict[str, dict[str, int]]:
        """Return the bytes of gradients and weights that a rank sends to its replicas in a step."""
        sent: dict[str, Counter[str]] = {"exchange": Counter(), "gather": Counter()}
        if self.num_replicas == 1:
            return {}
        num_passes = self.spec.batch.num_micro_batches
        wide_dtype, wide_bytes = WIDE[self.spec.parallelism.wide_communication]
        for bucket in self.buckets:
            first = bucket[0]
            num_others = first.num_replicas - 1
            if not num_others:
                continue
            sizes = tuple(parameter.num_elements for parameter in bucket)
            elements = BucketLayout(sizes, first.num_replicas).share_size * num_others
            dtype, num_bytes = ("float8_e4m3fn", 1) if first.is_coded else (wide_dtype, wide_bytes)
            num_exchanges = num_passes if self.zero >= 2 else 1
            sent["exchange"][dtype] += elements * num_bytes * num_exchanges
            marks, mark_bytes = ("float32", 4) if first.is_coded else ("uint8", 1)  # scales, or who has a gradient
            sent["gather"][marks] += len(bucket) * mark_bytes * num_others * num_exchanges
            if self.zero:
                dtype, num_bytes = self._weight_dtype(first)
                if first.home is not None and dtype == "float32":
                    dtype, num_bytes = wide_dtype, wide_bytes
            times = first.num_gathers * num_passes if first.home is not None else 1
            sent["gather"][dtype] += elements * num_bytes * times
            if self.zero and any(parameter.is_matrix for parameter in bucket):
                sent["gather"][MATRIX_DTYPE[0]] += self._num_gathered_for_matrices(bucket, sizes) * MATRIX_DTYPE[1]
        return {collective: dict(by_dtype) for collective, by_dtype in sent.items()}

    def _num_gathered_for_matrices(self, bucket: Sequence[_Parameter], sizes: tuple[int, ...]) -> int:
        """Return the elements that a rank sends so that each rank has Muon's whole matrices, padded to the largest piece."""
        layout, num_elements = BucketLayout(sizes, bucket[0].num_replicas), 0
        pieces = [piece for rank in range(layout.num_ranks) for piece in layout.pieces(rank)]
        for index, parameter in enumerate(bucket):
            if parameter.is_matrix:
                num_elements += max(piece.length for piece in pieces if piece.index == index)
        return num_elements * (layout.num_ranks - 1)


def exchanged_of_experts(spec: JobSpec, sizes: FamilySizes) -> dict[str, dict[str, dict[str, int]]] | None:
    """Return what a rank sends to others of the expert axis in a step, by axis, collective and dtype.

    That is on an accelerator, with tokens routed evenly, and in a step that samples no statistics. None where no experts are
    divided, where only a rank knows them, and with recomputation.
    """
    shapes, num_ranks = sizes.parameters(), spec.layout.expert
    num_per_token, recipe = getattr(sizes, "num_experts_per_token", None), spec.resolved_precision.resolved_recipe
    if num_ranks == 1 or spec.training.activation_checkpointing != "none":
        return None
    if shapes is None or num_per_token is None or recipe is None:
        return None
    held, num_passes = list(shapes), spec.batch.num_micro_batches
    converted = converted_weights(held, spec.resolved_precision)
    widths = {shape.layer: shape.shape[0] for shape in held if shape.expert is not None and shape.name.endswith(".bias")}
    num_tokens = spec.batch.micro_batch_size * spec.tokens_per_sample
    num_rows = num_passes * num_tokens * num_per_token * (num_ranks - 1) // num_ranks
    takes_codes = (recipe.granularity, recipe.scaling, recipe.high_precision_gemms) == ("tensor", "current", ())
    wide, wide_bytes = ACTIVATION_DTYPE
    exchanged, gathered, reduced = Counter[str](), 0, 0
    for shape in held:
        if shape.expert is None or not shape.name.endswith(".down_proj.0.weight"):
            continue
        (_, num_experts), has_bias = shape.expert, shape.layer in widths
        num_elements = num_rows * widths.get(shape.layer, shape.shape[0])
        input = "float8_e4m3fn" if takes_codes and shape.name in converted else wide
        grad_output = wide if input == wide or has_bias else GRAD_OUTPUT_DTYPES[recipe.format]
        for dtype in (input, wide, grad_output, wide):  # there and back, forward and backward
            exchanged[dtype] += num_elements * (wide_bytes if dtype == wide else 1)
        gathered += num_passes * 4 * (2 * num_experts + 2) * (num_ranks - 1)
        if grad_output != wide:
            reduced += num_passes * (2 * 4 * num_experts * (num_ranks - 1) // num_ranks)
    found = {"exchange": dict(exchanged), "gather": {"float32": gathered}}
    return {"expert": found | ({"max": {"float32": reduced}} if reduced else {})}


def _own_experts(shapes: Sequence[ParameterShape], degree: int) -> Sequence[ParameterShape]:
    """Return the parameters that the first rank of an expert axis holds."""
    return [shape for shape in shapes if shape.expert is None or shape.expert[0] < shape.expert[1] // degree]


def _part_of_pipeline(spec: JobSpec, shapes: Sequence[ParameterShape], pipeline_rank: int) -> Sequence[ParameterShape]:
    """Return the parameters of a rank's stages: those before the blocks are the first stage's, those after them the last's."""
    layout = spec.layout
    if layout.pipeline == 1:
        return shapes
    indices = [index for index, shape in enumerate(shapes) if shape.block is not None]
    num_blocks, stages = 1 + max(shape.block or 0 for shape in shapes), layout.stages(pipeline_rank)
    blocks = {block for stage in stages for block in layout.blocks(stage, num_blocks)}
    kept = [shape for shape in shapes if shape.block in blocks]
    before = list(shapes[: indices[0]]) if 0 in stages else []
    after = list(shapes[indices[-1] + 1 :]) if layout.num_stages - 1 in stages else []
    return [*before, *kept, *after]
