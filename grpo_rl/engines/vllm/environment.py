"""Environment variables that vLLM reads when it is imported; whatever runs an engine imports this module first."""

import logging
import os
import warnings

# In-process: a second process would take half a minute to start and copy every weight twice.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])

# vLLM's own use of torch, nothing a user could change.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
