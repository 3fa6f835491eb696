"""The training scripts are no part of the package: they are found from the project's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
