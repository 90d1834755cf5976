"""Globs keep their meaning and take no longer than name × glob, whatever they are."""

import random
import re
import time

import pytest

from octet.api_schemas.data.text import matches

PARTS = ("**/", "**", "*", "?", "a", "b", "ab", ".", "/", "\n", "é")


def by_regular_expression(glob: str, name: str) -> bool:
    """The rule as it was written first."""
    translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return re.fullmatch("".join(translated.get(part, re.escape(part)) for part in parts), name) is not None


def test_a_glob_means_what_the_regular_expression_means() -> None:
    draw = random.Random(0)
    globs = ["".join(draw.choices(PARTS, k=draw.randint(1, 6))) for _ in range(300)]
    names = ["".join(draw.choices("aab/.\né", k=draw.randint(0, 8))) for _ in range(100)]
    num_matches = 0
    for glob in [*globs, "**/*.py", "***", "a**/b", "*?*"]:
        for name in [*names, "a/b/c.py", "c.py", "ab", "a/\n"]:
            num_matches += (expected := by_regular_expression(glob, name))
            assert matches(glob, name) == expected, (glob, name)
    assert num_matches > 1000


@pytest.mark.parametrize(
    ("glob", "name"),
    [
        ("**/" * 40 + "q", "a/" * 2000 + "b"),
        ("*a" * 127 + "!", "a" * 4096),
        ("**a" * 85, "a" * 4095 + "b"),
        ("*" * 256, "a" * 4096),
        ("?" * 256, "a" * 255),
    ],
)
def test_no_glob_takes_long(glob: str, name: str) -> None:
    """The longest name with the worst globs: by regular expression each takes longer than the universe has existed."""
    began = time.process_time()
    matches(glob, name)
    assert time.process_time() - began < 1
