"""What is installed and run from elsewhere is fixed: packages of the images, actions of workflows."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.lock import TORCH, find_requirements

ROOT = Path(__file__).resolve().parents[2]
LOCKED = re.compile(
    r"(?P<name>[a-z0-9._-]+)==(?P<version>\S+)(?: ; platform_machine == '\w+')?(?: --hash=sha256:[0-9a-f]{64})+"
)


@pytest.mark.parametrize("image", ["gateway", "worker-cpu", "worker-cuda"])
def test_packages_have_versions_and_hashes_that_fit_what_the_image_asks_for(image: str) -> None:
    found: dict[str, str] = {}
    for line in (ROOT / f"deploy/{image}-requirements.lock").read_text().splitlines()[1:]:
        locked = LOCKED.fullmatch(line)
        assert locked is not None, line
        found[locked["name"].replace("_", "-")] = locked["version"]
    for text in find_requirements()[image]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(found[wanted.name]), f"{text}: run make lock"
    assert ("torch" in found) is (image != "gateway")


def test_images_install_what_is_locked_and_nothing_else_but_where_another_index_is_named() -> None:
    """Without --require-hashes pip takes what any index gives."""
    dockerfile = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
    assert TORCH.replace("torch==", "ARG TORCH=") in dockerfile
    installs = re.findall(r"pip install (.*?)(?: &&|;|\n)", dockerfile)
    assert len(installs) >= 7
    for one in installs:
        assert "--require-hashes" in one or one.strip() == "--no-deps ." or "$TORCH_INDEX" in one, one


def test_actions_are_named_by_the_hash_of_a_commit() -> None:
    workflows = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    used = re.findall(r"uses: *(\S+)", workflows)
    assert len(used) >= 4 and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one) for one in used)
