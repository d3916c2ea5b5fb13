"""Versions of installed packages, this one's too."""

from importlib.metadata import PackageNotFoundError, version


def find_version(distribution: str) -> str:
    """Of an installed package; empty when it is not."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


OWN_VERSION = find_version("baton") or "unknown"
