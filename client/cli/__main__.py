"""`python -m octet.client.cli`: the `octet` command where it is not on the path."""

from octet.client.cli import main

if __name__ == "__main__":
    main()
