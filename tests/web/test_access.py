"""Who may ask, what an answer may do in a browser, and what a form may write."""

import re

import pytest
from pages import OURS, dashboard
from shown import silence, submit
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from rlx.cli import main
from rlx.cli.web import choose_address
from rlx_web import Access, create_app
from rlx_web.access import HEADERS, AccessGuard

PAGES = [
    "/",
    "/runs/r-0001",
    "/runs/r-0002",
    "/runs/r-0001/rollouts/3",
    "/runs/r-0001/rollouts/3?problem=p0 plain",
    "/runs/r-0001/rollouts/3/0",
]
ANSWERS = [
    *PAGES, "/.json", "/runs/r-0001.json", "/live.json", "/runs/1/live.json",
    "/runs/1/curves.json", "/static/chart.js", "/static/style.css",
    "/openapi.json", "/runs/1/rollouts", "/runs/r-0009", "/runs/r-0009.json", "/none", "/static/no",
    "/?page=x", "/docs", "/redoc",
]  # fmt: skip
TOKEN = "a-token-of-some-length"
CSP = "Content-Security-Policy"
OUR_NAMES = {name.lower() for name in HEADERS}


def held(response):
    """Those of our headers that an answer has."""
    return {name: value for name, value in response.headers.items() if name in OUR_NAMES}


def test_every_answer_and_every_refusal_carries_the_strict_policy(plain, filled):
    found = {path: held(plain.get(path)) for path in ANSWERS}
    guarded = dashboard(f"sqlite:///{filled}/registry.db", token=TOKEN)
    for path in ("/", "/static/chart.js"):
        for headers, status in (({"host": "evil.example"}, 400), ({}, 401)):
            refused = guarded.get(path, headers=headers)
            assert refused.status_code == status
            found[path, status] = held(refused)
    expected = {name.lower(): value for name, value in HEADERS.items()}
    assert {path: headers for path, headers in found.items() if headers != expected} == {}
    directives = dict(part.strip().split(" ", 1) for part in HEADERS[CSP].split(";"))
    assert directives["default-src"] == "'self'"
    assert directives["frame-ancestors"] == directives["base-uri"] == "'none'"
    assert not re.search(r"unsafe|\*|http|data:|script-src|style-src", HEADERS[CSP])


def test_nothing_is_inline_and_nothing_comes_from_elsewhere(plain):
    for path in PAGES:
        page = plain.page(path)
        names = {name for _, name, _ in page.attributes}
        odd = [name for name in names if name.startswith("on") or name in ("style", "srcdoc")]
        assert (odd, {"style", "iframe", "base"} & set(page.tags)) == ([], set()), path
        scripts = [v for tag, name, v in page.attributes if (tag, name) == ("script", "src")]
        inline = re.findall(r"<script[^>]*>([^<]*)</script>", plain.get(path).text)
        assert page.tags.count("script") == len(scripts) and inline == [""] * len(scripts), path
        fetched = [v for t, n, v in page.attributes if n == "src" or (t == "link" and n == "href")]
        assert fetched and all(v.startswith("/static/") for v in fetched), path
        assert {plain.get(link).status_code for link in fetched} == {200}, path


EVIL = [
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:8711",
    "10.0.0.1", "127.0.0.2", "", "[::2]", "[::1", "::1", "localhost@evil.example", "localhost.",
    "evil.example#localhost", "evil.example/localhost", "[::1].evil.example", "localhost:80:80",
    "0.0.0.0", "evil.example@localhost", "localhost ", " localhost",
]  # fmt: skip


OWN = [
    "localhost", "localhost:8711", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8711", "LOCALHOST",
]  # fmt: skip


def test_only_loopback_names_are_served(plain):
    asked = [(path, host) for host in EVIL for path in ("/", "/live.json", "/static/chart.js")]
    expected = dict.fromkeys(asked, 400) | {("/", host): 200 for host in OWN}
    found = {
        (path, host): plain.get(path, headers={"host": host}).status_code for path, host in expected
    }
    assert found == expected
    form = plain.post("/runs/2/stop", headers={"host": "evil.example"})
    assert form.status_code == 400, "the host is looked at before anything else"


@pytest.fixture
def guarded(filled):
    """A dashboard that others may ask, who have to show the token."""
    return dashboard(
        f"sqlite:///{filled}/registry.db", token=TOKEN, hosts=frozenset({"127.0.0.1", "node"})
    )


