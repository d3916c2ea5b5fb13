"""Makes JSON text that arrives in pieces valid for strict parsers. Pure."""

import re

_TELLING = re.compile(r'\\(?:.|\Z)|["\x00-\x1f]', re.DOTALL)


class JsonText:
    """Escapes control characters in strings, as JSON requires: grammars of bounded strings allow them unescaped."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_escaping = False  # the last piece ended with a backslash

    def push(self, text: str) -> str:
        num_escaped = int(self._is_escaping and bool(text))
        self._is_escaping = self._is_escaping and not text
        return text[:num_escaped] + _TELLING.sub(self._written, text[num_escaped:])

    def _written(self, found: re.Match[str]) -> str:
        char = found[0]
        if char == '"':
            self._is_in_string = not self._is_in_string
        elif char[0] == "\\":
            self._is_escaping = len(char) == 1
        elif self._is_in_string:
            return f"\\u{ord(char):04x}"
        return char
