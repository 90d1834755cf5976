"""Text that the tests make themselves, so that none depends on what a machine happens to have.

Sentences from a small grammar: a model learns from it that letters form words and words form sentences. The numbers behind
it are a linear congruential generator's, the same with every Python.
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
    """Fill a folder with `part_0.txt` … of about 50 bytes a sentence; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        (folder / f"part_{number}.txt").write_text(text(num_sentences, seed=number), encoding="utf-8")
    return folder


def text(num_sentences: int, seed: int = 0) -> str:
    """Sentences, five to a line."""
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
    """Knuth's MMIX generator; the upper bits are the good ones."""
    state = 2 * seed + 1
    while True:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        yield state >> 33
