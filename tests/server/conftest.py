"""One server for the tests that leave it as it was."""

import pytest
from served import serving


@pytest.fixture(scope="session")
def server(shipped):
    with serving(shipped) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    return server.client()
