"""Small real objects for tests, doctests and users who test their own parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from grpo_rl.rollout import Group


def random_group(
    prompt: int = 4,
    lengths: Sequence[int] = (3, 2),
    vocab: int = 32,
    group_id: int = 0,
    seed: int = 0,
    rewards: Sequence[float] | None = None,
) -> Group:
    """A group of random ids with the given prompt length and answer lengths.

    >>> random_group(lengths=[1, 2, 0]).lengths.tolist()
    [1, 2, 0]
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    return Group(
        group_id=group_id,
        row=group_id,
        prompt_ids=torch.randint(vocab, (prompt,), generator=generator),
        response_ids=torch.randint(vocab, (tokens,), generator=generator),
        log_probs=-torch.rand(tokens, generator=generator) * 3,
        versions=torch.zeros(tokens, dtype=torch.long),
        trainable=torch.ones(tokens, dtype=torch.bool),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        rewards=torch.rand(len(lengths), generator=generator) if rewards is None else torch.tensor(rewards),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


def save_tiny_model(folder: str | Path, seed: int = 0) -> Path:
    """Writes a random two-layer Llama with a byte-level tokenizer and a chat template: what a model folder holds.

    Small enough for a unit test to train, real enough for every engine to load.
    """
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(["<end>", *sorted(ByteLevel.alphabet())])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return Path(folder)


class KeepFp64(TorchFunctionMode):
    """Casts to fp32 become casts to fp64: transformers' norms, RoPE and eager softmax round inside, whatever the model.

    >>> with KeepFp64():
    ...     torch.zeros(1, dtype=torch.float64).to(torch.float32).dtype, torch.zeros(1).float().dtype
    (torch.float64, torch.float64)
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def keep(x: object) -> object:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(keep, args), **{name: keep(x) for name, x in (kwargs or {}).items()})


def to_fp64(model: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64 throughout, for comparisons at 1e-9: its norms and RoPE no longer round to fp32.

    Only they are treated, so that a cast in the code under test still shows.
    """

    def unrounded(forward):
        def call(*args, **kwargs):
            with KeepFp64():
                return forward(*args, **kwargs)

        return call

    for module in model.double().modules():
        if type(module).__name__.endswith(("RMSNorm", "RotaryEmbedding")):
            module.forward = unrounded(module.forward)
    return model
