"""Ports for processes that will start."""

import socket

import pytest

from rlx.errors import EnvironmentFault
from rlx.launch import ports


def test_a_port_is_free_and_none_that_anyone_gets():
    """Systems give others a port above 30,000 unless somebody has set another range."""
    for port in (ports.find_free_port() for _ in range(20)):
        assert 20_000 <= port < 30_000
        with socket.socket() as one:
            one.bind(("", port))


def test_ports_in_use_are_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", ports.find_free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
        with pytest.raises(EnvironmentFault, match=f"every port from {port} to {port}"):
            ports.find_free_port()
    assert ports.find_free_port() == port
