"""Rows of several documents: which documents share a row, by best fit, the longest first.

Each document goes to the fullest row that still has room for it, so rows end nearly full (best-fit decreasing, Johnson 1973).
The rows depend on the lengths and their order alone, so every rank makes the same ones.
"""

from collections.abc import Sequence

import numpy as np


class Rows:
    """Numbers of documents, row by row, 8 bytes each."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._numbers = np.array([number for row in rows for number in row], dtype=np.int64)
        self._ends = np.cumsum([0, *map(len, rows)])

    @classmethod
    def of_one_each(cls, numbers: Sequence[int]) -> "Rows":
        """Return a row for each document."""
        rows = cls([])
        rows._numbers, rows._ends = np.array(numbers, dtype=np.int64), np.arange(len(numbers) + 1)
        return rows

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def most_documents(self) -> int:
        """Return the most documents of a row."""
        return int(np.diff(self._ends).max(initial=0))

    def __getitem__(self, row: int) -> np.ndarray:
        """Return the numbers of a row's documents, int64."""
        return self._numbers[self._ends[row] : self._ends[row + 1]]


def pack(numbers: Sequence[int], lengths: np.ndarray, capacity: int) -> Rows:
    """Divide documents among rows of at most `capacity` tokens.

    numbers: of the documents. lengths: tokens of each document, by its number; all from 1 to `capacity`.
    """
    rows: list[list[int]] = []
    rows_with_room: dict[int, list[int]] = {}
    rooms = 0  # bit n is set while a row has room for n tokens
    order = np.argsort(-lengths[np.asarray(numbers, dtype=np.int64)], kind="stable")
    for place in order.tolist():
        number = numbers[place]
        length = int(lengths[number])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        left = room - length
        if left:
            rows_with_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return Rows(rows)
