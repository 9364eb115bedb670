"""`rlx serve`: serves a model over OpenAI's HTTP interface."""

import os
from typing import Any

import click

from rlx.cli.output import print_text
from rlx.cli.verb_group import overrides_option, registry_option
from rlx.cli.web import (
    LOOPBACK,
    access_options,
    choose_address,
    require_free_port,
    run_server,
)
from rlx.errors import SpecError
from rlx.launch import child_environment
from rlx.text import escape_unprintable

SERVE_PORT = 8712
SHUTDOWN_SECONDS = 5
"""Seconds that responses have to end after Ctrl-C."""


@click.command()
@click.argument("target", metavar="RUN[@STEP]|MODEL")
@overrides_option("KEY=VALUE", "Override a runner or sampler value, such as sampler.engine=vllm.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Length of a chat message whose request does not limit it.",
)
@click.option(
    "--queue",
    "places",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Completions that may wait or be sampled; further requests are answered with 429.",
)
@access_options("8712 by default.", "Let in every program of this machine.")
@registry_option
def serve(
    target: str, overrides: tuple[str, ...], max_tokens: int, places: int, url: str, **options: Any
) -> int:
    """Serve a model to every client of OpenAI's interface: completions, chat, and tools.

    Serves the trained model of RUN, or one of its checkpoints: RUN@STEP, or RUN@latest also while
    it is running; or a MODEL, given by its folder, GGUF file, or hub name. The engine is that of
    RUN. Every request needs the token, a random one by default. Traffic is not encrypted: use a
    reverse proxy on an untrusted network.
    """
    address = choose_address(SERVE_PORT, **options)
    if address.token is None and address.host not in LOOPBACK:
        host = escape_unprintable(address.host)
        raise SpecError(f"--no-token: only on this machine's own address, not on {host}")
    require_free_port(address.host, address.port)
    os.environ.update(child_environment())  # before transformers is imported
    from rlx.results import open_served_model
    from rlx.serving import Batcher, create_app

    print_text(f"loading {escape_unprintable(target)}", err=True)
    with (
        open_served_model(target, overrides, url, max_tokens) as opened,
        Batcher(opened.engine, max_rows=opened.max_rows, places=places) as batcher,
    ):
        app = create_app(opened.model, batcher.submit, address.token)
        base = address.link.partition("/?")[0]
        key = "..." if address.is_named else address.token or "none"
        name = escape_unprintable(opened.model.name)
        print_text(f"{name} on {base}/v1, {opened.engine.description}  (Ctrl-C to stop)", err=True)
        print_text(f"  OPENAI_BASE_URL={base}/v1 OPENAI_API_KEY={key}", err=True)
        return run_server(app, address, SHUTDOWN_SECONDS)
