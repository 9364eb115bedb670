"""The dashboard of a home in which nothing has run yet."""

from dashboards import dashboard
from shown import submit

from rlx_registry import Registry


def test_the_page_is_there_before_the_first_run_and_shows_it_when_it_comes(visit, url):
    with dashboard(url) as served:  # `rlx web`, and no registry
        page = visit(served)
        page.clock.install()
        page.goto("/")
        page.get_by_text("No runs yet").wait_for()
        with Registry.open(url) as registry:
            submit(registry, status="running")
        with page.expect_navigation():
            page.clock.fast_forward(5100)
        page.get_by_role("link", name="r-0001").wait_for()
