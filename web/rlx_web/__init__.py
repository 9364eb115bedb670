"""The dashboard over the registry: server-rendered pages, each with a JSON twin.

Reads only, and only through `rlx_registry`. What models wrote is shown as text, never as HTML.

    uvicorn.run(create_app("sqlite:///runs.db"), host="127.0.0.1")
"""

from rlx_web.access import Access
from rlx_web.app import create_app

__all__ = ["Access", "create_app"]
