"""All public APIs by name, behind one vocabulary; see words.py."""

from tests.support.grpc_adapters import Chat, Generate
from tests.support.rest_adapters import ChatCompletions, Completions, Messages, Responses
from tests.support.words import Api

APIS: dict[str, Api] = {
    "chat": ChatCompletions("chat"),
    "completions": Completions("completions"),
    "responses": Responses("responses"),
    "messages": Messages("messages"),
    "Generate": Generate("Generate"),
    "Chat": Chat("Chat"),
}
