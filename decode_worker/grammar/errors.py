"""Why an answer cannot follow its grammar."""

from worker.sequences import AnswerFailedError


class GrammarMismatchError(AnswerFailedError):
    """The grammar does not allow the tokens, or is too slow, as on any worker. The message is for the client."""

    finish_reason = "grammar_error"


class GrammarFailedError(Exception):
    """This worker failed to follow an answer with its grammar; another may succeed."""
