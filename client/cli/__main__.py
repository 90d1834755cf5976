"""`python -m client.cli`: the `octet` command where it is not on the path."""

from client.cli import main

if __name__ == "__main__":
    main()
