"""`rlx export`: writes the model of a run for Hugging Face tools, with a card, and pushes it."""

from pathlib import Path

import click

from rlx.cli.output import print_text
from rlx.cli.verb_group import registry_option
from rlx.errors import SpecError
from rlx.launch import open_registry
from rlx.text import escape_unprintable


@click.command()
@click.argument("run", metavar="RUN[@STEP]")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--card", is_flag=True, help="Also write a card, with the experiment and figures.")
@click.option("--with-data", is_flag=True, help="With --card: copy the task's data files too.")
@click.option("--push", metavar="OWNER/NAME", help="Upload FOLDER to the Hugging Face hub.")
@click.option("--public", is_flag=True, help="With --push: everybody may see a new repository.")
@registry_option
def export(
    run: str,
    folder: Path,
    card: bool,
    with_data: bool,
    push: str | None,
    public: bool,
    url: str,
) -> None:
    """Write the model of RUN to FOLDER, in the Hugging Face layout.

    Exports RUN's newest checkpoint, or the one at STEP, also while RUN is running; once RUN has
    finished and keeps no checkpoints, its trained model. One whose weights or logits are not
    finite, as those of a run that diverged, is refused. LoRA adapters are merged into the model,
    and also written separately to FOLDER/adapter.

    With --card, FOLDER has all that another home needs for the same figures: `rlx eval . --spec
    experiment.yaml` there gives those after training.
    """
    if with_data and not card:
        raise SpecError("--with-data belongs to --card")
    if public and push is None:
        raise SpecError("--public belongs to --push")
    ref, _, step = run.partition("@")
    with open_registry(url) as registry:
        found = registry.run(ref)
        from rlx.results import export_model, push_model, write_card

        written = export_model(registry, found, folder, step or None)
        if card:
            write_card(registry, found, written, folder, with_data=with_data)
    print_text(f"✓ {found.id} after step {written}: {escape_unprintable(str(folder))}")
    if push is not None:
        print_text(f"✓ {push_model(folder, push, private=not public)}")
