"""Small real objects for tests, doctests and users who test their own parts."""

import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torchrl.envs.utils import check_env_specs
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typing_extensions import override

from grpo_rl.collectors.engine_policy import EnginePolicy
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Engine, Samples, Sampling, StepByGenerate
from grpo_rl.engines.fingerprint import fingerprint
from grpo_rl.envs.base import LLMEnv, Reward, Task
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.training.micro_batches import scored_micro_batches


def random_group(
    prompt: int = 4,
    lengths: Sequence[int] = (3, 2),
    vocab: int = 32,
    group_id: int = 0,
    seed: int = 0,
    rewards: Sequence[float] | None = None,
) -> Group:
    """A group of random ids with the given lengths of prompt and responses.

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


def save_tiny_model(folder: str | Path, seed: int = 0, hidden_size: int = 64) -> Path:
    """Writes a model folder: a random two-layer Llama with a byte-level tokenizer and a chat template.

    It is small enough for a unit test to train, and every engine can load it.
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
        hidden_size=hidden_size,
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


RESPONSES = ("", "I don't know.", "It is 42.", "<answer>7</answer>", "\\boxed{1}", "é 🙂 \x00 </answer> <tool_call>{")
"""Responses of the kinds that an untrained policy samples."""


def hermes_parser(tokenizer: PreTrainedTokenizerFast, schemas: list[dict[str, Any]]) -> Any:
    """The parser of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as environments take it."""
    from grpo_rl.engines.vllm.tool_parsers import tool_parser  # brings vLLM, which other tasks do without

    return tool_parser("hermes", tokenizer, schemas)


