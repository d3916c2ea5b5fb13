"""A checkpoint that answers by a script: a real Llama whose weights are a table of next tokens.

Its layers add nothing, so the next token depends on the last one only. The chat template ends a prompt with a token
that stands for an answer, which is one token of the vocabulary; after it the answer ends. So the service itself, prompt
by prompt, writes the calls of tools that a test needs: nothing stands between it and its client, and prompts have as
many tokens as with a trained byte-level BPE.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.support.random_models import draw_weights, write_tokenizer

BASE_VOCAB = 8192  # of the trained tokenizer
HIDDEN = 128
SCALE = 400.0  # logit of the next token; others stay below 0.4 * SCALE, so that temperature 1 changes nothing
CALL_TEXT = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
# What the last message that is not the system's decides: "after" a tool's result, "call:NAME" where the user says
# "please call" and there is a tool of that name, else "say". An answer in the history has the mark that it began with.
TEMPLATE = """{{ bos_token }}
{%- macro mark(index) %}
    {%- set last = messages[:index] | rejectattr('role', 'equalto', 'system') | list | last %}
    {%- set found = namespace(name='say') %}
    {%- for tool in tools or [] if tool.function.name in NAMES and 'please call' in last.content | lower %}
        {%- set found.name = 'call:' + tool.function.name %}
    {%- endfor %}
    {{- '<|after|>' if last.role == 'tool' else '<|' + found.name + '|>' }}
{%- endmacro %}
{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- mark(loop.index0) + (m.content or '') }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end_of_text|>' }}
    {%- else %}
        {{- '<|' + m.role + '|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ mark(messages | length) }}{%- endif %}"""


def write_scripted_model(folder: Path, calls: Mapping[str, str], after: str, say: str, context: int) -> Path:
    """`calls`: a tool's name |-> the arguments that it is called with, as JSON; `after`: what follows its result."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, BASE_VOCAB)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = {f"call:{name}": CALL_TEXT.format(name=name, arguments=arguments) for name, arguments in calls.items()}
    answers |= {"after": after, "say": say}
    marks = [AddedToken(f"<|{mark}|>", special=True) for mark in answers] + [AddedToken("<|tool|>", special=True)]
    marks.append(AddedToken("<|system|>", special=True))
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in answers.values()])
    tokenizer.chat_template = TEMPLATE.replace("NAMES", json.dumps(list(calls)))
    tokenizer.model_max_length = context
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    config = {
        "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "intermediate_size": 64, "vocab_size": -(-len(tokenizer) // 64) * 64,
        "tie_word_embeddings": False, "max_position_embeddings": context, "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 1, "attention_bias": False, "mlp_bias": False, "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = dict(draw_weights(config))
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    embedding = torch.nn.functional.normalize(weights["model.embed_tokens.weight"].float(), dim=1)  # [V, H]
    head = torch.zeros_like(embedding)
    for mark, text in answers.items():
        first, answer = (tokenizer.convert_tokens_to_ids(one) for one in (f"<|{mark}|>", text))
        head[answer] += embedding[first]
        head[1] += embedding[answer]  # the end
    weights["model.embed_tokens.weight"] = embedding.bfloat16()
    weights["lm_head.weight"] = (head * SCALE / HIDDEN**0.5).bfloat16()  # the norm makes each row HIDDEN ** 0.5 long
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
