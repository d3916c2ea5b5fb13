"""A checkpoint that answers by a script: a real Llama whose weights are a table of next tokens.

Its layers add nothing, so the next token depends on the last one only. The chat template ends a prompt with a token
that stands for an answer, which follows piece by piece, each a token of the vocabulary; after the last one the answer
ends. So the service itself, prompt by prompt, writes the calls of tools that a test needs: nothing stands between it
and its client, and prompts have as many tokens as with a trained byte-level BPE.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.random_models import draw_weights, write_tokenizer
from wire.dialects import ARGUMENTS, FORMATS, NAME

BASE_VOCAB = 8192  # of the trained tokenizer
HIDDEN = 128
SCALE = 400.0  # logit of the next token; others stay below 0.4 * SCALE, so that temperature 1 changes nothing
_CHARS: Mapping[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
PIECE_BYTES = 7  # of an answer's tokens, which cut characters
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
        {{- mark(loop.index0) + ('FINAL' + m.content if m.content else '') }}
        {%- for call in m.tool_calls or [] %}{% set f = call.function %}CALL{%- endfor %}
        {{- '<|end_of_text|>' }}
    {%- else %}
        {{- '<|' + m.role + '|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ mark(messages | length) }}{%- endif %}"""


CALLS = {  # dialect |-> how the template writes a call
    "hermes": """{{ '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
        {{- f.arguments | tojson + '}\\n</tool_call>\\n' }}""",
    "qwen-xml": """{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}{% for key, value in f.arguments.items() %}
        {{- '<parameter=' + key + '>\\n' }}{{ value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
        {%- endfor %}{{ '</function>\\n</tool_call>\\n' }}""",
    "harmony": """{{ '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' }}
        {{- f.arguments | tojson + '<|call|>' }}""",
}


def write_call(dialect: str, name: str, arguments: Mapping[str, str]) -> str:
    """As the model writes it."""
    written = json.dumps(arguments, ensure_ascii=False)
    if dialect == "qwen-xml":
        written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return FORMATS[dialect].call.replace(NAME, name).replace(ARGUMENTS, written)


def cut(text: str, vocabulary: dict[str, int]) -> list[str]:
    """Tokens of an answer, none of them in the vocabulary of a byte-level BPE, to which they are added."""
    pieces, rest = list[str](), "".join(_CHARS[byte] for byte in text.encode())
    while rest:
        sizes = (size for size in range(PIECE_BYTES, len(rest) + PIECE_BYTES) if rest[:size] not in vocabulary)
        if not (size := next(sizes, 0)):  # other answers end so, too
            rest = pieces.pop() + rest
            size = len(rest)
        pieces.append(rest[:size])
        vocabulary[rest[:size]] = len(vocabulary)
        rest = rest[size:]
    return pieces


def write_scripted_model(
    folder: Path,
    calls: Mapping[str, Sequence[Mapping[str, str]]],
    after: str,
    say: str,
    context: int,
    dialect: str = "hermes",
) -> Path:
    """`calls`: a tool's name |-> the arguments of its calls, which are made at once where the dialect has several.

    `after`: what follows their results.
    """
    folder.mkdir(parents=True)
    write_tokenizer(folder, BASE_VOCAB)
    format = FORMATS[dialect]
    final = format.answer_begin
    answers = {
        f"call:{name}": format.between.join(
            write_call(dialect, name, one) for one in (given[:1] if format.has_one_call else given)
        )
        for name, given in calls.items()
    }
    answers |= {"after": final + after, "say": final + say}
    path = folder / "tokenizer.json"
    file = json.loads(path.read_text(encoding="utf-8"))
    chains = {mark: cut(text, file["model"]["vocab"]) for mark, text in answers.items()}
    path.write_text(json.dumps(file), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = [AddedToken(f"<|{mark}|>", special=True) for mark in answers] + [AddedToken("<|tool|>", special=True)]
    marks.append(AddedToken("<|system|>", special=True))
    tokenizer.add_tokens(marks, special_tokens=True)
    template = TEMPLATE.replace("NAMES", json.dumps(list(calls))).replace("FINAL", final)
    tokenizer.chat_template = template.replace("CALL", CALLS[dialect])
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
    for mark, chain in chains.items():
        ids = [tokenizer.convert_tokens_to_ids(one) for one in (f"<|{mark}|>", *chain)]
        for before, next_id in pairwise([*ids, 1]):  # 1: the end
            head[next_id] += embedding[before]
    weights["model.embed_tokens.weight"] = embedding.bfloat16()
    weights["lm_head.weight"] = (head * SCALE / HIDDEN**0.5).bfloat16()  # the norm makes each row HIDDEN ** 0.5 long
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
