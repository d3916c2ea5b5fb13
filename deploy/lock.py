"""Writes the lock files of the images: their packages with the hashes of PyPI's files, for the images' platforms.

Run by `make lock` where PyPI can be reached, and commit what it writes. pip 23.3 or newer downloads no package for it.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PYTHON = "3.11"  # of the Dockerfile
TAGS = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(36, 16, -1)))  # Debian bookworm has glibc 2.36
MACHINES = ("x86_64", "aarch64")
TORCH = "torch==2.11.0"  # of worker-cuda in the Dockerfile


def find_requirements() -> Mapping[str, list[str]]:
    """Image |-> what it asks for."""
    project: dict[str, Any] = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    cuda = [one for one in extras["cuda"] if not one.startswith("cuda-toolkit")]  # the image compiles nothing
    gateway = (HERE / "gateway-requirements.txt").read_text().splitlines()
    return {
        "gateway": [line for line in gateway if not line.startswith("#")],
        "worker-cpu": project["dependencies"],
        "worker-cuda": [*project["dependencies"], *cuda, *extras["nixl"], TORCH],
    }


def resolve(requirements: list[str], machine: str) -> dict[str, tuple[str, str]]:
    """Name |-> (version, hash), as pip would install them there from PyPI alone."""
    platforms = [word for tag in TAGS for word in ("--platform", f"{tag}_{machine}")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [
            sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--dry-run", "--ignore-installed",
            "--report", str(report), "--target", folder, "--python-version", PYTHON, "--only-binary=:all:", *platforms,
            *requirements,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        found = json.loads(report.read_text())["install"]
    return {
        one["metadata"]["name"].lower(): (
            one["metadata"]["version"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in found
    }


def write(image: str, requirements: list[str]) -> None:
    of_machines = {machine: resolve(requirements, machine) for machine in MACHINES}
    lines = ["# Made by `make lock`."]
    for name in sorted({name for found in of_machines.values() for name in found}):
        having = {machine: found[name] for machine, found in of_machines.items() if name in found}
        versions = {version for version, _ in having.values()}
        if len(versions) != 1:
            raise SystemExit(f"{name} has the versions {', '.join(sorted(versions))} on {' and '.join(MACHINES)}")
        where = "" if len(having) == len(MACHINES) else f" ; platform_machine == '{min(having)}'"
        hashes = sorted({hash_ for _, hash_ in having.values()})
        lines.append(" ".join([f"{name}=={versions.pop()}{where}", *(f"--hash=sha256:{one}" for one in hashes)]))
    (HERE / f"{image}-requirements.lock").write_text("\n".join(lines) + "\n")


def main() -> None:
    for image, requirements in find_requirements().items():
        write(image, requirements)


if __name__ == "__main__":
    main()
