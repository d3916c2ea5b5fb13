"""Why there is no grammar, or no answer that follows it."""

from worker.sequences import AnswerFailedError


class GrammarRefusedError(Exception):
    """The text cannot be compiled, or not within the limits. The message is for the client.

    `param`: the client's field at fault, if the text names it.
    """

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class GrammarBusyError(Exception):
    """Not now: others are compiled first, the compiler is starting, or the machine is busy. Try again."""


class GrammarBrokenError(Exception):
    """This worker cannot compile any grammar. The message is for its operator."""


class GrammarMismatchError(AnswerFailedError):
    """The grammar does not allow the tokens, or is too slow, as on any worker. The message is for the client."""

    finish_reason = "grammar_error"


class GrammarFailedError(Exception):
    """This worker failed to follow an answer with its grammar; another may succeed."""