def test_without_the_token_nothing_is_told(guarded):
    found = {}
    for path in ("/", "/.json", "/live.json", "/static/chart.js", "/openapi.json"):
        refused = guarded.get(path)
        assert refused.headers["WWW-Authenticate"] == "Bearer", path
        assert "plain" not in refused.text.replace("text/plain", ""), path
        found[path] = refused.status_code
        for wrong in (TOKEN + "x", TOKEN[:-1], "", TOKEN.upper(), "é\udc80"):
            raw = wrong.encode("utf-8", "surrogateescape")
            ways = {
                "bearer": {"headers": {"Authorization": b"Bearer " + raw}},
                "address": {"params": {"token": wrong.encode("utf-8", "replace")}},
                "cookie": {"headers": {"Cookie": b"rlx_token_8711=" + raw}},
            }
            for way, asked in ways.items():
                found[path, wrong, way] = guarded.get(path, **asked).status_code
        basic = {"Authorization": f"Basic {TOKEN}"}
        found[path, "basic"] = guarded.get(path, headers=basic).status_code
    assert found == dict.fromkeys(found, 401)


def test_a_visit_with_the_token_leaves_a_cookie_and_takes_it_out_of_the_address(guarded):
    first = guarded.get(f"/?token={TOKEN}&q=x")
    assert first.status_code == 303
    assert TOKEN not in first.headers["location"]
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert guarded.get("/").status_code == 200
    assert guarded.get("/static/chart.js").status_code == 200
    assert guarded.get("/?token=wrong").status_code == 401, "a wrong one is no right one"


def test_the_rest_of_an_address_stays_and_it_is_ours(guarded):
    addresses = {
        "/?q=a&token={}&page=2": "/?q=a&page=2",
        "//evil.test?token={}": "/evil.test",
    }
    for address, left in addresses.items():
        kept = guarded.get(f"{OURS}{address.format(TOKEN)}", follow_redirects=False)
        assert (kept.status_code, kept.headers["location"]) == (303, left)


def test_numbers_beyond_all_registries_are_refused(plain):
    for number in ("9" * 5000, "99999999999", "4294967296"):
        for path in (f"/runs/1/rollouts/{number}", f"/runs/1/rollouts/1/{number}"):
            for form in ("", ".json"):
                found = plain.get(path + form)
                assert found.status_code == 422, path[:60] + form
                assert found.headers["content-security-policy"]


def test_a_page_of_another_server_of_this_host_is_refused(guarded):
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "node:8711"}
    others = ("http://node:9999", "http://node", "https://evil.example", "http://node:8711.x")
    expected = dict.fromkeys(others, 403)
    expected |= dict.fromkeys(("http://node:8711", "https://NODE:8711", "null"), 200)
    for path in ("/", "/live.json", "/static/chart.js"):
        found = {
            origin: guarded.get(path, headers={**headers, "Origin": origin}).status_code
            for origin in expected
        }
        assert found == expected, path


def test_a_web_socket_needs_the_token_too():
    async def application(scope, receive, send):
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close"})

    client = TestClient(AccessGuard(application, Access(TOKEN, {"testserver"})))
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/"):
        pass
    assert refused.value.code == 1008
    with client.websocket_connect("/", headers={"Authorization": f"Bearer {TOKEN}"}):
        pass


def test_the_token_alone_writes_nothing(guarded):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert guarded.post("/runs/2/stop", headers=headers).status_code == 403
    assert guarded.post("/runs/2/stop", headers=headers, data={"write": TOKEN}).status_code == 403
    assert guarded.post("/runs/2/stop").status_code == 401


def form(client, run, action):
    """The hidden fields of a page's form."""
    page = client.page(f"/runs/{run}")
    assert f"/runs/{run}/{action}" in page.values("action")
    found = []
    for tag, name, value in page.attributes:
        if tag == "input":
            if name == "type":
                found.append({})
            found[-1][name] = value
    return {one["name"]: one["value"] for one in found if one["type"] == "hidden"}


