"""A password in a URL is refused or used, and no output shows it."""

import json
import string
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import find_free_port

from rlx.cli import main
from rlx.text import list_url_secrets, redact_passwords, redact_values

ODD = "/ ?#%:;'\"\\$*{}[]<>|~^é€"
MARK = "Zq7x"
"""So that a password is none of the words in a message."""
passwords = st.text(string.ascii_letters + string.digits + ODD, min_size=1, max_size=20).map(
    lambda text: f"{MARK}{text}{MARK}"
)
FORMS = {
    "plain": lambda p: f"postgresql+psycopg://ann:{p}@/rlx?host=/nowhere",
    "encoded": lambda p: f"postgresql+psycopg://ann:{quote(p, safe='')}@/rlx?host=/nowhere",
    "with an @": lambda p: f"postgresql+psycopg://ann:{p}@{MARK}@/rlx?host=/nowhere",
    "in the query": lambda p: f"postgresql+psycopg://ann@/rlx?host=/nowhere&password={p}",
    "encoded in the query": lambda p: f"postgresql://ann@/rlx?password={quote(p)}&host=/nowhere",
    "under an encoded name": lambda p: f"postgresql://ann@/rlx?host=/nowhere&p%61ssword={p}",
    "of no database": lambda p: f"ftp-x://ann:{p}@db:none/rlx",
    "of HTTP": lambda p: f"http://ann:{p}@127.0.0.1:1",
    "of HTTP, as a token": lambda p: f"http://127.0.0.1:1/?access_token={p}",
    "of HTTP, as a user": lambda p: f"http://{quote(p, safe='')}@127.0.0.1:1",
    "signed": lambda p: f"https://127.0.0.1:1/a?se=2026&sig={quote(p, safe='')}",
    "signed for S3": lambda p: f"https://127.0.0.1:1/a?X-Amz-Signature={quote(p, safe='')}",
}
SPEC = """
name: odd
model: {{kind: tiny}}
task: {{plugin: countdown}}
tracking: {{{where}: {url}}}
"""

urls = st.builds(lambda form, password: FORMS[form](password), st.sampled_from([*FORMS]), passwords)
few = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(password=passwords)
def test_text_with_the_url_shows_no_password(password):
    for form in FORMS:
        url = FORMS[form](password)
        for text in (url, f"cannot open {url}", f"  registry: {url}", f"a\n{url}\nb"):
            assert MARK not in redact_passwords(text), form
        told = redact_passwords(f"no such user: {password}, {quote(password)}", url)
        assert MARK not in told, form
        spec = {"tracking": {"registry": url, "other": [url, 3]}}
        assert MARK not in json.dumps(redact_values(spec)), form
        assert list_url_secrets(url), form


def test_what_has_no_password_stays_as_it_is(subtests):
    for text in (
        "sqlite:////home/ann/runs.db",
        "sqlite:///{home}/registry.db",
        "postgresql+psycopg://ann@db:5432/rlx?host=/run/postgresql&passfile=/home/ann/.pgpass",
        "http://127.0.0.1:5000",
        "http://mlflow:5000/a?page_token_size=3",
        "seed: 3  # ask ann@example.org",
    ):
        with subtests.test(text=text):
            assert redact_passwords(text, text) == text
            assert list_url_secrets(text) == []


def test_the_rest_of_a_url_is_shown():
    url = "postgresql://ann:a/b c@db:5432/rlx?password=x&sslmode=require"
    assert redact_passwords(url) == "postgresql://ann:***@db:5432/rlx?password=***&sslmode=require"


@pytest.mark.parametrize("where", ["registry", "mlflow"])
@few
@given(url=urls)
def test_an_experiment_with_a_password_is_refused_without_showing_it(where, url, folder, capsys):
    (folder / "odd.yaml").write_text(SPEC.format(where=where, url=json.dumps(url)))
    assert main(["validate", "odd.yaml"]) == 2
    (folder / "even.yaml").write_text(SPEC.format(where=where, url="null"))
    assert main(["validate", "even.yaml", "--set", f"tracking.{where}={json.dumps(url)}"]) == 2
    assert main(["validate", "--values", "odd.yaml"]) == 2
    shown = "".join(capsys.readouterr())
    assert MARK not in shown
    assert shown.count("an experiment must not contain a password") >= 3


@few
@given(url=urls)
def test_a_command_that_fails_shows_no_password(url, folder, capsys, monkeypatch):
    assert main(["runs", "--registry", url]) == 5
    assert main(["runs", url]) == 2
    monkeypatch.setenv("RLX_REGISTRY", url)
    assert main(["runs", "--json"]) == 5
    shown = "".join(capsys.readouterr())
    assert shown and MARK not in shown


def test_mlflows_command_line_has_no_url(monkeypatch, folder):
    url, called = FORMS["plain"]("s3/cr et"), []

    def start(command, *, env, **_):
        called.extend((command, env))
        raise SystemExit(0)

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", url)
    with pytest.raises(SystemExit):
        main(["web", "--mlflow", "--port", str(find_free_port())])
    command, environment = called
    assert not any("cr et" in word for word in command)
    assert environment["MLFLOW_BACKEND_STORE_URI"] == url
