"""Checks within seconds that the Hugging Face hub can be reached: its client takes a minute without a network."""

import functools
import os
import sys
import threading

import httpx2  # of huggingface_hub
from huggingface_hub import constants

DEADLINE_S = 5.0


@functools.cache
def why_no_hub() -> str | None:
    """The reason why the hub is not contacted: ``HF_HUB_OFFLINE`` is set, or it does not respond; None if it does.

    It is found out once: when it has not responded, no library asks it any more in this process and those that it
    starts.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    failed = [f"{constants.ENDPOINT} has not responded in {DEADLINE_S:g} s"]

    def ask() -> None:
        try:
            httpx2.head(constants.ENDPOINT, timeout=2 * DEADLINE_S)  # the thread is left at its own deadline
            failed.clear()
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            failed[0] = f"{constants.ENDPOINT}: {error}"

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no deadline of its own
    thread.start()
    thread.join(DEADLINE_S)
    if not (why := list(failed)):  # the thread may yet be responded to
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in filter(None, (constants, sys.modules.get("datasets.config"))):
        vars(module)["HF_HUB_OFFLINE"] = True
    return why[0]