def check_task(task: Task, responses: Sequence[str] = RESPONSES, max_turns: int = 3) -> None:
    """Checks that a task fulfils the contract that environments, collectors, buffers and losses rely on.

    A tiny random model and a scripted engine run it on CPU in seconds: specs, determinism under a seed, complete
    groups, masks, unchanged token ids, groups as TensorDicts, and the gradient.

    Args:
        task: any, with at least two rows.
        responses: the policy's responses, in turn; include some with a reward.
        max_turns: turns of the policy, for tasks that reply.

    Raises:
        AssertionError: names the broken part of the contract.
        ScoreError: a scorer failed.

    >>> from grpo_rl.envs.gsm8k import GSM8K
    >>> check_task(GSM8K([{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 3?", "answer": "#### 5"}]))
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer: Any = AutoTokenizer.from_pretrained(save_tiny_model(folder))
        policy = TrainPolicy(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))

    def make_env(seed: int = 0) -> LLMEnv:
        how = {"max_turns": max_turns, "max_failed_fraction": 0.0, "tool_parser": hermes_parser if task.tools else None}
        return LLMEnv(task, tokenizer, 2, 4, seed=seed, **how)

    assert len(task.rows) >= 2, f"{len(task.rows)} rows; check_task needs two to tell them apart"
    check_env_specs(make_env())

    first, again = make_env().next_prompts(), make_env().next_prompts()
    assert [p.ids.tolist() for p in first] == [p.ids.tolist() for p in again], "prompt() gives other messages each time"
    env = make_env()
    for row in (task.rows[0], task.rows[1]):
        scores = [_scored(env, row, text) for text in responses]
        assert scores == [_scored(env, row, text) for text in responses], "score() gives other rewards each time"
        backwards = [_scored(env, row, text) for text in reversed(responses)]
        assert scores == backwards[::-1], "a score depends on what was scored before"

    ids = [tokenizer(text)["input_ids"] for text in responses]
    turn, seen = itertools.cycle(ids), set[tuple[int, ...]]()

    def respond(prompt: Sequence[int], g: int) -> list[int]:
        seen.add(tuple(prompt))
        return [*next(turn), tokenizer.eos_token_id]

    policy_of_responses = EnginePolicy(ScriptedEngine(respond), Sampling(max_new_tokens=512))
    groups = SyncCollector(make_env(), policy_of_responses, 8).collect()
    assert [group.size for group in groups] == [4, 4], "a group is not complete"
    assert groups[0].group_id != groups[1].group_id
    sampled = {tuple([*response, tokenizer.eos_token_id]) for response in ids}
    for group in groups:
        assert group.chosen_lengths.gt(0).all(), "a response has no trainable token"
        for g, response in enumerate(group.responses):
            trainable = group.trainable[group.offsets[g] : group.offsets[g + 1]].tolist()
            for chosen, run in itertools.groupby(range(len(response)), key=trainable.__getitem__):
                places = list(run)
                if chosen:
                    assert tuple(response[places].tolist()) in sampled, "trainable tokens are not a whole response"
                    before = tuple([*group.prompt_ids.tolist(), *response[: places[0]].tolist()])
                    assert before in seen, "the engine saw other ids than those that are trained on"
    _check_gradient(policy, groups)


def _scored(env: LLMEnv, row: dict, text: str) -> Reward:
    messages = [*env.task.prompt(row), {"role": "assistant", "content": text}]
    reward = env.guard.score_dialogs(row, [messages], "a row")[0]
    assert isinstance(reward, Reward), reward
    return reward


def _check_gradient(policy: TrainPolicy, groups: Sequence[Group]) -> None:
    back = [Group.from_tensordict(group.to_tensordict()) for group in groups]
    for group, same in zip(groups, back, strict=True):
        assert torch.equal(group.response_ids, same.response_ids) and torch.equal(group.trainable, same.trainable)
        assert torch.equal(group.rewards, same.rewards)
    loss = GRPOLoss()
    for tokens in scored_micro_batches(policy, AdvantageEstimator()(back), MicroBatching(4096)):
        loss(tokens)["loss"].backward()
    gradients = [parameter.grad for parameter in policy.model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients), "the gradient is not finite"
    differ = any((group.rewards != group.rewards[0]).any() for group in groups)
    assert not differ or any(gradient.any() for gradient in gradients), "rewards differ and the gradient is zero"


class ScriptedEngine(StepByGenerate, Engine):
    """Gives the responses that ``script(prompt_ids, g)`` returns, log-probability 0 each; holds weights as others do.

    >>> engine = ScriptedEngine(lambda prompt, g: [g] * g)
    >>> engine.generate([[7]], n=3, sampling=Sampling(max_new_tokens=2))[0].offsets.tolist()
    [0, 0, 1, 3]
    """

    in_rounds = False  # a script does not know the batch

    def __init__(self, script: Callable[[Sequence[int], int], Sequence[int]], max_model_len: int = 1 << 20) -> None:
        super().__init__()
        self.version, self.max_model_len, self.dtype = 0, max_model_len, torch.bfloat16
        self.takes_adapters = self.proves_bytes = False
        self.weights: dict[str, Tensor] = {}
        self._script = script

    @override
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        samples = []
        for prompt in prompts:
            responses = [list(self._script(prompt, g)) for g in range(n)]
            cut = [response[: sampling.max_new_tokens] for response in responses]
            log_probs = [[0.0] * len(response) for response in cut]
            truncated = [len(response) > sampling.max_new_tokens for response in responses]
            samples.append(Samples.from_lists(cut, log_probs, truncated, self.version))
        return samples

    @override
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weights |= {name: tensor.detach().to(self.dtype, copy=True) for name, tensor in weights}
        self.version = version

    @override
    def fingerprints(self, shapes: Mapping[str, torch.Size], read_back: bool = False) -> dict[str, int]:
        return {name: fingerprint(self.weights[name]) for name in shapes}

    def sleep(self) -> None:
        """Does nothing: there is nothing to free."""

    def wake(self) -> None:
        """Does nothing: the engine never sleeps."""

    def close(self) -> None:
        """Drops the weights."""
        self.weights = {}
