"""Compiles Triton kernels for an H100 or H200 (sm_90) where there is no GPU: shows that they compile, nothing more.

The compiler cannot run in a process whose kernels are interpreted: `compile_kernels` starts another.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

Signature = Mapping[str, Any]
"""Parameter |-> Triton's type ("*fp32", "i32"), or a NamedTuple that the module knows of such; without constexprs."""


class Kernel(NamedTuple):
    name: str  # in its module
    signature: Signature
    constexprs: Mapping[str, int]
    options: Mapping[str, Any] = {}  # num_warps, ...


def compile_kernels(module: str, kernels: Sequence[Kernel], timeout_s: float = 120) -> dict[str, str]:
    """Kernel |-> its PTX, of the last where a name comes twice. RuntimeError with the compiler's words if one fails.

    Each became a cubin too, so no function is left that the assembler does not know.
    """
    orders = [one._replace(signature={name: _pack(kind) for name, kind in one.signature.items()}) for one in kernels]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cross_compile", module], input=json.dumps(orders), capture_output=True,
        text=True, env=environment, timeout=timeout_s, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{module} does not compile: {done.stderr[-4000:]}")
    ptx: dict[str, str] = json.loads(done.stdout)
    return ptx


def _pack(kind: Any) -> Any:
    return {type(kind).__name__: kind._asdict()} if hasattr(kind, "_asdict") else kind


def _unpack(kind: Any, module: Any) -> Any:
    if isinstance(kind, str):
        return kind
    ((name, fields),) = kind.items()
    return getattr(module, name)(**fields)


def _compile(module: Any, kernel: Kernel) -> str:
    function = getattr(module, kernel.name)
    signature = {name: _unpack(kind, module) for name, kind in kernel.signature.items()}
    signature = {name: signature.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(function, signature, dict(kernel.constexprs))
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(kernel.options))
    assert compiled.asm["cubin"]
    ptx: str = compiled.asm["ptx"]
    return ptx


if __name__ == "__main__":
    loaded = importlib.import_module(sys.argv[1])
    kernels = [Kernel(*order) for order in json.loads(sys.stdin.read())]
    print(json.dumps({kernel.name: _compile(loaded, kernel) for kernel in kernels}))
