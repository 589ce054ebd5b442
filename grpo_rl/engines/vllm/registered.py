"""Everything of ours that vLLM's processes have to know before a model is built there; importing it registers it."""

import torch

import grpo_rl.engines.vllm.environment  # noqa: F401

# isort: split
from grpo_rl.engines.vllm.cpu import (
    attend_without_amx,
    give_drafts_their_temperature,
    load_models_without_torchvision,
    offer_norms,
    record_kept,
    record_packing,
    rotate_heads_in_rows,
    skip_proxies,
)
from grpo_rl.engines.vllm.kept import leave_out_whole_sets
from grpo_rl.engines.vllm.own_forms import record_decays, record_expert_packing
from grpo_rl.engines.vllm.shared_transfer import register
from grpo_rl.engines.vllm.text_part import TextPartLoader  # noqa: F401, registered with vLLM

register()  # the entry point does it too, where the package is installed and VLLM_PLUGINS does not leave it out
record_packing()
record_expert_packing()
record_decays()
if torch.cuda.is_available():
    leave_out_whole_sets()
else:
    attend_without_amx()
    give_drafts_their_temperature()
    offer_norms()
    record_kept()
    rotate_heads_in_rows()
    skip_proxies()
    load_models_without_torchvision()