def test_a_form_without_the_secret_of_this_process_writes_nothing(empty, registry):
    run = submit(registry, status="running")
    before = registry.run(run)
    bodies = [
        b"", b"write=", b"write=wrong", b"other=1", b"\xff\x00=\xfe", b"write=\xe9",
        b"write=%ff%00", f"write={Access(TOKEN).write}".encode(),
    ]  # fmt: skip
    headers = {"content-type": "application/x-www-form-urlencoded"}
    for content in bodies:
        response = empty.post(f"/runs/{run}/stop", content=content, headers=headers)
        assert response.status_code == 403, content
        assert registry.run(run) == before, content


def test_a_page_makes_no_registry_and_waits_for_no_writer(empty, registry, tmp_path):
    missing = tmp_path / "none" / "registry.db"
    app = create_app(f"sqlite:///{missing}", Access(token=None))
    assert TestClient(app, base_url=OURS).get("/").status_code == 503
    assert not missing.parent.exists()
    submit(registry)
    with registry.open_writer() as connection:
        connection.exec_driver_sql("DELETE FROM rlx_metric")
        assert "r-0001" in empty.page("/").text


def test_only_post_writes(empty, registry):
    run = submit(registry, status="running")
    sent = form(empty, run, "stop")
    for method in ("GET", "PUT", "PATCH", "DELETE", "HEAD"):
        path = f"/runs/{run}/stop"
        assert empty.request(method, path, params=sent).status_code in (404, 405), method
    assert empty.get(f"/runs/{run}/stop", params=sent).status_code == 405
    assert registry.run(run).request is None
    for path in ("/", "/runs/1", "/live.json"):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert empty.request(method, path, data=sent).status_code == 405


def test_what_runs_is_asked_to_stop(empty, registry):
    for seed, status in enumerate(("submitted", "running")):
        run = submit(registry, seed, status=status)
        response = empty.post(f"/runs/{run}/stop", data=form(empty, run, "stop"))
        assert (response.status_code, response.headers["location"]) == (303, f"/runs/{run}")
        assert registry.run(run).request == "stop", status
        page = empty.page(f"/runs/{run}")
        assert "asked to stop" in page.text, status
        assert f"/runs/{run}/stop" not in page.values("action"), "once is enough"


def test_where_nothing_runs_there_is_nothing_to_stop(empty, registry):
    data = form(empty, submit(registry, status="running", digest="e"), "stop")
    for status in ("finished", "failed", "stopped", "queued", "lost"):
        run = submit(registry, status="running" if status == "lost" else status)
        if status == "lost":
            silence(registry, run)
        response = empty.post(f"/runs/{run}/stop", data=data)
        assert response.status_code == 409, status
        assert f"{run} is {status}" in response.text
        assert registry.run(run).request is None
    assert empty.post("/runs/r-0999/stop", data=data).status_code == 404


def test_a_form_is_small(empty, registry):
    run = submit(registry, status="running")
    sent = {**form(empty, run, "stop"), "more": "x" * 5000}
    assert empty.post(f"/runs/{run}/stop", data=sent).status_code == 413
    assert registry.run(run).request is None


SHORT = "the token is too short or odd: use 16 printable ASCII characters or more"
BAD_TOKENS = [
    (["--host", "0.0.0.0", "--token", "short"], None, SHORT),
    (["--host", "0.0.0.0"], "short", SHORT),
    (["--token", "short"], None, SHORT),
    (["--host", "0.0.0.0", "--token", ""], None, SHORT),
    (["--token", "of two words, and long"], None, "without spaces"),
    (["--no-token"], TOKEN, "--no-token and a token: leave out one"),
]


def test_a_token_is_of_some_length(filled, monkeypatch, capsys):
    monkeypatch.setenv("RLX_HOME", str(filled))
    for arguments, variable, said in BAD_TOKENS:
        monkeypatch.delenv("RLX_WEB_TOKEN", raising=False)
        if variable:
            monkeypatch.setenv("RLX_WEB_TOKEN", variable)
        assert main(["web", *arguments]) == 2, arguments
        out, err = capsys.readouterr()
        assert said in err and out == "" and "Traceback" not in err, (arguments, err)


def test_no_token_is_said_aloud(capsys):
    address = choose_address(8711, host="127.0.0.1", port=None, token=None, is_open=True, names=())
    address.print_link()
    said = capsys.readouterr().err
    assert "warning: --no-token: everyone who can connect to port 8711" in said
