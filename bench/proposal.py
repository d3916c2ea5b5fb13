"""A proposal in words: assumptions, the reason for each number, and how to start it. Pure."""

from bench.capacity import Proposal, Role
from bench.roofline import STEP_S
from runtime.config_parts import GPU_SHARE
from runtime.gpus import Card
from worker.startup.limits import BANDWIDTH_SHARE, FLOPS_SHARE, ModelShape

PAGE_TOKENS = 16


def describe_assumptions(model: ModelShape, name: str, gpu: Card) -> list[str]:
    peaks = f"{gpu.memory_bytes / 1e9:g} GB, {gpu.bytes_per_s / 1e12:g} TB/s, {gpu.flops / 1e12:g} TFLOP/s bfloat16"
    weights_gb = model.num_weights * model.weight_bytes / 1e9
    sizes = f"{model.num_weights / 1e9:.4g} G weights in {weights_gb:.4g} GB, {model.describe_kv()}"
    if model.slot_bytes:
        sizes += f", {model.slot_bytes / 1e6:.3g} MB of recurrent state a sequence"
    shares = f"{BANDWIDTH_SHARE:.0%} of the bandwidth and {FLOPS_SHARE:.0%} of the FLOP/s are reached"
    return [
        f"model     {sizes}",
        f"{name:9} {peaks}, hand-off {gpu.handoff_bytes_per_s / 1e9:g} GB/s",
        f"assumed   {shares}, {STEP_S * 1e3:g} ms come on top of each step; no GPU has been measured",
        f"          a worker takes {GPU_SHARE:.0%} of a GPU",
    ]


def describe(proposal: Proposal) -> list[str]:
    lines = []
    for name, goal, role in list_roles(proposal):
        expected = f"nine tenths have a {goal} of {role.expected_s * 1e3:.4g} ms or less"
        lines.append(f"{name:9} {role.count} workers of {role.tp} GPUs: {expected}; a worker's limit is {role.limit}")
        lines.append(f"          KV of {role.kv_tokens} tokens fits, {role.max_running} run at once")
        lines += [f"          {reason}" for reason in role.reasons]
    return lines


def list_roles(proposal: Proposal) -> list[tuple[str, str, Role]]:
    """(name, what it expects, workers)"""
    if proposal.prefill is None:
        return [("both", "TPOT", proposal.decode)]
    return [("prefill", "TTFT", proposal.prefill), ("decode", "TPOT", proposal.decode)]


def describe_start(model: str, shape: ModelShape, proposal: Proposal) -> list[str]:
    """The start command, and variables for the compose file, which has one worker per role."""
    prefill, decode = proposal.prefill, proposal.decode
    flags = f"--decode-workers {decode.count} --decode-tp {decode.tp} --decode-max-running {decode.max_running}"
    if prefill is None:
        flags += f" --prefill-workers 0 --local-prefill-chunk-tokens {decode.chunk_tokens}"
    else:
        limits = f"--chunk-tokens {prefill.chunk_tokens} --prefill-max-running {prefill.max_running}"
        flags = f"--prefill-workers {prefill.count} --prefill-tp {prefill.tp} {limits} {flags}"
    least_tokens = min(role.kv_tokens for _name, _goal, role in list_roles(proposal))
    if least_tokens < shape.context_tokens:
        flags += f" --max-context-tokens {least_tokens // PAGE_TOKENS * PAGE_TOKENS}"
    lines = [f"start     baton serve --model {model} {flags}"]
    if prefill is None or (prefill.count, decode.count) != (1, 1):
        return [*lines, "compose   has one worker of each role: start others by `baton prefill` and `baton decode`"]
    own, others = list(range(prefill.tp)), list(range(prefill.tp, prefill.tp + decode.tp))
    first, second = (",".join(map(str, order)) for order in (own + others, others + own))
    variables = f"PREFILL_TP={prefill.tp} DECODE_TP={decode.tp} PREFILL_GPUS={first} DECODE_GPUS={second}"
    return [*lines, f"compose   MODEL={model} {variables}; the limits are flags of its workers"]
