"""Cells of a test's matrix whose parts other cells show: `make test` leaves them to `make nightly`."""

from typing import Any

import pytest


def combination(*values: object) -> Any:
    """One cell of `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.combination)
