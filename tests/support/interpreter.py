"""Makes Triton's interpreter on the CPU take half as long, and its numbers right.

A launch puts the interpreter's operations into triton.language. Without this, each function call within a kernel
searches the whole language to do so again, and each sum of integers is also made in 64 bits, to be compared by an
assertion that is off. Its own rounding to e4m3 drops the carry of a mantissa: 125 becomes 64. Its
own products of tiles are numpy's, which on some CPUs adds the terms of a row in another order beside more rows.
"""

import os
from typing import Any

import numpy as np
import torch


def round_as_hardware(values: np.ndarray) -> np.ndarray:
    """float32 |-> the bits of e4m3: to the nearest, ties to even, and to 448 beyond it, like cvt.rn.satfinite."""
    return torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def interpret_kernels() -> None:
    """Call before anything imports triton, which reads the variable when it defines its own functions."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton import language
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    convert = interpreter._convert_float

    def convert_right(values: np.ndarray, given: Any, wanted: Any, mode: Any) -> Any:
        if given == language.float32 and wanted == language.float8e4nv:
            return round_as_hardware(values)
        return convert(values, given, wanted, mode)

    interpreter._convert_float = convert_right
    multiply = interpreter.InterpreterBuilder.create_dot

    def multiply_exactly(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if {a.data.dtype, b.data.dtype} - {np.dtype(np.float32), np.dtype(np.float16)}:
            return multiply(builder, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = multiply_exactly
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    numpy_type = interpreter._get_np_dtype  # makes a dictionary of all types each time
    numpy_types: dict[str, np.dtype] = {}

    def find_numpy_type(type: Any) -> np.dtype:
        scalar = type.scalar
        found = numpy_types.get(scalar.name)
        if found is None:
            found = numpy_types[scalar.name] = numpy_type(scalar)
        return found

    interpreter._get_np_dtype = find_numpy_type
    slowly = InterpretedFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if any(language.core.is_builtin(module.load) for module in (language, language.core)):
            return slowly(function, *args, **kwargs)  # the interpreter's operations are not installed
        return function.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call
