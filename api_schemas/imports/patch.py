"""The part of a job that a file of another project describes, and a reader of such files that forgets no setting."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf, isfinite, prod
from typing import Any, NamedTuple

WORDS_FOR_NOTHING = ("no", "none", "false", "0")
"""Words for nothing in the files of others, next to null, false, 0 and what is empty."""


@dataclass(frozen=True)
class LeftOver:
    """A setting that the patch does not have. matters: it changes what is trained, or the memory that training takes."""

    setting: str
    reason: str
    matters: bool


class Patch:
    """Fields of a job, and the settings of the file that became none of them."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = {}
        self.left: list[LeftOver] = []

    @property
    def left_something_that_matters(self) -> bool:
        """True if the job would train otherwise than the file says, or take other memory."""
        return any(left.matters for left in self.left)

    def set(self, field: str, value: Any) -> None:
        """Set a field of the job by its path, such as training.steps."""
        *parents, name = field.split(".")
        part = self.job
        for parent in parents:
            part = part.setdefault(parent, {})
        part[name] = value

    def get(self, field: str) -> Any:
        """Return a field that was set; None for one that was not."""
        part: Any = self.job
        for name in field.split("."):
            part = part.get(name) if isinstance(part, Mapping) else None
        return part

    def leave(self, setting: str, value: Any, reason: str, *, matters: bool) -> None:
        """Note a setting with its value as left over."""
        self.left.append(LeftOver(f"{setting}: {_short(value)}", reason, matters))

    @property
    def num_data_ranks(self) -> int | None:
        """The ranks that read samples of their own; None while the number of ranks is not known."""
        workers = self.get("resources.workers")
        degrees = [self.get(f"parallelism.{name}") or 1 for name in ("tensor", "pipeline", "context")]
        if not isinstance(workers, int) or not all(isinstance(degree, int) for degree in degrees):
            return None
        return max(1, workers // prod(degrees))


class Section:
    """The settings of one part of a file. Each is taken once; what nobody takes is left over as unknown."""

    def __init__(self, values: Mapping[str, Any], patch: Patch, name: str = "", prefix: str = "") -> None:
        """name: where the part lies in the file. prefix: what the file writes in front of each of its settings."""
        self.patch, self.name, self.prefix = patch, name, prefix
        self._values = {str(key).removeprefix(prefix): value for key, value in values.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def keys(self) -> tuple[str, ...]:
        """The settings that nobody has taken yet."""
        return tuple(self._values)

    def take(self, key: str) -> Any:
        """Return a setting, which is then read; None for one that is missing or says nothing."""
        value = self._values.pop(key, None)
        return None if says_nothing(value) else value

    def take_raw(self, key: str, default: Any = None) -> Any:
        """Return a setting as it stands, false and 0 too; the default for one that is missing."""
        return self._values.pop(key, default)

    def whole(self, key: str) -> int | None:
        """Return a whole number from 1 up; None for a setting that says nothing. ValueError for others."""
        value = self.take(key)
        if value is None:
            return None
        text = str(value)
        if isinstance(value, bool) or not text.isdecimal():
            raise ValueError(f"{self.path(key)} is {value!r}; allowed: a whole number from 1 up. Change it.")
        return int(text)

    def number(self, key: str, default: float) -> float:
        """Return a number, written as text too; the default for one that is missing or null. ValueError for others."""
        value = self.take_raw(key)
        if value is None:
            return default
        try:
            number = value if isinstance(value, int | float) and not isinstance(value, bool) else float(str(value))
        except ValueError:
            number = inf
        if not isfinite(number):
            raise ValueError(f"{self.path(key)} is {value!r}; allowed: a number. Change it.")
        return int(number) if number == int(number) and isinstance(default, int) else number

    def names(self, key: str, default: Collection[str] = ()) -> list[str]:
        """Return a list of names; the default for one that is missing. ValueError for others."""
        value = self.take_raw(key, list(default))
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{self.path(key)} is {value!r}; allowed: a list of names. Change it.")
        return value

    def is_on(self, key: str) -> bool:
        """Return a switch. ValueError for what is none."""
        value = self.take(key)
        if value is None:
            return False
        if str(value).lower() not in ("true", "yes", "1"):
            raise ValueError(f"{self.path(key)} is {value!r}; allowed: true, false. Change it.")
        return True

    def section(self, key: str, prefix: str = "") -> "Section":
        """Return the part below a setting, without settings where it is missing. ValueError for what has no settings."""
        value = self.take(key) or {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.path(key)} is {value!r}; allowed: a part with settings of its own. Change it.")
        return Section(value, self.patch, self.path(key), prefix)

    def copy(self, key: str, field: str) -> None:
        """Set a field of the job to a setting that means the same; 0 and false too."""
        value = self.take_raw(key)
        if value is not None:
            self.patch.set(field, value)

    def leave(self, key: str, reason: str, *, matters: bool) -> None:
        """Leave a setting over, unless it says nothing."""
        value = self.take(key)
        if value is not None:
            self.patch.leave(self.path(key), value, reason, matters=matters)

    def leave_all(self, keys: Collection[str], reason: str, *, matters: bool = False) -> None:
        """Leave settings over in one line."""
        taken = {key: self.take(key) for key in keys}
        named = ", ".join(f"{self.prefix}{key}" for key, value in taken.items() if value is not None)
        if named:
            where = f"{self.name}: " if self.name else ""
            self.patch.left.append(LeftOver(f"{where}{named}", reason, matters))

    def drop(self, keys: Collection[str]) -> None:
        """Read settings that mean what every job does, or nothing for training."""
        for key in keys:
            self._values.pop(key, None)

    def finish(self, project: str) -> None:
        """Leave over what nobody has taken."""
        for key in self.keys:
            self.leave(key, f"no setting of {project} that this version of octet knows", matters=True)

    def path(self, key: str) -> str:
        """Return the place of a setting in its file."""
        return f"{self.name}.{self.prefix}{key}" if self.name else f"{self.prefix}{key}"


class Given(NamedTuple):
    """Numbers that the user gives, which many files lack; each takes the place of the file's.

    workers: the number of processes. batch_size: samples of one process and forward pass. steps: of the optimizer.
    """

    workers: int | None = None
    batch_size: int | None = None
    steps: int | None = None


NOTHING = Given()


class Batch(NamedTuple):
    """The samples of a step as a file counts them. per_rank: of one forward pass. accumulated: passes of a rank in a step."""

    per_rank: int | None
    accumulated: int | None
    whole: int | None = None
    names: tuple[str, str, str] = ("the batch of a process", "gradient_accumulation_steps", "the whole batch")


def set_batch(patch: Patch, batch: Batch) -> None:
    """Set both batch sizes of a job, after its ranks and degrees. Nothing is guessed: what is missing is left over.

    Raises ValueError for three numbers that contradict one another.
    """
    per_rank, accumulated, whole, names = batch
    num_data_ranks = patch.num_data_ranks
    product = per_rank * (accumulated or 1) * num_data_ranks if per_rank and num_data_ranks else None
    if whole is not None and product is not None and accumulated is not None and whole != product:
        raise ValueError(
            f"{names[2]} is {whole}; allowed: {product}, which is {names[0]} {per_rank} · {names[1]} {accumulated} · "
            f"{num_data_ranks} ranks that read samples. Change one of them."
        )
    if whole is None and product is None:
        _leave_batch(patch, batch)
        return
    patch.set("training.global_batch_size", whole or product)
    if per_rank is not None:
        patch.set("training.micro_batch_size", per_rank)
    elif accumulated is not None and accumulated > 1:
        _divide(patch, batch)


def _leave_batch(patch: Patch, batch: Batch) -> None:
    if batch.per_rank is not None:
        said = batch.per_rank if batch.accumulated in (None, 1) else f"{batch.per_rank}, {batch.names[1]}: {batch.accumulated}"
        reason = "the whole batch follows from the number of processes, which is not in this file: give --workers"
        patch.leave(batch.names[0], said, reason, matters=True)
    elif batch.accumulated is not None and batch.accumulated > 1:
        reason = "the batch of a process is not in this file: give --batch-size"
        patch.leave(batch.names[1], batch.accumulated, reason, matters=True)


def _divide(patch: Patch, batch: Batch) -> None:
    """Set the samples of a forward pass from those of a step."""
    assert batch.whole is not None
    assert batch.accumulated is not None
    num_data_ranks = patch.num_data_ranks
    if num_data_ranks is None:
        reason = "the samples of a forward pass follow from the number of processes, which is not in this file: give --workers"
        patch.leave(batch.names[1], batch.accumulated, reason, matters=True)
        return
    per_rank, rest = divmod(batch.whole, batch.accumulated * num_data_ranks)
    if rest:
        raise ValueError(
            f"{batch.names[2]} is {batch.whole}; allowed: a multiple of {batch.names[1]} {batch.accumulated} · "
            f"{num_data_ranks} ranks that read samples. Change one of them."
        )
    patch.set("training.micro_batch_size", per_rank)


def says_nothing(value: Any) -> bool:
    """Return True for what a file writes where it wants nothing."""
    return not value or str(value).lower() in WORDS_FOR_NOTHING


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(map(str, value))}}}"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
