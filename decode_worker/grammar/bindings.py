"""xgrammar's C++ classes, without the Python package around them, whose import takes torch and transformers along.

The only file that imports xgrammar. These classes are not its public interface, so pyproject.toml names one version.
"""

import json
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from decode_worker.grammar.plain import PlainSchema, ebnf_grammar, plain_tag, regex_grammar
from decode_worker.grammar.writings import JSON_SEPARATORS
from runtime.peer_input import MAX_JSON_WHITESPACE
from wire.dialects import Writing

_MAX_RECURSION = 1000  # of its parser, in rules
_ANY_OBJECT = '{"type": "object", "additionalProperties": true}'
_STRICT, _ANY_ORDER = True, False


def _load() -> tuple[Any, Any]:
    """Its classes and its settings. Importable as usual afterwards, as torch is."""
    spec = find_spec("xgrammar")
    if spec is None:
        raise ModuleNotFoundError("xgrammar is not installed", name="xgrammar")
    # An empty package in place of xgrammar's; tvm_ffi, below it, does without torch where it cannot be imported.
    stand_ins: dict[str, Any] = {"xgrammar": module_from_spec(spec)}
    if "torch" not in sys.modules:
        stand_ins["torch"] = None
    replaced: dict[str, ModuleType] = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        import_module("xgrammar.load_binding")
        classes = import_module("xgrammar.tvm_ffi_binding._ffi_api")
        return classes, import_module("xgrammar.tvm_ffi_binding.config._ffi_api")
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(replaced)


core, _settings = _load()  # the constructors; types of what they make:
if TYPE_CHECKING:
    from xgrammar.tvm_ffi_binding._ffi_api import CompiledGrammar as CompiledGrammar
    from xgrammar.tvm_ffi_binding._ffi_api import GrammarMatcher as GrammarMatcher
    from xgrammar.tvm_ffi_binding._ffi_api import TokenizerInfo as TokenizerInfo
else:
    CompiledGrammar, GrammarMatcher, TokenizerInfo = core.CompiledGrammar, core.GrammarMatcher, core.TokenizerInfo


def compile_text(kind: str, text: str, info: TokenizerInfo) -> CompiledGrammar:
    """`kind` is one of limits.KINDS. May take any time or crash: for the compiler's forks alone.

    Raises RuntimeError, ValueError, TypeError, RecursionError or MemoryError.
    """
    _settings.set_max_recursion_depth(_MAX_RECURSION)
    compiler = core.GrammarCompiler(info, 1, False, -1)  # threads, cache
    compiled: CompiledGrammar
    if kind == "structural_tag":
        compiled = compiler.compile_structural_tag(plain_tag(text, _schema_ebnf))
    else:
        read = {"regex": regex_grammar, "ebnf": ebnf_grammar, "json_schema": _schema_ebnf}
        ebnf = read[kind](text) if kind in read else _schema_ebnf(_ANY_OBJECT)
        compiled = compiler.compile_grammar_from_strings(ebnf, "root")
    return compiled


def _schema_ebnf(text: str, writing: Writing | None = None) -> str:
    """The grammar of a schema. `writing`: how its objects are written, if not as JSON."""
    schema = PlainSchema(json.loads(text), writing)
    layout = (True, None, None) if writing is None else (False, None, JSON_SEPARATORS)  # any whitespace, indent
    grammar = core.Grammar.from_json_schema(
        schema.text, *layout, _STRICT, MAX_JSON_WHITESPACE if writing is None else None, _ANY_ORDER, False
    )
    return schema.finished(str(grammar.to_string()))
