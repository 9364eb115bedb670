"""`rlx compare`: recipes side by side, what they differ in first, then what came of it."""

import json
from pathlib import Path

import click

from rlx.cli.comparison import compare_recipes
from rlx.cli.registry import open_registry, registry_option
from rlx.errors import EnvironmentFault
from rlx.text import escape_unprintable

__all__ = ["compare"]


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|GROUP|NAME...")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print a line per recipe and figure.")
@click.option("--md", "form", flag_value="md", help="Print Markdown.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write HTML.")
@registry_option
def compare(names: tuple[str, ...], form: str | None, page: Path | None, url: str) -> None:
    """Compare recipes: the difference of their experiments, then figures over seeds.

    Runs are put together that differ in their seeds alone. A GROUP is what `rlx submit --seeds
    --grid` has run, a NAME all finished runs of that experiment. Intervals are Student's over
    seeds. Differences are from the first recipe, seed by seed, with the exact paired permutation
    test: with 3 seeds p is never below .25, with 5 never below .0625. Where both were asked the
    same problems, differences are given problem by problem as well.
    """
    from rlx.cli import comparison_tables as shown

    with open_registry(url) as registry:
        found = compare_recipes(registry, names)
    if page is not None:
        try:
            page.write_text(shown.render_comparison_html(found), encoding="utf-8")
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write {escape_unprintable(str(page))}: {error.strerror or error}"
            ) from error
        click.echo(escape_unprintable(str(page)), err=True)
    if form == "json":
        click.echo(json.dumps(shown.build_comparison_json(found), indent=2))
    elif form == "csv":
        click.echo(shown.format_comparison_csv(found), nl=False)
        for line in shown.describe_exclusions(found):
            click.echo(line, err=True)
    elif form == "md":
        click.echo(shown.format_comparison_markdown(found), nl=False)
    elif page is None:
        shown.show_comparison(found)
