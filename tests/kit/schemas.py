"""Compare documents with schemas. jsonschema takes a second to load, so only the process that compares loads it."""

from typing import Any

KUBERNETES_VERSION = "1.32"


def violation(document: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the first violation of a JSON schema with its path; empty if there is none."""
    from jsonschema import Draft7Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft7Validator(schema).iter_errors(document))
    return f"{error.json_path}: {error.message}" if error else ""


def assert_fits_kubernetes(document: dict[str, Any]) -> None:
    """Raise ValidationError unless Kubernetes itself defines such a resource; fields that it does not know count."""
    import kubernetes_validate

    kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
