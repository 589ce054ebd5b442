"""Raw decoding of one model on a CPU, by vLLM and by llama.cpp: `python benchmarks/decoding.py`.

The work is what a step of the quickstart samples: its first 16 prompts x 8 responses x 24 tokens, each prompt computed
once. vLLM runs as the trainer's engine does; llama.cpp (`pip install llama-cpp-python`, which compiles it for this
machine) decodes the same weights in the same dtype, all responses in one batch, the likeliest token each, its keys and
values of a prompt shared by its responses. Neither makes text, computes log-probabilities of more than the sampled
tokens, or scores. `share of the limit` is by the machine's own rates, as `limit_fraction/sample` of a run.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import harness
import numpy as np
import torch

NAME = "decoding"
VLLM, LLAMA_CPP = "vllm", "llama.cpp"
CODE = ("grpo_rl/engines", "grpo_rl/perf")
F32, BF16 = 0, 32
"""Numbers of dtypes in a GGUF file's header."""


@dataclass(frozen=True)
class Work:
    """Prompts as token ids, each with so many responses of so many tokens."""

    model: str
    prompts: Sequence[Sequence[int]]
    repeats: int
    response: int

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.repeats * self.response


def vllm_arm(steps: harness.Steps, work: Work) -> None:
    """`LLM.generate` of the engine that a run has."""
    from collector import empty_prefix_cache

    from grpo_rl.engines.base import Sampling
    from grpo_rl.engines.vllm.engine import VLLMEngine

    engine = VLLMEngine(Path(work.model), max_model_len=512, dtype=str(harness.dtype()).removeprefix("torch."))
    sampling = Sampling(max_new_tokens=work.response, min_new_tokens=work.response)
    with contextlib.closing(engine):
        while steps.wait():
            empty_prefix_cache(engine._llm)
            samples = engine.generate(work.prompts, work.repeats, sampling)
            assert sum(len(each.response_ids) for each in samples) == work.tokens, "not the same work"
            steps.done()


def llama_cpp_arm(steps: harness.Steps, work: Work) -> None:
    """llama.cpp's own loop: a batch with one token of every response, again and again."""
    import llama_cpp as llama

    sequences, longest = len(work.prompts) * work.repeats, max(map(len, work.prompts))
    with tempfile.TemporaryDirectory() as folder:
        path = to_gguf(Path(work.model), Path(folder) / "model.gguf")
        model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx = sequences * (longest + work.response)
    settings.n_batch = settings.n_ubatch = max(sequences, longest)
    settings.n_seq_max, settings.kv_unified = sequences, True
    settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
    context = llama.llama_init_from_model(model, settings)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    memory, batch = llama.llama_get_memory(context), llama.llama_batch_init(settings.n_batch, 0, 1)

    def decode(tokens: Sequence[int], places: Sequence[int], of: Sequence[int], last_only: bool) -> np.ndarray:
        """The likeliest token behind each token, or behind the last."""
        batch.n_tokens = len(tokens)
        for i, (token, place, sequence) in enumerate(zip(tokens, places, of, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, place, 1, sequence
            batch.logits[i] = not last_only or i + 1 == len(tokens)
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama.cpp could not decode a batch")
        rows = 1 if last_only else len(tokens)
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (rows, vocab)).argmax(1)

    while steps.wait():
        llama.llama_memory_clear(memory, True)
        ids = np.zeros(sequences, dtype=np.int64)
        for i, prompt in enumerate(work.prompts):
            own = range(i * work.repeats, (i + 1) * work.repeats)
            ids[own] = decode(prompt, range(len(prompt)), [own[0]] * len(prompt), last_only=True)
            for sequence in own[1:]:
                llama.llama_memory_seq_cp(memory, own[0], sequence, -1, -1)
        starts = np.repeat([len(prompt) for prompt in work.prompts], work.repeats)
        for step in range(work.response - 1):
            ids = decode(ids.tolist(), (starts + step).tolist(), range(sequences), last_only=False)
        steps.done()


def to_gguf(model: Path, out: Path) -> Path:
    """A Llama's weights as a GGUF file without a tokenizer, matrices in the dtype of this machine's products."""
    import gguf
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config, heads = loaded.config, loaded.config.num_attention_heads
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    wanted = gguf.GGMLQuantizationType.BF16 if harness.dtype_name() == "bf16" else gguf.GGMLQuantizationType.F32
    writer.add_file_type(BF16 if harness.dtype_name() == "bf16" else F32)
    for name, weight in loaded.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        array = weight.numpy()
        if (kind := name.split(".")[-2]) in ("q_proj", "k_proj"):  # its rotation takes neighbours, not halves
            count = heads if kind == "q_proj" else config.num_key_value_heads
            array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        own = wanted if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(array), own)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def limit_s(work: Work) -> float:
    """The seconds that this machine would need at its own measured rates."""
    from transformers import AutoModelForCausalLM

    from grpo_rl.perf.roofline import ModelSizes, floors_s, machine_rates
    from grpo_rl.testing import random_group

    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=harness.dtype())
    groups = [random_group(len(ids), [work.response] * work.repeats, seed=i) for i, ids in enumerate(work.prompts)]
    return floors_s(groups, ModelSizes.of(model), machine_rates(harness.dtype()))["sample"]


