"""Run a file, or a module after -m, in which `import msamp` means octet.compat.msamp.

python -m octet.compat.msamp mnist.py --enable-msamp --opt-level O2
torchrun --nproc-per-node 2 -m octet.compat.msamp mnist_ddp.py --enable-msamp
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from octet.compat import msamp

USAGE = "usage: python -m octet.compat.msamp FILE [argument …], or -m MODULE [argument …]"


def main(arguments: list[str]) -> None:
    """Run a program as `python FILE …` or `python -m MODULE …` would. Exits with status 2 where it cannot start."""
    if not arguments or (arguments[:1] == ["-m"] and len(arguments) < 2) or arguments[0] in ("-h", "--help"):
        raise SystemExit(_problem(USAGE))
    if find_spec("msamp") is not None:
        raise SystemExit(
            _problem(
                "msamp is installed here, and the program could mean either one; allowed: one of them. Remove MS-AMP from this "
                "environment, or write import octet.compat.msamp as msamp in the program."
            )
        )
    sys.modules["msamp"] = msamp
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    program = Path(arguments[0])
    if not program.is_file():
        raise SystemExit(_problem(f"no file {arguments[0]}. {USAGE}"))
    sys.argv = arguments
    # Python puts the folder of a program first, so that it finds the modules next to it.
    sys.path[0] = str(program.resolve().parent)
    runpy.run_path(str(program), run_name="__main__")


def _problem(text: str) -> int:
    """Write one line to standard error; return the exit status of a command that cannot start."""
    sys.stderr.write(f"{text}\n")
    return 2


if __name__ == "__main__":
    main(sys.argv[1:])
