"""What `make wheels` adds to a wheel: the compiled kernels of one platform, and its name.

OUTRIDER_WHEEL=PLATFORM=FOLDER names both, as `tools/build_kernels.py` has made the folder. Without
it a wheel is for every platform, and kernels are compiled where it is installed.
"""

import os
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: The oldest systems that these libraries run on, as wheels are named for them.
TAGS = {
    "linux-x86_64": "manylinux_2_17_x86_64",
    "linux-aarch64": "manylinux_2_17_aarch64",
    "darwin-aarch64": "macosx_11_0_arm64",
}


class KernelsHook(BuildHookInterface):
    """Called by hatchling for every wheel."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Add the libraries. Raises ValueError for a platform that there is not."""
        asked = os.environ.get("OUTRIDER_WHEEL")
        if not asked or version == "editable":
            return
        platform, _, folder = asked.partition("=")
        libraries = sorted(Path(folder).glob("kernels-*.so"))
        if platform not in TAGS or not libraries:
            raise ValueError(
                f"OUTRIDER_WHEEL must be PLATFORM=FOLDER with libraries in it; got {asked!r}; "
                f"platforms are {', '.join(TAGS)}"
            )
        for path in libraries:
            inside = f"outrider/models/cpu_kernels/shipped/{path.name}"
            build_data["force_include"][str(path.resolve())] = inside
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{TAGS[platform]}"
