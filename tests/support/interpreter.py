"""Makes Triton's interpreter on the CPU a third to a half faster where kernels call functions; results stay the same.

A launch puts the interpreter's operations into triton.language. Without this, each function call within a kernel
searches the whole language to do so again.
"""

import os
from typing import Any

import torch
from torch import Tensor


def interpret_kernels() -> None:
    """Call before anything imports triton, which reads the variable when it defines its own functions."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction

    slowly = InterpretedFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if any(language.core.is_builtin(module.load) for module in (language, language.core)):
            return slowly(function, *args, **kwargs)  # the interpreter's operations are not installed
        return function.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call


def check_alone(alone: Tensor, together: Tensor) -> None:
    """Rows of a product do not depend on the other rows. The interpreter's float32 sums have the order of its BLAS."""
    slack = 4 * torch.finfo(torch.float32).eps if alone.dtype is torch.float32 else 0.0
    torch.testing.assert_close(alone, together, rtol=slack, atol=slack)
