"""`rlx export`: writes the model of a run in the Hugging Face layout."""

from pathlib import Path

import click

from rlx.cli.options import complete_run, registry_option
from rlx.cli.output import print_text
from rlx.launch import open_registry
from rlx.text import escape_unprintable


@click.command()
@click.argument("run", metavar="RUN[@STEP]", shell_complete=complete_run)
@click.argument("folder", type=click.Path(path_type=Path))
@registry_option
def export(run: str, folder: Path, url: str) -> None:
    """Write the model of RUN to FOLDER, in the Hugging Face layout.

    Exports RUN's newest checkpoint, or the one at STEP, also while RUN is running; once RUN has
    finished and keeps no checkpoints, its trained model. A newest checkpoint whose weights or
    logits are not finite, as those of a run that diverged, is named, and the last sound one is
    exported. LoRA adapters are merged into the model, and also written separately to
    FOLDER/adapter.
    """
    ref, _, step = run.partition("@")
    with open_registry(url) as registry:
        found = registry.run(ref)
        from rlx.results import export_model

        written = export_model(registry, found, folder, step or None, print_text)
    print_text(f"✓ {found.id} after step {written}: {escape_unprintable(str(folder))}")
