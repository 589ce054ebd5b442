"""What this machine certainly has or lacks, known without importing torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of GPUs: NVIDIA's, that of Windows' Linux, and AMD's; without one there is no GPU."""
CPU_FILE = Path("/proc/cpuinfo")


def has_no_gpu() -> bool:
    """Tells whether this machine certainly has no GPU, or hides all; False: torch has to be asked."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return hidden or not any(Path(name).exists() for name in GPU_FILES)


def lacks_bfloat16() -> bool:
    """Tells whether this CPU certainly has no fast products in bfloat16: x86 without AVX-512 and AVX-NE-CONVERT.

    PyTorch then computes them by plain loops: 1 GFLOP/s on two AMD cores with AVX2, which do 116 in float32.
    Source: oneDNN's instruction sets (bfloat16 is in avx2_vnni_2, and above avx512_core),
    https://intel.com/content/www/us/en/docs/onednn/developer-guide-reference/2025-1/enum-dnnl-cpu-isa.html
    """
    try:
        text = CPU_FILE.read_text(errors="replace")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)  # ARM's list is called Features
    return flags is not None and {"avx512bw", "avx_ne_convert"}.isdisjoint(flags[1].split())


def fastest_dtype() -> str:
    """Name of the dtype that this machine trains fastest in: bfloat16, or float32 on a CPU without products in it."""
    return "float32" if has_no_gpu() and lacks_bfloat16() else "bfloat16"
