"""Divides ranks and batches; no other module computes with numbers of ranks.

Ranks lie on named axes. `pipeline` ranks hold different layers, `data` ranks train the same layers on different sequences,
`context` ranks on different tokens of the same sequences, and `tensor` ranks share each layer. The tensor index runs fastest,
then context, so a tensor group consists of neighbouring ranks, which a launcher places on one node. `replicas` joins data and
context: the ranks that average gradients. `stage` joins them and tensor: all ranks that hold the same layers.

`expert` ranks are neighbours among the replicas, and each holds some of the experts of a mixture; `expert_replicas` are the
replicas that hold the same ones.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from octet.api_schemas.base import Contract
from octet.api_schemas.rules.parts import PIPELINE_SCHEDULE

AxisName = Literal["world", "pipeline", "data", "context", "replicas", "tensor", "stage", "expert", "expert_replicas"]
WideDtype = Literal["fp32", "bf16"]
PipelineSchedule = Literal["1f1b", "interleaved"]
STAGES_PER_RANK: dict[PipelineSchedule, int] = {"1f1b": 1, "interleaved": 2}
"""Runs of consecutive blocks that each rank of a pipeline holds."""


class ParallelismSpec(Contract):
    """The division of the work among the ranks."""

    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="1: ranks hold shares of optimizer states and master weights; 2: and of accumulated gradients; 3: and of "
        "the weights of blocks, embedding and head, which are gathered while they compute",
    )
    wide_communication: WideDtype = Field(
        default="fp32",
        description="dtype in which gradients travel that are not in FP8, and at zero_stage 3 fp32 weights that are gathered; "
        "bf16 rounds each rank's once, for half the bytes",
    )
    tensor: Literal[1, 2, 4, 8, 16, 32, 64] = Field(
        default=1,
        description="neighbouring ranks that divide each layer and read the same samples; workers / tensor ranks read others",
    )
    context: Literal[1, 2, 4, 8, 16, 32, 64] = Field(
        default=1,
        description="ranks that divide the tokens of each sequence, and attend to the keys and values of all; workers / "
        "context ranks read other sequences",
    )
    expert: Literal[1, 2, 4, 8, 16, 32, 64] = Field(
        default=1,
        description="data parallel ranks that each hold some experts of every mixture, and get the tokens of these from the "
        "others; all else is whole on every rank",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=256,
        description="ranks that each hold some of the blocks, whole or as the shards of tensor, and pass micro-batches on; "
        "workers / (pipeline · tensor) ranks read other samples",
    )
    schedule: PipelineSchedule = Field(
        default="1f1b",
        description="in which order a pipeline's ranks compute. 1f1b: one run of blocks for each rank; interleaved: two runs "
        "for each rank, whose ranks wait less and send twice as often",
    )
    sequence: bool = Field(
        default=False,
        description="with tensor: ranks also divide the tokens between the layers of a block, as in norms and dropout",
    )

    @property
    def degrees(self) -> dict[str, int]:
        """The ranks on each axis but the data axis, and the runs of blocks of a pipeline's rank, as a `Layout` takes them."""
        return {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
            "stages_per_rank": STAGES_PER_RANK[self.schedule],
        }

    @property
    def num_stages(self) -> int:
        """The runs of consecutive blocks into which a pipeline divides a model."""
        return self.pipeline * STAGES_PER_RANK[self.schedule]

    @field_validator("schedule", mode="before")
    @classmethod
    def _refuse_zero_bubble(cls, schedule: Any) -> Any:
        PIPELINE_SCHEDULE.check_part("parallelism.schedule", schedule)
        return schedule


