"""Cells of a test's matrix whose parts other cells show: `make test` leaves them to `make nightly`.

Whole tests are left to it by `@pytest.mark.nightly`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import settings


def combination(*values: object) -> Any:
    """One cell of `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def others(values: Iterable[object], *kept: object) -> Iterator[Any]:
    """The values of one name of `pytest.mark.parametrize`, of which `make test` has those kept alone."""
    for value in values:
        yield value if value in kept else combination(value)


def examples(nightly: int) -> int:
    """How many of a property are tried: `make test` has a third."""
    return -(-nightly // 3) if settings().derandomize else nightly
