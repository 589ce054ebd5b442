import pytest

from tests.chat_endpoint import chat_endpoint


@pytest.fixture
def server():
    with chat_endpoint() as server:
        yield server
