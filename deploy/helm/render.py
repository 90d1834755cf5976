"""Render the chart: into deploy/kubernetes, whose manifests are the chart's with its defaults, or as a package.

    python -m deploy.helm.render                    rewrites deploy/kubernetes; `make snapshots` does
    python -m deploy.helm.render --package FOLDER   writes octet-VERSION.tgz, for `helm install`

Helm itself renders: its Go library comes as the wheel helm-python-sdk, in a folder of its own because it takes 240 MB.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/octet"
KUBERNETES = ROOT / "deploy/kubernetes"
HELM = ROOT / "build/helm-python-sdk-0.2.2"
NAMESPACE = "octet"
HEADER = "# Written by `make snapshots` from the chart in deploy/helm/octet: change it there, or by an overlay.\n"
MANIFESTS = tuple(
    f"{name}.yaml" for name in ("alerts", "api", "dispatcher", "ingest", "monitoring", "network", "raycluster", "storage")
)
"""Templates that are files of the kustomization, which makes the ConfigMaps of pools and dashboards itself."""


def chart_module() -> Any:
    """Import helm_python.chart. Raises FileNotFoundError where the folder is not there."""
    if not HELM.is_dir():
        raise FileNotFoundError(f"missing: {HELM.relative_to(ROOT)}; make it by: make {HELM.relative_to(ROOT)}")
    if str(HELM) not in sys.path:
        sys.path.insert(0, str(HELM))
    from helm_python import chart

    return chart


def rendered(values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return each template's text without blank lines, by its name. Raises helm_python's errors for wrong values."""
    with chart_module().Chart.load(CHART) as chart:
        texts: dict[str, str] = chart.render(dict(values or {}), name="octet", namespace=NAMESPACE)
    lines = {Path(path).name: [line.rstrip() for line in text.splitlines()] for path, text in texts.items()}
    return {name: "\n".join(filter(None, parts)) + "\n" for name, parts in lines.items()}


def kustomize_files() -> dict[str, str]:
    """Return what deploy/kubernetes holds of the chart, by file name."""
    texts = rendered()
    pools: str = yaml.safe_load(texts["pools.yaml"])["data"]["pools.yaml"]
    return {name: HEADER + texts[name] for name in MANIFESTS} | {"pools.yaml": HEADER + pools.lstrip("\n")}


def main() -> None:
    """Read the command line; rewrite the manifests, or package the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, metavar="FOLDER")
    parser.add_argument("--chart", type=Path, default=CHART, help="the chart to package")
    options = parser.parse_args()
    if options.package is not None:
        with chart_module().Chart.load(options.chart) as chart:
            sys.stdout.write(f"{chart.save(options.package)}\n")
        return
    for name, text in kustomize_files().items():
        (KUBERNETES / name).write_text(text)


if __name__ == "__main__":
    main()
