"""Chat templates of four families, written for these tests: they write what the families' own write for such messages.

Each has its peculiarities: SmolLM2's knows no tools, Qwen3's rewrites thoughts of earlier turns, Llama 3.1's takes one
call a message and writes results as JSON, Mistral's asks for ids of 9 characters and refuses roles out of turn.
"""

import json

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

SMOLLM2 = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
{% endif %}<|im_start|>{{ m['role'] + '\\n' + m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}{% for t in tools %}{{- '\\n' + (t | tojson) }}{% endfor %}
{{- '\\n</tools>\\nWithin <tool_call></tool_call> tags.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought, content = '', m.content %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{- content }}
{%- for call in m.tool_calls or [] %}{% if content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

LLAMA3 = """{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{% endif %}
{%- set rest = messages %}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{% set rest = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in rest %}
{%- if m.role in ['tool', 'ipython'] %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once!') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + f.name + '", "parameters": ' }}
{{- (f.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{{- 'Functions:\\n' }}
{%- for t in tools %}{{- (t | tojson(indent=4)) + '\\n\\n' }}{% endfor %}{% endif %}
{{- (m.content | trim) + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """{%- set rest = messages %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}{% endif %}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}{% set ns = namespace(i=0) %}
{%- for m in rest %}{% if not (m.role == 'tool' or m.tool_calls) %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{- raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- set ns.i = ns.i + 1 %}{% endif %}{% endfor %}
{{- '<s>' }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{% endif %}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be strings with length 9!') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']</s>' if loop.last else ', ') }}{% endfor %}
{%- elif m.role == 'assistant' %}{{- ' ' + (m.content | trim) + '</s>' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('IDs should have 9 characters!') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""

CHATML = "<|im_start|> <|im_end|>"
HEADERS = "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|>"
INST = "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]"
FAMILIES = {
    "smollm2": (SMOLLM2, CHATML, "<|im_end|>", "hermes"),
    "qwen3": (QWEN3, CHATML, "<|im_end|>", "hermes"),
    "llama3": (LLAMA3, HEADERS, "<|eot_id|>", "llama3_json"),
    "mistral": (MISTRAL, INST, "</s>", "mistral"),
}
"""The template, special tokens, end of a turn and parser of each family."""


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte, with some merges, and the family's special tokens and template.

    Merges make a difference between ids that were sampled and those of the same text tokenised again.
    """
    template, special, end, _ = FAMILIES[family]
    letters = sorted(ByteLevel.alphabet())
    merges = [("e", "r"), ("i", "n"), ("o", "n"), ("\u0120", "a"), ('"', ":"), ("{", '"'), ("er", "e")]
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(BPE(vocabulary, merges))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, additional_special_tokens=special.split())
    fast.chat_template = template
    return fast


def written(family, calls, random):
    """The calls as a model of the family writes them, with the freedom that models take."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if family == "mistral":
        return f"[TOOL_CALLS] {json.dumps(functions)}"
    if family == "llama3":
        return "; ".join(json.dumps({"name": f["name"], "parameters": f["arguments"]}) for f in functions)
    indent = random.choice([None, 1])
    thought = random.choice(["", "<think>\nhm, where  there\n</think>\n\n"]) + random.choice(["", "I call.\n"])
    return thought + "\n".join(f"<tool_call>\n{json.dumps(f, indent=indent)}\n</tool_call>" for f in functions)


def sampled_ids(tokenizer, text, random):
    """Ids that give this text, not those that the tokenizer would choose: byte by byte where the dice say so."""
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    split = []
    for id in whole:
        token = tokenizer.convert_ids_to_tokens(id)
        plain = id not in tokenizer.all_special_ids and random.random() < 0.5
        split += tokenizer.convert_tokens_to_ids(list(token)) if plain else [id]
    return split
