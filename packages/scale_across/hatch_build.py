"""Names the sibling package `common` as a dependency in a way that pip can resolve.

`pip install ./packages/scale_across` alone must find `common` beside it, so a normal build names it by its path. In an
editable install of the whole workspace that same path would clash with `-e packages/common` (pip treats the two as
different sources), so there the plain name is enough.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SiblingDependency(BuildHookInterface):
    """Adds `stratacross-common` to the wheel's requirements."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the requirement; `version` is "editable" or "standard"."""
        common = (Path(self.root).parent / "common").as_uri()
        name = "stratacross-common"
        build_data["dependencies"].append(name if version == "editable" else f"{name} @ {common}")
