"""`baton launch`: starts a coding agent that asks a running service, with no change to the agent's own settings.

The agent replaces this process: the terminal and all signals are its own, and nothing is left behind.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Annotated, Literal, NamedTuple

from cyclopts import Parameter

from cli.service import URL, ApiKey, CommandError, Service, Url

AgentName = Literal["claude", "codex", "opencode"]
NO_KEY = "none"  # agents want one, services without keys ignore it
OUTPUT_TOKENS = 8192  # most of an answer that opencode keeps free in the context


class Target(NamedTuple):
    """The service and the model that an agent is to ask."""

    url: str  # of the service, without /v1
    model: str
    api_key: str
    context_tokens: int


Start = tuple[list[str], dict[str, str]]  # words before the user's own, and variables


def start_claude(target: Target) -> Start:
    """Claude Code asks for models of several sizes: all are the one that is served."""
    names = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    sizes = tuple(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU"))
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.api_key or NO_KEY,
        **dict.fromkeys((*names, *sizes), target.model),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context_tokens),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return [], variables


def start_codex(target: Target) -> Start:
    """Codex takes any setting of its config.toml as an option, TOML values of which JSON's texts are a part."""
    provider = {"name": "Baton", "base_url": f"{target.url}/v1", "wire_api": "responses", "env_key": "BATON_API_KEY"}
    settings = {
        "model": target.model,
        "model_provider": "baton",
        "model_context_window": target.context_tokens,
        "model_auto_compact_token_limit": target.context_tokens * 3 // 4,  # it gives up where a request is refused
        **{f"model_providers.baton.{name}": value for name, value in provider.items()},
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return words, {"BATON_API_KEY": target.api_key or NO_KEY}


def start_opencode(target: Target) -> Start:
    """opencode reads settings from a variable, besides those of its files."""
    limits = {"context": target.context_tokens, "output": min(OUTPUT_TOKENS, target.context_tokens // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Baton",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.api_key or NO_KEY},
        "models": {target.model: {"name": target.model, "limit": limits, "tool_call": True}},
    }
    model = f"baton/{target.model}"
    settings = {"model": model, "small_model": model, "provider": {"baton": provider}}
    return [], {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}


class Agent(NamedTuple):
    """A program that `baton launch` can start."""

    package: str  # of npm
    least_context_tokens: int  # its first prompt, an answer and some results of tools
    build: Callable[[Target], Start]
    removed: tuple[str, ...] = ()  # the user's variables that would lead it elsewhere


AGENTS: Mapping[AgentName, Agent] = {
    "claude": Agent("@anthropic-ai/claude-code", 40_000, start_claude, ("ANTHROPIC_API_KEY",)),
    "codex": Agent("@openai/codex", 24_000, start_codex),
    "opencode": Agent("opencode-ai", 24_000, start_opencode),
}


def launch(
    agent: AgentName,
    /,
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
    url: Url = URL,
    model: str = "",
    api_key: ApiKey = "",
) -> int:
    """Start a coding agent on a running service.

    Args:
        agent: claude (Claude Code), codex or opencode; it must be installed.
        words: Its own command line; its options after --.
        model: Name of the model; empty asks the service.
    """
    package, least_tokens, build, removed = AGENTS[agent]
    program = shutil.which(agent)
    if program is None:
        raise CommandError(f"{agent} is not on the PATH: install it by npm install -g {package}")
    with closing(Service(url, api_key)) as service:
        target = find_target(service, model, api_key)
    if target.context_tokens < least_tokens:
        raise CommandError(
            f"{agent} needs a context of {least_tokens} tokens or more, for its own instructions and some work; "
            f"{target.model} is served with {target.context_tokens}: serve a model that has more, or raise "
            "--max-context-tokens of baton serve (docs/AGENTS.md)"
        )
    before, variables = build(target)
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    os.execve(program, [program, *before, *words], inherited | variables)


def find_target(service: Service, model: str, api_key: str) -> Target:
    """The model to use, as the service describes it. CommandError if it has none of this name."""
    listed = service.read_json("/v1/models")
    try:
        contexts = {str(one["id"]): int(one["max_model_len"]) for one in listed["data"]}
    except (LookupError, TypeError, ValueError) as error:
        raise CommandError(f"{service.url}/v1/models lists no models of Baton: set --url to a Baton service") from error
    name = model or next(iter(contexts))
    if name not in contexts:
        raise CommandError(f"{service.url} serves {', '.join(contexts)}, not {name}: set --model to one of these")
    return Target(service.url, name, api_key, contexts[name])
