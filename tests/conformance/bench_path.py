"""Puts bench/, which writes the reports, and tests/support on the path; imported ahead of both."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.extend(str(ROOT / folder) for folder in ("bench", "tests/support"))
