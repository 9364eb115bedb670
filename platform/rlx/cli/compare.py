"""`rlx compare`: how recipes differ, and their metrics over seeds; or all that two runs are
made of."""

import click

from rlx import results
from rlx.cli.output import print_json, print_text
from rlx.cli.run_summary import describe_mlflow_page
from rlx.cli.verb_group import registry_option
from rlx.errors import SpecError
from rlx.launch import open_registry
from rlx.results import find_side_differences, format_setting, load_diff_side
from rlx.text import escape_unprintable


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|GROUP|NAME|FILE...")
@click.option("--diff", is_flag=True, help="Show in what two differ, RUN or FILE each.")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--md", "form", flag_value="md", help="Print Markdown.")
@registry_option
def compare(names: tuple[str, ...], diff: bool, form: str | None, url: str) -> None:
    """Compare recipes: how their experiments differ, then their metrics over seeds.

    Runs that differ only in their seed form one recipe. A GROUP holds the runs of `rlx submit
    --seeds --grid`; a NAME stands for all finished runs of that experiment. Confidence intervals
    are Student's t over seeds. Differences are from the first recipe, paired by seed, with the
    exact paired permutation test: p is at least .25 with 3 seeds and .0625 with 5. Where two
    recipes were evaluated on the same problems, per-problem differences are shown as well.

    With --diff, two runs or experiments are compared: seed, experiment, plugins (by their code),
    data (by what was read), rlx's own code, and environment. A FILE is compared with the plugins,
    code and packages installed here.
    """
    if diff:
        if form == "md":
            raise SpecError("--diff prints text, or JSON with --json")
        return _show_diff(names, url, as_json=form == "json")
    with open_registry(url) as registry:
        found = results.compare_recipes(registry, names)
        compared = [registry.run(run) for recipe in found.recipes for run in recipe.runs.values()]
    if form == "json":
        print_json(results.build_comparison_json(found))
    elif form == "md":
        print_text(results.format_comparison_markdown(found), nl=False)
    else:
        from rlx.cli.console import open_console
        from rlx.cli.tables import build_table

        console = open_console()
        for title, (head, *rows) in results.build_comparison_tables(found):
            cells = (map(escape_unprintable, row) for row in rows)
            table = build_table(*map(escape_unprintable, head), rows=map(tuple, cells), title=title)
            console.print(table)
            console.print()
        for line in results.list_comparison_notes(found):
            console.print(line, style="dim")
        if mlflow := describe_mlflow_page(compared, names):
            print_text(f"curves in MLflow:  {mlflow}")
    return None


def _show_diff(names: tuple[str, ...], url: str, *, as_json: bool) -> None:
    """Prints in what two runs or experiments differ, and in what they agree."""
    if len(names) != 2:
        raise SpecError("--diff takes two: RUN or FILE each")
    sides = [load_diff_side(name, url) for name in names]
    found = find_side_differences(*sides)
    if as_json:
        report = {"sides": [side.name for side in sides], "differences": found}
        print_json(report)
        return
    from rlx.cli.tables import print_table

    heads = [escape_unprintable(side.name) for side in sides]
    for section, differ in found.items():
        if not differ:
            print_text(f"{section}: the same")
            continue
        print_text(f"{section}: {len(differ)} different")
        rows = [
            tuple(map(escape_unprintable, (f"  {path}", *map(format_setting, pair))))
            for path, pair in differ.items()
        ]
        print_table("", *heads, rows=rows)
