"""Write the API's OpenAPI document, from which the types of the page's modules are made: `make page-types`."""

import json
import sys
import tempfile
from pathlib import Path

from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.settings import Settings


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/none.db")
        json.dump(create_app(Settings(data_dir=Path(folder, "data")), database=database).openapi(), sys.stdout)
        database.close()


if __name__ == "__main__":
    main()
