"""Docstrings, comments, messages and documents avoid the wording that the house refuses: fragments and verbs of speech."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.kit.source import parse

ROOT = Path(__file__).parent.parent
FIRST_WORDS = re.compile(r"\s*(Whether|What|As|How|Where|Of|That)\b")
REFUSED = re.compile(r"\b(?:of which|anew|told|as it came|the usual|for ever)\b|(?-i:\bBeside\b)", re.IGNORECASE)
"""`Beside` at the head of a sentence is taken for "apart from"; what lies beside a table may be said so."""
MIGHT_OFFEND = re.compile(
    r"of\W+which|anew|told|as\W+it\W+came|the\W+usual|for\W+ever|beside|whose|[\"']\s*(Whether|What|As|How|Where|Of|That)\b",
    re.IGNORECASE,
)
"""What a module has somewhere if it offends. Most have not, and are not parsed."""
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\n|\n(?=[-*|#])")
DOCUMENTS = {".md"}
COMMENTED = {".yaml", ".yml", ".toml", ".sh", ".cfg", ""}
NOT_OURS = {"LICENSE", "CHANGELOG.md", "docs/log.md", "tests/test_prose.py"}
"""The changelog and the log keep the wording of their day; this file names what it refuses."""


def offences(text: str) -> list[str]:
    """Return the refused phrases of a text, and its sentences with two relative clauses of possession."""
    flat = [" ".join(sentence.split()) for sentence in SENTENCE.split(text)]
    twice = [sentence[:60] for sentence in flat if len(re.findall(r"\bwhose\b", sentence, re.IGNORECASE)) > 1]
    return [match[0] for match in REFUSED.finditer(" ".join(text.split()))] + twice


def of_python(source: str) -> list[str]:
    """Return the offences of a module: its docstrings' first words, and what its strings and comments say."""
    found: list[str] = []
    if not MIGHT_OFFEND.search(source):
        return found
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += offences(node.value)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first = FIRST_WORDS.match(node.value.value)
            found += [f"{first[1]} …"] if first else []
    return found + offences(comments(source))


def comments(source: str) -> str:
    """Return a module's comments; those of consecutive lines are one text, others are apart."""
    lines: list[str] = []
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            apart = [] if token.start[0] == before + 1 else [""]
            lines += [*apart, token.string.lstrip("# ")]
            before = token.start[0]
    return "\n".join(line or "\n" for line in lines)


def of_document(text: str) -> list[str]:
    """Return the offences of a Markdown text outside its code."""
    return offences(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def of_commented(text: str) -> list[str]:
    """Return the offences of the comments of a configuration."""
    return offences("\n".join(line.strip("# ") for line in text.splitlines() if line.lstrip().startswith("#")))


def sources() -> Iterator[tuple[str, list[str]]]:
    """Yield each of the repository's texts with its offences."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in sorted(listed.stdout.splitlines()):
        path = ROOT / name
        if name in NOT_OURS or path.is_symlink() or not path.is_file():
            continue
        if path.suffix == ".py":
            yield name, of_python(path.read_text())
        elif path.suffix in DOCUMENTS:
            yield name, of_document(path.read_text())
        elif path.suffix in COMMENTED:
            yield name, of_commented(path.read_text())


def test_no_text_has_refused_wording() -> None:
    assert {name: found for name, found in sources() if found} == {}
