"""What the `baton` script imports first: it refuses to run another distribution's code in place of ours.

Names such as `cli` and `runtime` are not ours alone. This module's name is.
"""

import csv
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGES = (
    "bench",
    "cli",
    "decode_worker",
    "demo",
    "engine",
    "gateway",
    "kvtransfer",
    "prefill_worker",
    "protos",
    "runtime",
    "wire",
    "worker",
)
NAME = "baton"  # of our distribution
ADVICE = "install Baton into an environment of its own, with uv tool install or pipx install"


def find_shadow() -> str:
    """The first of our packages that Python would import from elsewhere than beside this file, in a sentence."""
    for name in PACKAGES:
        spec = find_spec(name)  # imports nothing
        if spec is None or spec.origin is None:  # or there are only folders without __init__.py, which hide nothing
            return f"the package {name} is missing in {ROOT}: {ADVICE}"
        if Path(spec.origin).resolve() != ROOT / name / "__init__.py":
            return f"the package {name} of {ROOT} is hidden by {spec.origin}: take that off PYTHONPATH, or {ADVICE}"
    return ""


def find_overwritten() -> str:
    """The first of our files that another distribution has overwritten, or taken along when it went, in a sentence.

    Files that were only edited are taken as they are.
    """
    changed = {name for name, size in read_sizes() if not is_size(ROOT / name, size)}
    if not changed:
        return ""
    for other in distributions(path=[str(ROOT)]):
        if other.name != NAME and (theirs := changed.intersection(map(str, other.files or ()))):
            return f"{min(theirs)} in {ROOT} is now that of {other.name} {other.version}: {ADVICE}"
    missing = [name for name in changed if not (ROOT / name).exists()]
    return f"{min(missing)} is missing in {ROOT}: {ADVICE}" if missing else ""


def read_sizes() -> list[tuple[str, int]]:
    """Path and bytes of each file in our packages, as they were installed; empty in a checkout."""
    records = [one.read_text("RECORD") for one in distributions(name=NAME, path=[str(ROOT)])]
    rows = [row for record in records for row in csv.reader((record or "").splitlines())]
    return [(name, int(size)) for name, _, size in rows if size and name.partition("/")[0] in PACKAGES]


def is_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def main() -> None:
    if trouble := find_shadow() or find_overwritten():
        sys.exit(f"baton: {trouble}")
    from cli.main import main as run  # whose imports may have failed until here

    run()


if __name__ == "__main__":
    main()