@dataclass(frozen=True, slots=True)
class Layout:
    """The degrees of parallelism of `num_ranks` ranks. Raises ValueError if their product does not divide the ranks.

    stages_per_rank: runs of consecutive blocks that each pipeline rank holds. Stage s lies on pipeline rank s % pipeline.
    """

    num_ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    stages_per_rank: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_ranks % self._ranks_per_sample:
            raise ValueError(
                f"the number of ranks is {self.num_ranks}; allowed: multiples of parallelism.tensor x parallelism.pipeline x "
                f"parallelism.context, {self._ranks_per_sample}. Change resources.workers or the degrees."
            )
        if self.expert < 1 or self.replicas % self.expert:
            raise ValueError(
                f"parallelism.expert is {self.expert}; allowed: divisors of the ranks that train the same layers, "
                f"{self.replicas}. Change resources.workers or parallelism.expert."
            )

    @property
    def data(self) -> int:
        """Data parallel degree: ranks that train the same layers on different sequences."""
        return self.num_ranks // self._ranks_per_sample

    @property
    def replicas(self) -> int:
        """Ranks that train the same layers: data times context."""
        return self.data * self.context

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline * self.stages_per_rank

    def stages(self, pipeline_rank: int) -> range:
        """Return the stages that a rank of the pipeline axis holds, ascending."""
        return range(pipeline_rank, self.num_stages, self.pipeline)

    def blocks(self, stage: int, num_blocks: int) -> range:
        """Return the blocks of a stage, of a model's `num_blocks`. The numbers of two stages' blocks differ by one at most."""
        return range(stage * num_blocks // self.num_stages, (stage + 1) * num_blocks // self.num_stages)

    def num_blocks_of(self, pipeline_rank: int, num_blocks: int) -> int:
        """Return the blocks of all stages of a rank of the pipeline axis, of a model's `num_blocks`."""
        return sum(len(self.blocks(stage, num_blocks)) for stage in self.stages(pipeline_rank))

    def group(self, axis: AxisName, rank: int) -> tuple[int, ...]:
        """Return the ranks on the axis through `rank`, ascending, including `rank`."""
        pipeline, data, context, tensor = self._place(rank)
        replicas = range(self.replicas)
        replica = data * self.context + context
        first_of_experts = replica - replica % self.expert
        match axis:
            case "world":
                return tuple(range(self.num_ranks))
            case "pipeline":
                return tuple(self._rank(other, data, context, tensor) for other in range(self.pipeline))
            case "data":
                return tuple(self._rank(pipeline, other, context, tensor) for other in range(self.data))
            case "context":
                return tuple(self._rank(pipeline, data, other, tensor) for other in range(self.context))
            case "replicas":
                return tuple(self._rank(pipeline, 0, other, tensor) for other in replicas)
            case "tensor":
                return tuple(self._rank(pipeline, data, context, other) for other in range(self.tensor))
            case "stage":
                first = self._rank(pipeline, 0, 0, 0)
                return tuple(range(first, first + len(replicas) * self.tensor))
            case "expert":
                experts = range(first_of_experts, first_of_experts + self.expert)
                return tuple(self._rank(pipeline, 0, other, tensor) for other in experts)
            case "expert_replicas":
                same = replicas[replica % self.expert :: self.expert]
                return tuple(self._rank(pipeline, 0, other, tensor) for other in same)

    def groups(self, axis: AxisName) -> list[tuple[int, ...]]:
        """Return every group of an axis, ordered by first rank. All ranks must create all groups in this order."""
        return sorted({self.group(axis, rank) for rank in range(self.num_ranks)})

    @property
    def _ranks_per_sample(self) -> int:
        return self.tensor * self.pipeline * self.context

    def _place(self, rank: int) -> tuple[int, int, int, int]:
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return pipeline, data, context, tensor

    def _rank(self, pipeline: int, data: int, context: int, tensor: int) -> int:
        return ((pipeline * self.data + data) * self.context + context) * self.tensor + tensor


@dataclass(frozen=True, slots=True)
class BatchDivision:
    """The division of one optimizer step's samples over the data ranks and their micro-batches.

    Samples are counted from the start of the stream. Data rank d reads `rank_batch_size` consecutive samples, starting at
    position + d · rank_batch_size, in pieces of `micro_batch_size`.
    """

    global_batch_size: int
    micro_batch_size: int
    num_data_ranks: int

    @property
    def rank_batch_size(self) -> int:
        """Samples that one data rank reads per optimizer step."""
        return self.global_batch_size // self.num_data_ranks

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of one rank per optimizer step."""
        return self.rank_batch_size // self.micro_batch_size

    def first_sample(self, position: int, data_rank: int, micro_batch: int) -> int:
        """Return the index in the stream of a micro-batch's first sample. position: samples read before this step."""
        return position + data_rank * self.rank_batch_size + micro_batch * self.micro_batch_size
