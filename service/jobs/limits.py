"""Limits that a job sets itself: slot hours, hours, and cost at the price of its pool. Pure: numbers in, a verdict out."""

from collections.abc import Mapping
from typing import NamedTuple

from octet.service.jobs.file_checks import refuse
from octet.service.store.queue import Limits, Taken

Prices = Mapping[str, float]
"""The price of a slot hour, by pool, of the pools that have one."""
NO_PRICES: Prices = {}


class Reached(NamedTuple):
    """A limit that is reached. field: of `resources`. what: in words."""

    field: str
    what: str
    taken: float
    most: float

    @property
    def message(self) -> str:
        return f"it has taken {self.taken:.3g} of {self.most:.3g} {self.what}, its limit"


_WORDS = {"max_slot_hours": "slot hours", "max_hours": "hours", "max_cost": "in cost"}


def reached(limits: Limits, taken: Taken, price: float | None) -> Reached | None:
    """Return the first limit that a job has reached. None if it may go on.

    price: of a slot hour; without one a limit of cost cannot be reached, and `check_cost` refuses it.
    """
    values = {"max_slot_hours": taken.slot_hours, "max_hours": taken.hours}
    values |= {} if price is None else {"max_cost": taken.slot_hours * price}
    for field, value in values.items():
        most: float | None = getattr(limits, field)
        if most is not None and value >= most:
            return Reached(field, _WORDS[field], value, most)
    return None


def check_cost(max_cost: float | None, pool: str, prices: Prices) -> None:
    """Refuse a limit of cost in a pool without a price."""
    if max_cost is not None and pool not in prices:
        priced = ", ".join(prices) or "none of this server's"
        change = "Set resources.max_slot_hours instead, choose such a pool, or have the operator state its price."
        refuse(
            "resources.max_cost",
            f"{max_cost:g} in pool {pool}",
            f"a limit of cost in pools with slot_hour_price: {priced}",
            change,
        )
