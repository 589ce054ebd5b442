"""Makes the recorded run of ``grpo-rl report --demo`` from a run's folder: `python tools/record_demo.py RUN`.

The run is one of ``grpo-rl train +experiment=quickstart`` on a quiet machine, 7 to 15 minutes on two CPU cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_rl.report.demo import RECORDED, pack

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    pack(Path(sys.argv[1]), RECORDED)
    print(f"{RECORDED}: {RECORDED.stat().st_size:,} bytes")
