"""Text that tests generate themselves, so that no test depends on files of the machine.

Sentences come from a small grammar: a model learns from them that letters form words and words form sentences. The numbers
behind them come from a linear congruential generator, which is the same with every version of Python.
"""

from collections.abc import Iterator
from pathlib import Path


def _words(spaced: str) -> tuple[str, ...]:
    return tuple(spaced.split())


_NOUNS = _words(
    "river mountain letter window machine captain garden question island market teacher engine harbour forest signal "
    "weight gradient shadow bridge village winter summer kitchen library station doctor painter sailor miller"
)
_VERBS = _words(
    "carries follows measures remembers crosses answers builds repairs watches describes finds loses opens paints "
    "visits explains collects rounds divides returns"
)
_ADJECTIVES = _words("old quiet narrow bright heavy distant patient careful broken early hidden northern simple warm")
_PLACES = ("near the coast", "behind the hill", "in the morning", "after the rain", "under the bridge", "before noon")
_LINKS = ("and", "but", "because", "while", "although")


def write_corpus(folder: Path, num_files: int = 8, num_sentences: int = 400) -> Path:
    """Write `part_0.txt` … of about 50 bytes per sentence to a folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        (folder / f"part_{number}.txt").write_text(text(num_sentences, seed=number), encoding="utf-8")
    return folder


def text(num_sentences: int, seed: int = 0) -> str:
    """Generate sentences, five per line."""
    choices = _choices(seed)
    sentences = [_sentence(choices) for _ in range(num_sentences)]
    lines = [" ".join(sentences[start : start + 5]) for start in range(0, num_sentences, 5)]
    return "\n".join(lines) + "\n"


def _sentence(choices: Iterator[int]) -> str:
    words = _clause(choices)
    if next(choices) % 3 == 0:
        words = [*words, _pick(_LINKS, choices), *_clause(choices)]
    if next(choices) % 2 == 0:
        words = [*words, _pick(_PLACES, choices)]
    return " ".join(words).capitalize() + "."


def _clause(choices: Iterator[int]) -> list[str]:
    return [*_noun_phrase(choices), _pick(_VERBS, choices), *_noun_phrase(choices)]


def _noun_phrase(choices: Iterator[int]) -> list[str]:
    adjective = [_pick(_ADJECTIVES, choices)] if next(choices) % 2 else []
    return ["the", *adjective, _pick(_NOUNS, choices)]


def _pick(words: tuple[str, ...], choices: Iterator[int]) -> str:
    return words[next(choices) % len(words)]


def _choices(seed: int) -> Iterator[int]:
    """Yield numbers of Knuth's MMIX generator; only its upper bits are random enough."""
    state = 2 * seed + 1
    while True:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        yield state >> 33
