"""Build the images of a release in a container engine, and list what each of them holds.

The engine is Docker, or another with the same commands (podman). An image is built from the context of a release, in the
names that docker-compose.yml and the chart use, and labelled with version and commit. Its SBOM (CycloneDX) lists the Python
packages of its environment; Debian's packages are those of the base image, which has an SBOM of its own.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOCKERFILE = "deploy/docker/Dockerfile"
NEEDS_COMPILER = {"APT_PACKAGES": "gcc libc6-dev"}


@dataclass(frozen=True)
class Image:
    """An image of a release: its name, its target in the Dockerfile, and the arguments that it is built with."""

    name: str
    target: str
    arguments: dict[str, str] = field(default_factory=dict)
    suffix: str = ""
    """The end of its tag, after the version."""

    def reference(self, version: str) -> str:
        return f"octet/{self.name}:{version}{self.suffix}"


IMAGES = {
    "control": Image("control", "control"),
    "node": Image("node", "node", {"TORCH_LINE": "cpu"}),
    **{
        f"node-cuda-{line}": Image("node-cuda", "node", {"TORCH_LINE": line} | NEEDS_COMPILER, f"-{line}")
        for line in ("cu126", "cu129", "cu130")
    },
}
"""The images of a release, under the words that choose them."""


class EngineError(Exception):
    """The engine is not there, or a command of it failed; the message has what it printed."""


class Engine:
    """A container engine as its command line: `docker`, `podman`, or words with options."""

    def __init__(self, command: str) -> None:
        self._words = shlex.split(command)

    def check(self) -> None:
        """Raise EngineError if the engine does not answer."""
        try:
            self._run("info")
        except OSError as error:
            raise EngineError(f"{shlex.join(self._words)} cannot be started ({error.strerror})") from None

    def build(self, image: Image, context: Path, version: str, commit: str) -> dict[str, object]:
        """Build an image from a folder. Returns what a release writes down about it."""
        reference = image.reference(version)
        labels = {"version": version, "revision": commit}
        marks = [word for name, value in labels.items() for word in ("--label", f"org.opencontainers.image.{name}={value}")]
        self._build(image.target, image.arguments, context, "--tag", reference, *marks)
        (found,) = json.loads(self._run("image", "inspect", reference))
        return {"image": reference, "id": found["Id"].removeprefix("sha256:"), "bytes": found["Size"]} | labels

    def sbom(self, image: Image, context: Path, version: str) -> str:
        """List the packages of an image's environment, as CycloneDX JSON. The image itself holds no tool for it."""
        reference = image.reference(version) + "-sbom"
        self._build(f"{image.target}-sbom", image.arguments, context, "--tag", reference)
        try:
            return self._run("run", "--rm", "--network", "none", reference, "cat", "/sbom.json")
        finally:
            self._run("image", "rm", reference)

    def _build(self, target: str, arguments: dict[str, str], context: Path, *options: str) -> None:
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        self._run("build", "--file", str(context / DOCKERFILE), "--target", target, *given, *options, str(context))

    def _run(self, *words: str) -> str:
        command = [*self._words, *words]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            raise EngineError(f"{shlex.join(command)} ended with status {answer.returncode}:\n{answer.stdout}{answer.stderr}")
        return answer.stdout


def build_images(engine: Engine, names: Sequence[str], context: Path, out: Path, version: str, commit: str) -> None:
    """Build images, and write their SBOMs and a list with their ids into a folder. Raises EngineError."""
    built = []
    for name in names:
        sys.stderr.write(f"building {IMAGES[name].reference(version)}\n")
        built.append(engine.build(IMAGES[name], context, version, commit))
        (out / f"octet-{name}-{version}-sbom.json").write_text(engine.sbom(IMAGES[name], context, version))
    (out / f"octet-fp8-{version}-images.json").write_text(json.dumps(built, indent=2) + "\n")