def make_work(model: str, prompts: int, repeats: int, response: int) -> Work:
    """The first prompts of the quickstart."""
    from grpo_rl.assembly.environment import make_env
    from grpo_rl.policies.hub import load_tokenizer, resolve_model
    from grpo_rl.settings.compose import compose_config
    from grpo_rl.settings.schema import Settings

    settings = Settings.read(compose_config("grpo_gsm8k", ["+experiment=quickstart", f"model.name={model}"]))
    folder = resolve_model(model)
    env = make_env(settings, load_tokenizer(folder))
    return Work(str(folder), [prompt.ids.tolist() for prompt in env.next_prompts(prompts)], repeats, response)


def main() -> None:
    number = harness.at_least_one
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a Llama: a folder or a name")
    parser.add_argument("--prompts", type=number, default=16, help="prompts")
    parser.add_argument("--repeats", type=number, default=8, help="responses to each")
    parser.add_argument("--response", type=number, default=24, help="tokens of each response")
    args = parser.parse_args()
    load = harness.require_quiet(args.force)
    work = make_work(args.model, args.prompts, args.repeats, args.response)
    arms = {VLLM: vllm_arm} | ({LLAMA_CPP: llama_cpp_arm} if find_spec("llama_cpp") else {})
    if LLAMA_CPP not in arms:
        print("llama.cpp is left out: pip install llama-cpp-python", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        made = {
            name: stack.enter_context(contextlib.closing(harness.Arm(name, arm, work))) for name, arm in arms.items()
        }
        results = harness.rounds({name: arm.step for name, arm in made.items()}, args.steps)
    least_s = limit_s(work)
    summary = {name: harness.summarize(reports) for name, reports in results.items()}
    seconds = {name: each["median"]["step_s"] for name, each in summary.items()}
    result = {
        "shows": f"Raw decoding of {work.tokens} tokens, {args.prompts} prompts x {args.repeats} responses x "
        f"{args.response} tokens, by the trainer's vLLM and by llama.cpp, in {harness.dtype_name()}; the figure is "
        "vLLM's tokens a second.",
        "table": [
            {"decoder": name, "s": s, "tokens/s": work.tokens / s, "share of the limit": least_s / s}
            for name, s in seconds.items()
        ],
        "arms": summary,
        "code": harness.code(*CODE),
        "machine": harness.machine(),
        **load,
    }
    if LLAMA_CPP in arms:
        result["peer"] = f"llama-cpp-python {version('llama-cpp-python')}"
    harness.finish(NAME, work.tokens / seconds[VLLM], result, args.out)


if __name__ == "__main__":
    main()
