"""Write the site's pages as plain Markdown: docs/*.md, what they link to, and the references made from code and contracts.

    python -m docs.site.prepare build/docs/pages

`make docs` runs it before MkDocs. Links that leave docs/ become pages or copies of the files, so a site needs no network and
no repository. The references are made of the frozen documents: the JSON schema of a job, and OpenAPI.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES: Mapping[str, str] = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
    "benchmarks/RESULTS.md": "results.md",
} | {f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}
"""The page that each Markdown file becomes. Files that only a page links to are copied below files/."""

LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
TESTER = re.compile(r" \(\[Test\]\([^)]*\)\)")
"""A link of jsonschema2md to a tester of regular expressions on somebody's site."""

LIBRARY = {
    "A model at a level": (
        "initialize",
        "memory_report",
        "plain_state_dict",
        "exact_state_dict",
        "fp8_statistics",
        "follow_optimizer",
    ),
    "Several ranks": ("parallelize",),
    "Less memory": (
        "fuse_loss",
        "keep_activations_in_fp8",
        "keep_residual_in_bf16",
        "release_gradients",
        "offload_optimizer",
        "compile_blocks",
    ),
    "Models in and out": ("load_pretrained", "draw_model", "export", "save_checkpoint", "load_checkpoint", "AveragedModel"),
    "Other people's loops": ("OctetArguments", "prepare_trainer", "carry_model_state"),
    "The client of a service": ("Client",),
}
"""The public names by section. A test compares them with `octet.__all__`."""


def main(folder: Path) -> None:
    """Write all pages below a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "reference").mkdir(parents=True)
    for source, page in PAGES.items():
        (folder / page).write_text(with_links_of_the_site((ROOT / source).read_text(), source, page, folder))
    (folder / "reference/library.md").write_text(library())
    (folder / "reference/job.md").write_text(job_file())
    (folder / "reference/api.md").write_text(api(folder))


def with_links_of_the_site(text: str, source: str, page: str, folder: Path) -> str:
    """Return a page whose relative links lead to pages, or to copies of files. Raises FileNotFoundError for a dead one."""

    def moved(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        if not target or ":" in target:
            return match[0]
        path = os.path.normpath(Path(source).parent / target)
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{source} links to {match[2]}, and {path} does not exist. Change the link.")
        new = PAGES.get(path) or copied(path, folder)
        return f"{match[1]}{os.path.relpath(new, Path(page).parent)}{hash_sign}{anchor}{match[3]}"

    parts = FENCE.split(text)
    fences = [*FENCE.findall(text), ""]
    return "".join(LINK.sub(moved, part) + fence for part, fence in zip(parts, fences, strict=True))


def copied(path: str, folder: Path) -> str:
    """Copy a file that a page links to; a text that browsers do not show is given the name of one that they do."""
    name = f"files/{path}" if Path(path).suffix in (".png", ".ipynb") else f"files/{path}.txt"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / path, folder / name)
    return name


def library() -> str:
    """Return the page of the library, which mkdocstrings fills from docstrings."""
    sections = [f"## {title}\n\n" + "\n\n".join(f"::: octet.{name}" for name in names) for title, names in LIBRARY.items()]
    start = "# The library\n\nEach name is imported from `octet`: `from octet import initialize`.\n\n"
    return start + "\n\n".join(sections) + "\n"


def job_file() -> str:
    """Return the page of a job's fields, from its JSON schema."""
    import jsonschema2md

    schema: dict[str, Any] = json.loads((ROOT / "tests/api_schemas/schemas.json").read_text())["JobSpec"]
    schema["$defs"]["JsonValue"] = {"description": "Any JSON value."}  # an empty schema would get no entry to link to
    schema["title"] = "The job file"
    schema["description"] = "Every field of the document that `POST /v1/jobs` and `octet submit` take, from its JSON schema."
    return TESTER.sub("", "".join(jsonschema2md.Parser().parse_schema(schema)))


def api(folder: Path) -> str:
    """Return the page of the REST API, from the OpenAPI document: answers that are no problem, without internal routes."""
    from openapidocs.mk.generate import generate_document

    document: dict[str, Any] = json.loads((ROOT / "tests/service/openapi.json").read_text())
    document["paths"] = {path: item for path, item in document["paths"].items() if not path.startswith("/internal/")}
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"] = {code: answer for code, answer in operation["responses"].items() if code < "3"}
    source, page = folder / "reference/openapi.json", folder / "reference/made.md"
    source.write_text(json.dumps(document))
    generate_document(str(source), str(page), "MARKDOWN")
    text = page.read_text()
    page.unlink()
    source.unlink()
    start = (
        "# The REST API\n\nA server describes itself at `/openapi.json`. Each request may also get a problem document "
        "(RFC 9457, schema `Problem` below) with a stable `code`.\n"
    )
    return start + text.partition("\n# Octet ")[2].partition("\n")[2]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
