"""What is installed and run from elsewhere is fixed: packages of the images, actions of workflows."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.lock import TORCH, find_requirements
from engine.cuda.modules import find_other_version

ROOT = Path(__file__).resolve().parents[2]
GPU_PAGE = (ROOT / "docs/GPU.md").read_text()
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


def test_flashinfer_is_the_version_that_is_tested_wherever_it_is_installed() -> None:
    """Its plans are known by version (engine/cuda/splits.py)."""
    tested = re.search(r"^FLASHINFER := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tested is not None and not find_other_version(tested[1]) and find_other_version("0.7.4")
    lock = (ROOT / "deploy/worker-cuda-requirements.lock").read_text()
    assert f"\nflashinfer-python=={tested[1]} " in lock and f"flashinfer-python=={tested[1]}" in GPU_PAGE
    (asked,) = (one for one in find_requirements()["worker-cuda"] if one.startswith("flashinfer-python"))
    own = Requirement(asked).specifier
    assert own.contains(tested[1]) and all(find_other_version(one) for one in ("0.7.1", "0.7.3", "0.8.0", "0.7.20"))
    assert not any(own.contains(one) for one in ("0.7.1", "0.7.3", "0.8.0", "0.7.20"))


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
