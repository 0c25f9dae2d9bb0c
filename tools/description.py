"""The description that a package index shows: README.md, where files beside it are elsewhere."""

import pathlib
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]*)\)")


def description(readme: str, source: str | None) -> str:
    """With links to files of the repository at `source`; without one, of a link its text and of a figure nothing."""

    def elsewhere(link: re.Match[str]) -> str:
        figure, text, path = link.groups()
        if source is None:
            return "" if figure else text
        return f"{figure}[{text}]({source}/{'raw' if figure else 'blob'}/HEAD/{path})"

    return LINK.sub(elsewhere, readme)


class DescriptionHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        readme = (pathlib.Path(self.root) / "README.md").read_text()
        text = description(readme, metadata.get("urls", {}).get("Source"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
