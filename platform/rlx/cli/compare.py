"""`rlx compare`: how recipes differ in their specs, and in their metrics over seeds."""

from pathlib import Path

import click

from rlx import results
from rlx.cli.completion import complete_run
from rlx.cli.mlflow_page import describe_mlflow_page
from rlx.cli.options import registry_option
from rlx.cli.output import print_json, print_text
from rlx.launch import open_registry
from rlx.text import escape_unprintable
from rlx.writing import write_text_file

__all__ = ["compare"]


@click.command()
@click.argument(
    "names", nargs=-1, required=True, metavar="RUN|GROUP|NAME...", shell_complete=complete_run
)
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV: a line per recipe and metric.")
@click.option("--md", "form", flag_value="md", help="Print Markdown.")
@click.option(
    "--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page."
)
@registry_option
def compare(names: tuple[str, ...], form: str | None, page: Path | None, url: str) -> None:
    """Compare recipes: how their experiments differ, then their metrics over seeds.

    Runs that differ only in their seed form one recipe. A GROUP holds the runs of `rlx submit
    --seeds --grid`; a NAME stands for all finished runs of that experiment. Confidence intervals
    are Student's t over seeds. Differences are from the first recipe, paired by seed, with the
    exact paired permutation test: p is at least .25 with 3 seeds and .0625 with 5. Where two
    recipes were evaluated on the same problems, per-problem differences are shown as well.
    """
    with open_registry(url) as registry:
        found = results.compare_recipes(registry, names)
        compared = [registry.run(run) for recipe in found.recipes for run in recipe.runs.values()]
    if page is not None:
        write_text_file(page, results.render_comparison_html(found))
        print_text(escape_unprintable(str(page)), err=True)
    if form == "json":
        print_json(results.build_comparison_json(found))
    elif form == "csv":
        print_text(results.format_comparison_csv(found), nl=False)
        for line in results.describe_exclusions(found):
            print_text(line, err=True)
    elif form == "md":
        print_text(results.format_comparison_markdown(found), nl=False)
    elif page is None:
        _show_comparison(found)
        if mlflow := describe_mlflow_page(compared, names):
            print_text(f"curves in MLflow:  {mlflow}")


def _show_comparison(found: results.Comparison) -> None:
    from rlx.cli.console import build_table, open_console

    console = open_console()
    for title, (head, *rows) in results.build_comparison_tables(found):
        table = build_table(*map(escape_unprintable, head), title=title, padding=(0, 1))
        for row in rows:
            table.add_row(*map(escape_unprintable, row))
        console.print(table)
        console.print()
    for line in results.list_comparison_notes(found):
        console.print(line, style="dim")
