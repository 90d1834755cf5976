"""One rule of what can be combined: the fields, when it applies, what is allowed, what to change, and why.

Rules are data. A path such as `parallelism.tensor` is looked up in a job, or in any part of one that has these fields, so
the same rule checks a submitted job, a rank's configuration and a call of the library, and is printed in the docs.
"""

import itertools
import math
import operator
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from octet.api_schemas.base import SpecConflict

Relation = Literal["is", "is not", "one of", "none of", "above", "at least", "at most", "below", "multiple of", "divisor of"]

_RELATIONS: Mapping[Relation, Callable[[Any, Any], bool]] = {
    "is": operator.eq,
    "is not": operator.ne,
    "one of": lambda value, values: value in values,
    "none of": lambda value, values: value not in values,
    "above": operator.gt,
    "at least": operator.ge,
    "at most": operator.le,
    "below": operator.lt,
    "multiple of": lambda value, divisor: value % divisor == 0,
    "divisor of": lambda value, number: number % value == 0,
}


class Facts(dict[str, Any]):
    """The values of a job's fields by path, each looked up once.

    known: values by path, in place of those of the job.
    """

    def __init__(self, job: object = None, known: Mapping[str, object] | None = None) -> None:
        super().__init__(known or {})
        self.job = job

    def __missing__(self, path: str) -> Any:
        parent, _, name = path.rpartition(".")
        value = self[path] = getattr(self[parent] if parent else self.job, name)
        return value

    def hold(self, conditions: "Iterable[Condition]") -> bool:
        """Return True if all statements are true of the job. One that follows a false one is not looked at."""
        for condition in conditions:  # noqa: SIM110  half the time of `all`, at each submission
            if not condition.holds(self):
                return False
        return True


class _Texts(string.Formatter):
    """Writes texts that name paths in braces."""

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """Look a path up. The base class would look for its first part and take attributes of that."""
        return kwargs[field_name], field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        """Write a list with commas, and another value as Python does."""
        return ", ".join(map(str, value)) if isinstance(value, tuple) else format(value, format_spec)


_TEXTS = _Texts()


@dataclass(frozen=True)
class Amount:
    """A number that follows from fields: `times` · the product of `factors` / the product of `divisors`."""

    factors: tuple[str, ...]
    divisors: tuple[str, ...] = ()
    times: int = 1

    def value(self, facts: Facts) -> int:
        """Return the number."""
        return self.times * self._product(self.factors, facts) // self._product(self.divisors, facts)

    def name(self, facts: Facts | None = None) -> str:
        """Return the formula; given facts, without the fields that are 1 and have no effect."""
        factors = self._with_effect(self.factors, facts) or list(self.factors[:1])
        times = [str(self.times)] if self.times > 1 else []
        return " / ".join([" · ".join([*times, *factors]), *self._with_effect(self.divisors, facts)])

    @staticmethod
    def _product(paths: tuple[str, ...], facts: Facts) -> int:
        return math.prod(facts[path] for path in paths)

    @staticmethod
    def _with_effect(paths: tuple[str, ...], facts: Facts | None) -> list[str]:
        return [path for path in paths if facts is None or facts[path] != 1]


@dataclass(frozen=True)
class Field:
    """The value of another field."""

    path: str

    def value(self, facts: Facts) -> Any:
        """Return the value."""
        return facts[self.path]


@dataclass(frozen=True)
class Condition:
    """A statement about a field of a job. value: a constant, another field, or a number that follows from fields."""

    path: str
    relation: Relation
    value: object

    @cached_property
    def holds(self) -> Callable[[Facts], bool]:
        """The function that returns True if the statement is true of a job."""
        path, relation, value = self.path, _RELATIONS[self.relation], self.value
        if isinstance(value, Amount | Field):
            return lambda facts: relation(facts[path], value.value(facts))
        return lambda facts: relation(facts[path], value)

    def bound(self, facts: Facts) -> Any:
        """Return the value that the field is compared with."""
        return self.value.value(facts) if isinstance(self.value, Amount | Field) else self.value


