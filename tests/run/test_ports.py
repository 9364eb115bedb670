"""Ports for processes that will start."""

import socket

import pytest

from rlx.errors import EnvironmentFault
from rlx.launch import processes


def test_a_port_is_free_and_none_that_anyone_gets():
    found = [processes.find_free_port() for _ in range(20)]
    for port in found:
        with socket.socket() as one:
            one.bind(("", port))
    with socket.socket() as any_port:
        any_port.bind(("", 0))
        assert any_port.getsockname()[1] not in processes.CHOSEN_PORTS


def test_ports_in_use_are_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", processes.find_free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(processes, "CHOSEN_PORTS", range(port, port + 1))
        with pytest.raises(EnvironmentFault, match=f"every port from {port} to {port}"):
            processes.find_free_port()
    assert processes.find_free_port() == port
