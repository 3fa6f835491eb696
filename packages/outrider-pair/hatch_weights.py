"""Puts the weights into what is built of outrider-pair; the repository has them in the core's tree.

An editable install copies nothing: `outrider_pair.folder` says where the repository has them.
"""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INSIDE = "src/outrider_pair/models"  #: where a source distribution has them


class WeightsHook(BuildHookInterface):
    """Called by hatchling for every wheel and source distribution."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Add the folder. Raises ValueError where there is none to add."""
        root = Path(self.root)
        if version == "editable" or (root / INSIDE).is_dir():
            return
        weights = (root / "../../src/outrider/pair").resolve()
        if not weights.is_dir():
            raise ValueError(
                f"outrider-pair is built in outrider's repository; got no folder {weights}; "
                "build it there, or from a source distribution"
            )
        sdist = self.target_name == "sdist"
        build_data["force_include"][str(weights)] = INSIDE if sdist else "outrider_pair/models"
