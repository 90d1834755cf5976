"""The most bytes that a rank's tensors take at once in a step, as lines in the size of the micro-batch."""

from collections.abc import Mapping
from fractions import Fraction

from pydantic import Field

from octet.api_schemas.base import Contract
from octet.api_schemas.measured import Bytes
from octet.api_schemas.planned_states import CLASSES

PEAK_CLASSES = (*CLASSES, "activations", "logits", "communication", "temporary")
"""Classes of the bytes at a step's peak: those of `memory_report`, and four of tensors that are freed within the step."""


class PeakLine(Contract):
    """A moment of the step. Its bytes are base + growth · (micro-batch / the job's micro-batch).

    by_class: base and growth of each of PEAK_CLASSES.
    """

    base: int
    growth: int
    by_class: tuple[tuple[int, int], ...] = ()


class Peak(Contract):
    """The most bytes of tensors that are alive at once in an eager step, counted on fake tensors.

    level: that of the step that was traced, whose states these bytes hold.
    """

    level: str
    bytes: Bytes
    by_class: dict[str, int] = Field(description=f"alive at the peak: {', '.join(PEAK_CLASSES)}")
    before: Bytes = Field(description="alive between steps")
    held: dict[str, int] = Field(description="by class at the update, as octet.worker.memory_report counts them")
    by_micro_batch: tuple[PeakLine, ...] = Field(description="none until a wider micro-batch is traced, too")
    exchanged: dict[str, dict[str, dict[str, int]]] = Field(
        default_factory=dict, description="bytes sent in a step but to replicas, by axis, collective and dtype"
    )

    def largest_micro_batch(self, micro_batch_size: int, most_bytes: int) -> int | None:
        """Return the most sequences of a pass with which no moment takes more bytes; None until lines are known."""
        if not self.by_micro_batch:
            return None
        sizes = [(most_bytes - line.base) * micro_batch_size // line.growth for line in self.by_micro_batch if line.growth > 0]
        return max(0, min(sizes, default=0))

    def with_states(self, own: Mapping[str, int], other: Mapping[str, int]) -> "Peak":
        """Return the peak of the same passes at another level. own, other: the bytes of both levels' states, by class."""
        change = {kind: other[kind] - own[kind] for kind in CLASSES}
        in_all = sum(change.values())
        added = [change.get(kind, 0) for kind in PEAK_CLASSES]
        lines = (
            line.model_copy(
                update={
                    "base": line.base + in_all,
                    "by_class": tuple(
                        (base + more, growth) for (base, growth), more in zip(line.by_class, added, strict=False)
                    ),
                }
            )
            for line in self.by_micro_batch
        )
        return self.model_copy(
            update={
                "bytes": self.bytes + in_all,
                "by_class": {kind: num_bytes + change.get(kind, 0) for kind, num_bytes in self.by_class.items()},
                "before": self.before + in_all,
                "held": {kind: num_bytes + change[kind] for kind, num_bytes in self.held.items()},
                "by_micro_batch": tuple(lines),
            }
        )

    def at(self, ratio: Fraction) -> "Peak":
        """Return the peak at another micro-batch, of lines that have their classes. ratio: that over this peak's."""
        line = max(self.by_micro_batch, key=lambda line: line.base + line.growth * ratio)
        at_peak = [max(0, int(base + growth * ratio)) for base, growth in line.by_class]
        by_class = dict(zip(PEAK_CLASSES, at_peak, strict=True))
        num_bytes = int(line.base + line.growth * ratio)
        by_class["temporary"] += num_bytes - sum(at_peak)
        lines = tuple(each.model_copy(update={"growth": int(each.growth * ratio)}) for each in self.by_micro_batch)
        return self.model_copy(update={"bytes": num_bytes, "by_class": by_class, "by_micro_batch": lines})
