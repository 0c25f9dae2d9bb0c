"""The description in a package index: README.md without relative links."""

import pathlib
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]*)\)")


def description(readme: str, source: str | None) -> str:
    """Make links absolute at `source`; without one, replace links by their text and remove figures."""

    def replace(link: re.Match[str]) -> str:
        figure, text, path = link.groups()
        if source is None:
            return "" if figure else text
        return f"{figure}[{text}]({source}/{'raw' if figure else 'blob'}/HEAD/{path})"

    return LINK.sub(replace, readme)


class DescriptionHook(MetadataHookInterface):
    """Hatchling's hook that sets the description when a distribution is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (pathlib.Path(self.root) / "README.md").read_text()
        text = description(readme, metadata.get("urls", {}).get("Source"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
