"""Fixtures for tests with chaos. All stand on `no_leaks`, which looks when they have ended."""

import pytest

import weighlock
from process.chaos import Chaos


@pytest.fixture
def server(no_leaks):
    """A server in this process."""
    with weighlock.Server() as server:
        yield server


@pytest.fixture
def chaos(no_leaks):
    """Makes proxies."""
    with Chaos() as chaos:
        yield chaos
