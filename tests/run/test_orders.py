"""Who may tell a supervisor what: signals of this machine, requests of any."""

import signal

import pytest

from rlx.launch.processes import SigtermListener


@pytest.fixture
def orders():
    before = signal.getsignal(signal.SIGTERM)
    yield SigtermListener()
    signal.signal(signal.SIGTERM, before)


def test_a_signal_stops_and_a_second_one_kills(orders):
    assert (orders.stop, orders.kill) == (False, False)
    signal.raise_signal(signal.SIGTERM)
    assert (orders.stop, orders.kill) == (True, False)
    signal.raise_signal(signal.SIGTERM)
    assert (orders.stop, orders.kill) == (True, True)


def test_a_request_that_a_signal_follows_is_one_order(orders):
    orders.apply_request(None)
    assert not orders.stop
    orders.apply_request("stop")
    signal.raise_signal(signal.SIGTERM)
    assert (orders.stop, orders.kill) == (True, False)
    orders.apply_request("kill")
    assert orders.kill