@dataclass(frozen=True)
class Rule:
    """If all of `when` hold, `must` has to hold; else `field` is refused.

    The texts may name paths in braces, and with them {value} and {name}: the number, and the formula, that `must` compares
    with. allowed: what the field may be. change: what a user should do. why: the reason. got: what is shown as found, by
    default the field's value. each: a path of sizes by name; the rule is for each of them, as {key} and {size}.
    """

    field: str
    must: Condition
    allowed: str
    change: str
    when: tuple[Condition, ...] = ()
    why: str = ""
    got: str = ""
    each: str = ""

    def conflicts(self, facts: Facts) -> Iterator[SpecConflict]:
        """Yield the conflict of a job that breaks the rule; with `each` one for each size that does."""
        if not self.each:
            yield self._conflict(facts)
            return
        for key, size in facts[self.each].items():
            if not _RELATIONS[self.must.relation](size, self.must.bound(facts)):
                yield self._conflict(facts, key=key, size=size)

    def reason(self, facts: Facts) -> str:
        """Return `why` for a job."""
        return _TEXTS.vformat(self.why, (), facts)

    def _conflict(self, facts: Facts, **names: object) -> SpecConflict:
        amount = self.must.value
        name = amount.name(facts) if isinstance(amount, Amount) else ""
        named = Facts(known={**facts, **names, "value": self.must.bound(facts), "name": name}, job=facts.job)
        allowed = f"{self.allowed}: {self.why}" if self.why else self.allowed
        field, got, allowed, change = (_TEXTS.vformat(text, (), named) for text in (self.field, self.got, allowed, self.change))
        return SpecConflict(field, got if self.got else facts[field], allowed, change)


class Table:
    """Rules in their order. Neighbours with the same first condition are skipped together where it does not hold."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules
        groups = itertools.groupby(rules, key=lambda rule: rule.when[:1])
        self._groups = tuple(
            (_tests_of(first), tuple((_tests_of(rule.when[1:]), rule.must.holds, rule) for rule in group))
            for first, group in groups
        )

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def conflicts(self, facts: Facts) -> Iterator[SpecConflict]:
        """Yield every conflict of a job with the rules, in their order."""
        # Each submission takes this loop: functions are looked up when the table is made, and no generator is.
        for first, rules in self._groups:
            if first and not first[0](facts):
                continue
            for when, is_kept, rule in rules:
                for holds in when:
                    if not holds(facts):
                        break
                else:
                    if rule.each or not is_kept(facts):
                        yield from rule.conflicts(facts)

    def first_conflict(self, facts: Facts) -> SpecConflict | None:
        """Return the first conflict of a job with the rules, or None."""
        return next(self.conflicts(facts), None)

    def check_part(self, path: str, part: object) -> None:
        """Raise the error of the first rule that a part of a job breaks by itself. path: of the part in a job."""
        if conflict := self.first_conflict(Facts(known={path: part})):
            raise conflict.as_refusal(path)


def _tests_of(conditions: Iterable[Condition]) -> tuple[Callable[[Facts], bool], ...]:
    return tuple(condition.holds for condition in conditions)


def below(when: Condition | tuple[Condition, ...], *rules: Rule) -> tuple[Rule, ...]:
    """Return the rules of one subject: each applies only if `when` holds too."""
    first = when if isinstance(when, tuple) else (when,)
    return tuple(replace(rule, when=(*first, *rule.when)) for rule in rules)


def equals(path: str, value: object) -> Condition:
    """The field has this value."""
    return Condition(path, "is", value)


def differs(path: str, value: object) -> Condition:
    """The field has another value."""
    return Condition(path, "is not", value)


def one_of(path: str, *values: object) -> Condition:
    """The field has one of these values."""
    return Condition(path, "one of", values)


def none_of(path: str, *values: object) -> Condition:
    """The field has none of these values."""
    return Condition(path, "none of", values)


def above(path: str, value: float) -> Condition:
    """The field is larger."""
    return Condition(path, "above", value)


def multiple_of(path: str, *factors: str, times: int = 1) -> Condition:
    """The field is a multiple of the product of these fields."""
    return Condition(path, "multiple of", Amount(factors, times=times))
