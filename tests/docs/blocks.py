"""Read the fenced blocks of a language from a document, and the commands in its `sh` blocks one by one."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")))


def blocks(document: str, language: str) -> list[str]:
    """Return the text of each block of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(document: str) -> list[str]:
    """Return each command of the `sh` blocks without its comment. A command over several lines is one command."""
    found: list[str] = []
    for block in blocks(document, "sh"):
        pending = ""
        for line in block.splitlines():
            pending += re.sub(r"(^|\s)#\s.*$", "", line).rstrip()
            if pending and not _goes_on(pending):
                found.append(pending)
                pending = ""
            elif pending:
                pending += "\n"
        assert not pending, f"{document} ends a block in the middle of a command: {pending}"
    return found


def _goes_on(text: str) -> bool:
    """Return True if the next line belongs to the command: it ends with a backslash or inside quotes."""
    try:
        shlex.split(text)
    except ValueError:
        return True
    return text.endswith("\\")
