"""Make a release from a tag: wheel, sdist, images with their build context, chart, SBOMs, changes, checksums.

    python -m deploy.release --tag v0.1.0 --out dist                  the release; HEAD has to be the tag
    python -m deploy.release --out build/release --images control     from HEAD, to see that it would work

All is made of what git has at HEAD; files that are not committed are left out. The wheel is built from the sdist. An SBOM
lists what a new environment holds after `pip install` of the wheel with the pinned versions, with licences (CycloneDX).
Images stay in the container engine, and `…-images.json` has their ids (deploy/images.py). Nothing is uploaded.
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

from deploy.images import IMAGES, Engine, EngineError, build_images

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
    parser.add_argument("--images", default=" ".join(IMAGES), help=f"images to build, '' for none; default: {' '.join(IMAGES)}")
    parser.add_argument("--engine", default="docker", help="the container engine; another with Docker's commands is podman")
    options = parser.parse_args(arguments)
    images = options.images.split()
    if unknown := [name for name in images if name not in IMAGES]:
        parser.error(f"argument --images: got {' '.join(unknown)}; allowed: {' '.join(IMAGES)}")
    try:
        release(options.tag, options.out.resolve(), options.sbom or ENVIRONMENTS, images, Engine(options.engine))
    except (Refused, EngineError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def release(tag: str, out: Path, environments: Sequence[str], images: Sequence[str], engine: Engine) -> None:
    """Write all files into a folder, and build the images. Raises Refused and EngineError."""
    version = tomllib.loads(at_head("pyproject.toml"))["project"]["version"]
    changes = section(at_head("CHANGELOG.md"), version if tag else "Unreleased")
    if tag:
        check_tag(tag, version)
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty. Name another folder, or remove its files.")
    if images:
        check(engine)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{NAME}-{version}-changes.md").write_text(changes)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        export(source)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
        run(sys.executable, "-m", "deploy.helm.render", "--package", out, "--chart", source / "deploy/helm/octet")
        (wheel,) = out.glob("*.whl")
        lister = make_lister(Path(folder) / "lister")
        for extras in environments:
            name = "-".join([NAME, version, *filter(None, extras.split(",")), "sbom.json"])
            write_sbom(lister, wheel, extras, out / name, Path(folder) / f"environment-{extras}")
        context = out / f"{NAME}-{version}-image-context.tar.gz"
        run("git", "-C", ROOT, "archive", "--format=tar.gz", "--output", context, "HEAD", *OF_IMAGES)
        if images:
            unpack(context, Path(folder) / "context")
            build_images(engine, images, Path(folder) / "context", out, version, git("rev-parse", "HEAD"))
    files = sorted(path for path in out.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(sums))
    sys.stdout.write("".join(sums))


def check(engine: Engine) -> None:
    """Raise Refused without a container engine, before anything is made."""
    try:
        engine.check()
    except EngineError as error:
        raise Refused(
            f"images need a container engine: {error}. Start Docker, set ENGINE=podman, or leave images out: IMAGES="
        ) from None


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


def make_lister(folder: Path) -> Path:
    """Install CycloneDX into an environment of its own, and return its command.

    In .venv each process that imports Ray would wait a second more: Ray loads jsonschema, which loads the checkers of formats
    that it finds, and CycloneDX brings all of them.
    """
    install(folder, "cyclonedx-bom")
    return folder / "bin/cyclonedx-py"


def write_sbom(lister: Path, wheel: Path, extras: str, path: Path, folder: Path) -> None:
    """Install the wheel into a new environment, start its command, and list what is there."""
    python = install(folder, f"{wheel}[{extras}]" if extras else str(wheel))
    run(folder / "bin/octet", "--version")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
    run(lister, "environment", "--output-reproducible", "--validate", "--output-file", path, python)


def install(folder: Path, requirement: str) -> Path:
    """Install a requirement with the pinned versions into a new environment, and return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    options = ("--quiet", "--disable-pip-version-check", "--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", *options, requirement)
    return python


def export(folder: Path) -> None:
    """Write what git has at HEAD into a new folder."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        run("git", "-C", ROOT, "archive", "--format=tar", "--output", file.name, "HEAD")
        unpack(Path(file.name), folder)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive that git has made into a new folder."""
    with tarfile.open(archive) as archived:
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
