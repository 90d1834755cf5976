"""Make the files of a release from a tag: wheel, sdist, images' build context, chart, SBOMs, changes, checksums.

    python deploy/release.py --tag v0.1.0 --out dist      the release; HEAD has to be the tag
    python deploy/release.py --out build/release          the same from HEAD, to see that it would work

All is made of what git has at HEAD; files that are not committed are left out. The wheel is built from the sdist. An SBOM
lists what a new environment holds after `pip install` of the wheel with the pinned versions, with licences (CycloneDX).
Nothing is uploaded.
"""

import argparse
import hashlib
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "octet-fp8"
OF_IMAGES = (
    *("pyproject.toml", "constraints.txt", "README.md", ".dockerignore", "deploy/docker"),
    *("api_schemas", "client", "octet", "service", "worker"),
)
"""Everything that the Dockerfile copies; a test compares them."""
ENVIRONMENTS = ("", "service", "service,worker")
"""Extras of the environments that a release has an SBOM of."""


class Refused(Exception):
    """The repository is not in the state of a release; the message says what to change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and make the files; exit status 1 with one sentence where that is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="", help="the tag to release; without one, HEAD is tried out")
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder")
    parser.add_argument("--sbom", action="append", metavar="EXTRAS", help=f"instead of an SBOM for each of {ENVIRONMENTS}")
    options = parser.parse_args(arguments)
    try:
        release(options.tag, options.out.resolve(), options.sbom or ENVIRONMENTS)
    except Refused as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def release(tag: str, out: Path, environments: Sequence[str]) -> None:
    """Write all files into a folder. Raises Refused."""
    version = tomllib.loads(at_head("pyproject.toml"))["project"]["version"]
    changes = section(at_head("CHANGELOG.md"), version if tag else "Unreleased")
    if tag:
        check_tag(tag, version)
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty. Name another folder, or remove its files.")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{NAME}-{version}-changes.md").write_text(changes)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        export(source)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
        run(sys.executable, "-m", "deploy.helm.render", "--package", out, "--chart", source / "deploy/helm/octet")
        (wheel,) = out.glob("*.whl")
        for extras in environments:
            name = "-".join([NAME, version, *filter(None, extras.split(",")), "sbom.json"])
            write_sbom(wheel, extras, out / name, Path(folder) / f"environment-{extras}")
    context = out / f"{NAME}-{version}-images.tar.gz"
    run("git", "-C", ROOT, "archive", "--format=tar.gz", "--output", context, "HEAD", *OF_IMAGES)
    files = sorted(path for path in out.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(sums))
    sys.stdout.write("".join(sums))


def check_tag(tag: str, version: str) -> None:
    """Raise Refused if the tag is not that of the version, or not at HEAD of a clean checkout."""
    if tag != f"v{version}":
        raise Refused(f"the tag is {tag} and pyproject.toml has version {version}; allowed: v{version}. Change one of them.")
    if git("rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}", missing="") != git("rev-parse", "HEAD"):
        raise Refused(f"HEAD is not {tag}. Check it out: git checkout {tag}")
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        raise Refused(f"files are changed since {tag}:\n{changed}\nCommit them, or take them back.")


def section(changelog: str, title: str) -> str:
    """Return the changes of a version. Raises Refused without them."""
    found = re.search(rf"^## \[?{re.escape(title)}\]?[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if found is None or not found[1].strip():
        raise Refused(f'CHANGELOG.md has no changes under "## {title}". Move those of "## Unreleased" there.')
    return found[1].strip() + "\n"


def write_sbom(wheel: Path, extras: str, path: Path, folder: Path) -> None:
    """Install the wheel into a new environment, start its command, and list what is there."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    requirement = f"{wheel}[{extras}]" if extras else str(wheel)
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints, requirement)
    run(folder / "bin/octet", "--version")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--validate"]
    run(*command, "--output-file", path, python)


def export(folder: Path) -> None:
    """Write what git has at HEAD into a new folder."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True).stdout
    with tempfile.TemporaryFile() as file:
        file.write(archive)
        file.seek(0)
        with tarfile.open(fileobj=file) as archived:
            # Python 3.11.2, which Debian has, knows no filters: git's own archive has no path that leads out of the folder.
            archived.extractall(folder, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))


def at_head(path: str) -> str:
    return git("show", f"HEAD:{path}")


def git(*arguments: str, missing: str | None = None) -> str:
    """Return what git prints. missing: what to return if it fails."""
    answer = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=missing is None)
    return answer.stdout.strip() if answer.returncode == 0 else missing or ""


def run(*command: str | Path) -> None:
    """Run a program quietly. Raises Refused with all that it said if it fails."""
    words = [str(word) for word in command]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise Refused(f"{shlex.join(words)} ended with status {answer.returncode}:\n{answer.stdout}{answer.stderr}")


if __name__ == "__main__":
    sys.exit(main())
