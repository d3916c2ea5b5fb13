"""torch on one thread: with tiny tensors a second thread costs a scheduling quantum per operation."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def on_one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For modules that import it."""
    with on_one_thread():
        yield
