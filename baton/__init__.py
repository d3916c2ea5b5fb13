"""`from baton import LLM` computes a model in this process; `main` is the `baton` command.

This is the one name that an installation has: our packages lie in this folder, or beside it in a checkout.
"""

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "cli").is_dir() else HERE.parent  # of our packages
EXPORTS = {"LLM": "engine.llm", "SamplingParams": "wire.sampling"}  # name |-> its module
NEEDED = ("engine", "wire")  # packages that these modules import


def main() -> None:
    """The `baton` command."""
    if os.getpid() == 1:  # of a container: the kernel ignores signals there that have no handler
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    put_first()
    from cli.main import run  # not found before

    run()


def put_first() -> None:
    """Names such as `cli` are not ours alone: from now on they are imported from here."""
    if sys.path[:1] != [str(ROOT)]:
        sys.path.insert(0, str(ROOT))


def __getattr__(name: str) -> Any:
    """Torch is imported with the first use of a name. ImportError if a package that we need is another's."""
    if name not in EXPORTS:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    put_first()
    for package in NEEDED:
        ours, loaded = ROOT / package / "__init__.py", sys.modules.get(package)
        theirs = getattr(loaded, "__file__", None) or loaded
        if loaded is not None and (not isinstance(theirs, str) or Path(theirs).resolve() != ours):
            raise ImportError(
                f"baton.{name} needs its own package {package}, {ours}, but {theirs} is already imported by this name: "
                "rename that, or use Baton in another process"
            )
    return getattr(import_module(EXPORTS[name]), name)
