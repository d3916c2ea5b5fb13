"""One service of the demo model for all tests here; none depends on what others have requested."""

from collections.abc import Iterator

import grpc
import pytest

from demo.paths import TARGET_DIR
from tests.support.live import Live, serve_calmly
from tests.support.oracle import Oracle
from tests.support.surface import DEMO_FLAGS, Surface


@pytest.fixture(scope="session")
def demo() -> Iterator[Live]:
    with serve_calmly("demo", *DEMO_FLAGS) as service:
        yield service
        service.wait_until_unused()


@pytest.fixture(scope="session")
def surface(demo: Live) -> Iterator[Surface]:
    with grpc.insecure_channel(demo.grpc_address) as channel:
        yield Surface(channel)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle(TARGET_DIR)
