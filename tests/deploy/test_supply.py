"""What is installed and run from elsewhere is fixed: packages of the gateway's image, actions of workflows."""

import re
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKED = re.compile(r"(?P<name>[a-z0-9._-]+)==(?P<version>\S+)(?: --hash=sha256:[0-9a-f]{64})+")


def test_the_gateways_packages_have_versions_and_hashes_that_fit_what_it_asks_for() -> None:
    found: dict[str, str] = {}
    for line in (ROOT / "deploy/gateway-requirements.lock").read_text().splitlines()[1:]:
        locked = LOCKED.fullmatch(line)
        assert locked is not None, line
        found[locked["name"].replace("_", "-")] = locked["version"]
    for line in (ROOT / "deploy/gateway-requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            wanted = Requirement(line)
            assert wanted.specifier.contains(found[wanted.name]), f"{line}: run make lock"
    assert "torch" not in found


def test_actions_are_named_by_the_hash_of_a_commit() -> None:
    workflows = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    used = re.findall(r"uses: *(\S+)", workflows)
    assert len(used) >= 4 and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one) for one in used)
