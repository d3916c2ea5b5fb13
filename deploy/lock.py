"""Writes gateway-requirements.lock: the gateway's packages with the hashes of PyPI's files, for the image's platforms.

Run by `make lock` where PyPI can be reached, and commit what it writes.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "3.11"  # of the Dockerfile
TAGS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
MACHINES = ("x86_64", "aarch64")


def resolve(machine: str) -> dict[str, tuple[str, str]]:
    """Name |-> (version, hash), as pip would install them there from PyPI alone; it downloads no package."""
    platforms = [word for tag in TAGS for word in ("--platform", f"{tag}_{machine}")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [
            sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--dry-run", "--ignore-installed",
            "--report", str(report), "--target", folder, "--python-version", PYTHON, "--only-binary=:all:", *platforms,
            "-r", str(HERE / "gateway-requirements.txt"),
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


def main() -> None:
    of_machines = [resolve(machine) for machine in MACHINES]
    lines = ["# Made by `make lock` of gateway-requirements.txt."]
    for name in sorted({name for found in of_machines for name in found}):
        versions = {found[name][0] for found in of_machines if name in found}
        if len(versions) != 1:
            raise SystemExit(f"{name} has the versions {', '.join(sorted(versions))} on {' and '.join(MACHINES)}")
        hashes = sorted({found[name][1] for found in of_machines if name in found})
        lines.append(" ".join([f"{name}=={versions.pop()}", *(f"--hash=sha256:{one}" for one in hashes)]))
    (HERE / "gateway-requirements.lock").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
