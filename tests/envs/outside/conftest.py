"""Modules beside these tests can be imported by them; those that need verifiers are left out where it is missing."""

import importlib.util
import sys
from pathlib import Path

collect_ignore = [] if importlib.util.find_spec("verifiers") else ["small_taskset.py", "small_dialog.py"]
sys.path.insert(0, str(Path(__file__).parent))
