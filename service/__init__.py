"""The control plane: jobs, attempts and the API."""

if __name__ != "octet.service":
    raise ImportError("import octet.service, not service", name=__name__)
