"""Test modules as pytest rewrites and compiles them: once for all test processes, each of which would do it else."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    assertstate_key,
    get_cache_dir,
    try_makedirs,
)


def compile_tests(config: pytest.Config) -> None:
    """Of the files and folders that are run, where their compiled form is missing or stale."""
    state = config.stash[assertstate_key]
    for path in sorted(set(find_modules(config.args))):
        folder = get_cache_dir(path)
        compiled = folder / (path.stem + PYC_TAIL)
        if try_makedirs(folder) and _read_pyc(path, compiled) is None:
            status, code = _rewrite_test(path, config)
            _write_pyc(state, code, status, compiled)


def find_modules(words: Iterable[str]) -> Iterable[Path]:
    """The test modules that a command line stands for."""
    for word in words:
        path = Path(word.partition("::")[0]).resolve()
        yield from path.rglob("test_*.py") if path.is_dir() else [path]
