"""Chat templates of model families: real ones from packages of PyPI, and rebuilt ones."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import pytest

from gateway.text.template import ChatTemplate, Conversation, TemplateRefusalError
from gateway.tools.dialect import PROBE_TOOL, PROBES

PACKAGES = {  # those that have real templates |-> pip's options
    "trl==1.16.0": (),
    "llama-cpp-python==0.3.36": ("--no-binary", "llama-cpp-python"),  # llama.cpp's own, in its source
}
TRL, LLAMA = PACKAGES
FOLDER = Path("build/chat_templates")
WAIT_S = 300


@cache
def _folder(package: str) -> Path | None:
    """A package's templates, downloaded first where they are not there; None where they cannot be had."""
    found = FOLDER / package
    if not found.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=FOLDER) as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
            try:
                subprocess.run([*command, *PACKAGES[package], package], check=True, timeout=WAIT_S, capture_output=True)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                return None
            texts = dict(_templates_in(next(Path(temporary).iterdir())))
            ready = Path(temporary, "ready")
            ready.mkdir()
            for name, text in texts.items():
                (ready / name).write_bytes(text)
            with suppress(OSError):  # another process was first
                ready.rename(found)
    return found


def _templates_in(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with ZipFile(archive) as wheel:
            yield from ((Path(one).name, wheel.read(one)) for one in wheel.namelist() if one.endswith(".jinja"))
        return
    with tarfile.open(archive) as source:
        for one in source:
            if one.isfile() and one.name.endswith(".jinja") and (file := source.extractfile(one)):
                yield Path(one.name).name, file.read()


def downloaded(name: str, package: str = TRL) -> str:
    """Skips the test where pip cannot download, except in CI."""
    folder = _folder(package)
    if folder is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"chat templates are in {package}, which pip cannot download now")
        pytest.skip(f"pip cannot download {package} now")
    return (folder / f"{name}.jinja").read_text()


def _rebuilt(calls: str, head: str = "{{ tools | tojson }}") -> str:
    """A template that writes a message's calls in this way."""
    return (
        f"{{% if tools %}}{head}{{% endif %}}{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}"
        f"{{% if m.tool_calls %}}{calls}{{% endif %}}<eos>{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def _each(call: str, between: str = "") -> str:
    """`call` for each of a message's, as `f` and its arguments as `a`."""
    return (
        "{% for c in m.tool_calls %}{% set f = c.function %}{% set a = f.arguments %}"
        f"{call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}"
    )


_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ a | tojson }}}'
_ITEMS = "{% for k, v in a.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_PYTHON = "{{ f.name }}(" + _ITEMS + "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})"
_DSML = "｜DSML｜"
REBUILT: Mapping[str, str] = {  # a format's name |-> template
    "granite": _rebuilt("<|tool_call|>[" + _each(_OBJECT, ", ") + "]"),
    "phi4": _rebuilt("<|tool_call|>[" + _each(_OBJECT, ", ") + "]<|/tool_call|>"),
    "nemotron": _rebuilt("<TOOLCALL>[" + _each(_OBJECT, ", ") + "]</TOOLCALL>"),
    "cohere": _rebuilt(
        "<|START_ACTION|>[\n"
        + _each(
            '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ a | tojson }}}',
            ",\n",
        )
        + "\n]<|END_ACTION|>"
    ),
    "olmo": _rebuilt("<function_calls>" + _each(_PYTHON, "\n") + "</function_calls>"),
    "llama4": _rebuilt("[" + _each(_PYTHON, ", ") + "]"),
    "mistral": _rebuilt("[TOOL_CALLS] [" + _each(_OBJECT[:-1] + ', "id": "{{ c.id }}"}', ", ") + "]"),
    "mistral-args": _rebuilt(_each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ a | tojson }}")),
    "deepseek-v31": _rebuilt(
        "<｜tool▁calls▁begin｜>"
        + _each("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ '' + a }}<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek-v32": _rebuilt(
        f"<{_DSML}function_calls>\n"
        + _each(
            f'<{_DSML}invoke name="{{{{ f.name }}}}">\n{_ITEMS}<{_DSML}parameter name="{{{{ k }}}}" '
            f"string=\"{{{{ 'true' if v is string else 'false' }}}}\">{_VALUE}</{_DSML}parameter>\n{{% endfor %}}"
            f"</{_DSML}invoke>\n"
        )
        + f"</{_DSML}function_calls>"
    ),
    "kimi": _rebuilt(
        "<|tool_calls_section_begin|>"
        + _each("<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ a | tojson }}<|tool_call_end|>")
        + "<|tool_calls_section_end|>"
    ),
    "minimax": _rebuilt(
        "\n<minimax:tool_call>\n"
        + _each(
            '<invoke name="{{ f.name }}">\n'
            + _ITEMS
            + '<parameter name="{{ k }}">'
            + _VALUE
            + "</parameter>\n{% endfor %}</invoke>\n"
        )
        + "</minimax:tool_call>"
    ),
    "qwen-xml": _rebuilt(
        _each(
            "<tool_call>\n<function={{ f.name }}>\n"
            + _ITEMS
            + "<parameter={{ k }}>\n"
            + _VALUE
            + "\n</parameter>\n{% endfor %}</function>\n</tool_call>",
            "\n",
        )
    ),
    "harmony": (
        "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
        "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary "
        "json<|message|>{{ c.function.arguments | tojson }}<|call|>{% else %}<|start|>"
        "{{ 'functions.' ~ m.name if m.role == 'tool' else m.role }}"
        "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "inline": _rebuilt(_each("<tool_call>" + _OBJECT + "</tool_call>")),
}


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, source, {"bos_token": "<bos>", "eos_token": "<eos>"}, 1 << 20)


@cache
def probes_of(source: str) -> Sequence[str]:
    """What `find_dialect` takes."""
    return [rendered(source, probe, PROBE_TOOL) for probe in PROBES]


def rendered(source: str, messages: Sequence[Mapping[str, Any]], *tools: Mapping[str, Any], begins: bool = True) -> str:
    """Empty if the template refuses them. `begins`: an answer."""
    try:
        return template_of(source).render(Conversation(messages, tools, add_generation_prompt=begins))
    except TemplateRefusalError:
        return ""
