"""The bytes alive after each op of a step, in all and by class."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octet.api_schemas.peak import PEAK_CLASSES
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.metrics.memory import held_tensors
from octet.worker.planning.fake_gpu import DEVICE_TYPE, see_within
from octet.worker.planning.live_bytes import LiveBytes, tensors_in

_name_of, _gradient_of = functools.cache(str), operator.attrgetter("grad")
BEFORE = -1
"""The phase in which storages that are alive at the step's start were made."""


class Moment(NamedTuple):
    """The bytes alive after an op of the step, in all and in the order of PEAK_CLASSES."""

    op: str
    num_bytes: int
    by_class: Sequence[int]


class Curve(LiveBytes):
    """Records what is alive after each op of a step.

    What model and optimizer hold has its class of `memory_report`, a gradient from the op after which it is one. Of the rest,
    logits have the vocabulary's words as their last dimension, activations were made in a forward pass and live until its
    end, communication is what collectives read and write and the weights that blocks gather, and all else is temporary.
    """

    def __init__(self, num_words: int | None) -> None:
        """num_words: of the vocabulary on this rank; None for a model without one."""
        super().__init__(see_within=see_within, device_type=DEVICE_TYPE)
        self.num_words = num_words
        self._by_phase: list[list[tuple[str, int]]] = []
        """By phase: ops, and the bytes alive after each."""
        self._kinds: list[str] = []
        """By phase: forward, backward or update."""
        self.divides_backward = False
        """A pass of each micro-batch is a phase, also where backward passes follow each other."""
        self._newest_task = -1
        self._num_ops = 0
        self._changes: list[tuple[int, int, int]] = []
        """The ops before it, the number of a storage, and the bytes by which it changed."""
        self._classes: list[str] = []
        self._made_in: list[int] = []
        """Phases, by the number of a storage, as its class."""
        self._numbers: dict[int, int] = {}
        """The storages that are alive, by key: their numbers."""
        self._gathered: dict[int, int] = {}
        """The number under which growth of a storage counts that was alive before, by key."""
        self._parameters: list[nn.Parameter] = []
        self._gradients: list[int] = []
        """The identity of each parameter's gradient, when it was last looked at."""
        self._num_looked_at, self._is_new = 0, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to keep the compiler out takes as long as a short op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.follow(func, types, args, kwargs)

    def begin_step(self, model: nn.Module, optimizer: Any) -> None:
        """Begin a step with what is alive."""
        pieces: dict[Tensor, nn.Parameter] = getattr(optimizer, "pieces", {})
        self._parameters = list(dict.fromkeys([*model.parameters(), *pieces.values()]))
        self._gradients = [id(None)] * len(self._parameters)
        kinds = {tensor.untyped_storage()._cdata: kind for kind, tensor in held_tensors(model, optimizer)}
        for key, allocation in self.live.items():
            self._numbers[key] = self._add(kinds.get(key, "other"), BEFORE)
            self._changes.append((0, self._numbers[key], allocation.num_bytes))

    def begin(self, kind: str) -> None:
        """Begin a phase: "forward", "backward" or "update". The first backward op after a forward pass begins one, too."""
        if self._kinds and self._kinds[-1] == "forward":
            for number in self._numbers.values():
                if self._made_in[number] == len(self._kinds) - 1 and self._classes[number] in ("temporary", "communication"):
                    self._classes[number] = "activations"
        self._kinds.append(kind)
        self._by_phase.append([])

    def phases(self) -> list[list[Moment]]:
        """Return the moments of each phase so far."""
        place_of = {kind: place for place, kind in enumerate(PEAK_CLASSES)}
        totals, changes, position = [0] * len(PEAK_CLASSES), self._changes, 0
        found: list[list[Moment]] = []
        num_ops = 0
        for phase in self._by_phase:
            found.append([])
            for op, num_bytes in phase:
                while position < len(changes) and changes[position][0] <= num_ops:
                    _, number, change = changes[position]
                    totals[place_of[self._classes[number]]] += change
                    position += 1
                found[-1].append(Moment(op, num_bytes, tuple(totals)))
                num_ops += 1
        return found

    def count(self, key: int, change: int) -> None:
        super().count(key, change)
        if not self._by_phase:
            return
        is_alive = key in self.live
        if key not in self._numbers:
            self._numbers[key] = self._add("temporary", len(self._by_phase) - 1)
        number = self._numbers[key]
        if is_alive and self._made_in[number] == BEFORE:
            if key not in self._gathered:
                self._gathered[key] = self._add("communication", BEFORE)
            number = self._gathered[key]
        self._changes.append((self._num_ops, number, change))
        if not is_alive:
            del self._numbers[key]
            self._gathered.pop(key, None)

    def origin_of(self, tensor: Tensor, func: Any) -> str:
        return ""  # classes of moments say more

    def before_op(self) -> None:
        if self._kinds and (task := torch._C._current_graph_task_id()) != -1:
            if self._kinds[-1] == "forward" or (self.divides_backward and task > self._newest_task):
                self.begin("backward")
            self._newest_task = max(task, self._newest_task)

    def after_op(self, func: Any, args: Any, result: Any) -> None:
        if not self._by_phase:
            return
        if func.namespace == "c10d":
            self._mark(tensors_in((args, result)), "communication")
        elif self.num_words is not None:
            self._mark((each for each in tensors_in(result) if each.shape[-1:] == (self.num_words,)), "logits")
        if len(self._by_phase) > 1 and (self._is_new or len(self._changes) > self._num_looked_at):
            self._is_new = len(self._changes) > self._num_looked_at
            self._num_looked_at = len(self._changes)
            self._mark_gradients()
        self._by_phase[-1].append((_name_of(func), self.num_bytes))
        self._num_ops += 1

    def _add(self, kind: str, made_in: int) -> int:
        """Return the number of one more storage."""
        self._classes.append(kind)
        self._made_in.append(made_in)
        return len(self._classes) - 1

    def _mark(self, tensors: Iterable[Tensor], kind: str, instead_of: Sequence[str] = ("temporary",)) -> None:
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None and self._made_in[number] != BEFORE and self._classes[number] in instead_of:
                self._classes[number] = kind

    def _mark_gradients(self) -> None:
        """Give gradients that parameters did not have before their class."""
        gradients = [*map(_gradient_of, self._parameters)]  # after each op of a backward pass, so it has to be fast
        identities = [*map(id, gradients)]
        if identities == self._gradients:
            return
        for gradient, identity, known in zip(gradients, identities, self._gradients, strict=True):
            if identity == known:
                continue
            if isinstance(gradient, Float8Gradient):
                self._mark([gradient.codes], "gradients", PEAK_CLASSES)
                self._mark([gradient.dequant_scale], "scales", PEAK_CLASSES)
            elif gradient is not None:
                self._mark([gradient], "gradients", PEAK_CLASSES)
        self._gradients = identities
