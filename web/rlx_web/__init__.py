"""The web dashboard: server-rendered pages over a registry, each also available as JSON.

It accesses runs only through `rlx_registry`, and writes only requests to stop a run. Model output
is always rendered as text, never as HTML.
"""

from rlx_web.access import Access
from rlx_web.app import create_app

__all__ = ["Access", "create_app"]
