"""Every TensorDict key of the project: shape, dtype, writer and reader.

A row of a batch is one trajectory (one response). Letters: P prompt tokens, R response tokens, T = P + R.
The names are TorchRL's, so that its own modules accept our TensorDicts. In a row that is a dict (`grpo_rl.envs.rows`)
the numbers and flags that ``LLMEnv`` writes are Python's.
"""

QUERY = "query"
"""str: the dataset row's question, for logs only. Written by ``LLMEnv.reset``."""

HISTORY = "history"
"""`grpo_rl.envs.chat.Dialog`: the conversation so far, the data row that it is about, and once it is over the scorer's
verdict. Written by ``LLMEnv.reset`` and ``step``, read by ``step``, the collector and evaluation."""

TOKENS_PROMPT = ("tokens", "prompt")
"""[P] int64: what the policy goes on from: the prompt, later the whole conversation. Written by ``LLMEnv.reset`` and
``step``, read by the policy."""

TOKENS_RESPONSE = ("tokens", "response")
"""[R] int64: the sampled response, as ids. Written by the policy (an engine), read by ``LLMEnv.step``."""

TOKENS_FULL = ("tokens", "full")
"""[T] int64: prompt and response. Written by ``Group.to_tensordict``, read by TorchRL's losses."""

LOG_PROBS_FULL = ("log_probs", "full")
"""[T] float32: the sampler's log-probabilities, NaN on tokens that the policy did not sample, which TorchRL's losses
skip. Written and read like ``TOKENS_FULL``."""

LOG_PROBS_RESPONSE = ("log_probs", "response")
"""[R] float32: the sampler's log-probabilities of the response. Written by the policy, read by the collector; written
by ``Group.to_tensordict``, read by ``Group.from_tensordict``."""

ROUTES_FULL = ("routes", "full")
"""[T, layers, experts of a token] integers: the experts that the sampler's routers chose, if they are replayed. Written
and read by ``Group.to_tensordict`` and ``from_tensordict``."""

REF_LOG_PROBS_FULL = ("next", "ref_log_probs", "full")
"""[T] float32: the frozen reference's log-probabilities, 0 on the prompt. Written by ``Group.to_tensordict``."""

ASSISTANT_MASK = ("masks", "all_assistant_mask")
"""[T] bool: True on tokens that the policy sampled. Written and read like ``TOKENS_FULL``."""

ATTENTION_MASK = ("masks", "all_attention_mask")
"""[T] bool: True on real tokens. Written and read like ``TOKENS_FULL``."""

REWARD = ("next", "reward")
"""[1] float32 after a step, [1, 1] in the LLM layout: total reward. Written by ``LLMEnv.step``, read by advantages."""

REWARD_PARTS = ("reward_parts",)
"""Prefix of the named reward parts, [1] float32 each, inside the step's result. Written by ``LLMEnv.step``."""

MEASURES = ("measures",)
"""Prefix of the numbers logged next to the reward, [] float32 each. Written and read like ``TOKENS_FULL``."""

ADVANTAGE = "advantage"
"""[1, 1] float32: the response's advantage, one for all its tokens. Written and read like ``TOKENS_FULL``."""

FAILED = "failed"
"""[1] bool: the response has no reward, as its scorer or a tool failed; the collector leaves it out of its group.
Written by ``LLMEnv.reset`` and ``step``."""

GROUP_ID = "group_id"
"""[1] int64: identifies the responses to one prompt. Written by ``LLMEnv.reset``, read by the collector."""

ROW = "row"
"""[1] int64: index of the dataset row. Written by ``LLMEnv.reset``, read by the collector and the logs."""

VERSIONS = "policy_version"
"""[R] int64: version of the weights that sampled each token. Written by the policy, read by the staleness metrics."""

TRUNCATED = "response_truncated"
"""[1] bool: the response reached ``sampling.max_new_tokens``. Written by the policy, read by
``LLMEnv.step``, where it ends the conversation, and by metrics."""

MAX_TOKENS = "max_tokens"
"""[1] int64: most tokens of a conversation, which the policy's model can read. Written by the policy, read by
``LLMEnv.step``; without it there is no limit."""

SESSION = "session"
"""[1] int64: the agent's session that the response is of. Written and read like ``TOKENS_FULL``."""

KEPT_IDS = ("kept", "ids")
"""[K] int32: ids that the sampler could draw from, token after token, where it cut others off. Written by the policy
and ``Group.to_tensordict``, read by ``Group.from_tensordict``."""

KEPT_COUNTS = ("kept", "counts")
"""[R] int64: how many of ``KEPT_IDS`` belong to each response token. Written and read with them."""
