"""The interface as it describes itself, asked everything that the description allows, and more."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pages import OURS
from shown import shown

from rlx_registry import Registry
from rlx_web import Access, create_app

EXAMPLES = 15
"""Of every route: what takes long is making them up."""
KNOWN = {"ref": "r-0001", "step": 3, "row": 0, "path": "run.log"}


@pytest.fixture(scope="module")
def interface(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interface")
    url = f"sqlite:///{folder}/registry.db"
    with Registry.open(url) as registry:
        shown(registry, folder)
    (folder / "runs" / KNOWN["ref"] / KNOWN["path"]).write_text("a line\n")
    app = create_app(url, Access(token=None, write="known-to-the-test"))
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers={"host": "127.0.0.1"})


def answers(operation):
    """Asks one route many things; returns the statuses of what it said."""
    codes = set()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), known=st.booleans())
    def ask(case, known):
        if known:  # a made-up run is never there
            case.path_parameters |= {name: KNOWN[name] for name in case.path_parameters}
        response = case.call(base_url=OURS, headers={"host": "127.0.0.1"})
        assert response.status_code < 500, case.as_curl_command()
        assert "default-src 'self'" in response.headers["content-security-policy"][0]
        codes.add(response.status_code)

    ask()
    return codes


def test_nothing_that_is_asked_is_a_fault_of_the_server(interface):
    operations = [result.ok() for result in interface.get_all_operations()]
    answered = {f"{o.method} {o.path}".upper(): answers(o) for o in operations}
    reading = {name: codes for name, codes in answered.items() if name.startswith("GET")}
    assert len(reading) == 15 and len(answered) == 16
    assert all(codes & {200, 303} for codes in reading.values()), "nothing was found at all"
