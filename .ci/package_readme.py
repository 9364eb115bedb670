"""Build hook: the README of a package, whose links and pictures have absolute addresses.

A package index shows the README without the files beside it. The README of the checkout keeps its
relative links; this hook writes those of the package, from the repository's address in
`[project.urls]` and the tag of the version.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["PackageReadme", "make_links_absolute"]

TARGET = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


def make_links_absolute(readme: str, repository: str, tag: str) -> str:
    """Replaces relative targets: links by a page of the repository, pictures by the file itself."""

    def replace(found: re.Match[str]) -> str:
        mark, text, path = found.groups()
        return f"{mark}{text}({repository}/{'raw' if mark else 'blob'}/{tag}/{path})"

    # Inner links first: a picture may be the text of a link.
    return TARGET.sub(replace, readme)


class PackageReadme(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Reads README.md and adds it to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata["urls"]["Repository"]
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": make_links_absolute(text, repository, f"v{metadata['version']}"),
        }
