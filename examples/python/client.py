"""Asks Baton over gRPC: the models, a text to continue, a conversation, and one that calls a tool or sees an image.

Usage: python client.py [HOST:PORT [IMAGE]]. README.md has the command that generates the code it imports.
"""

import json
import os
import sys
from pathlib import Path

import grpc

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub

WEATHER = pb.Tool(
    name="get_weather",
    description="Get the current weather in a given location",
    parameters=json.dumps({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
)


def get_weather(city: str) -> str:
    """Stands for a lookup of the weather."""
    return json.dumps({"city": city, "temperature": 21, "condition": "sunny"})


def metadata() -> list[tuple[str, str]]:
    """The API key of BATON_API_KEY, where there is one."""
    key = os.environ.get("BATON_API_KEY")
    return [("authorization", f"Bearer {key}")] if key else []


def list_models(stub: InferenceStub) -> None:
    for model in stub.ListModels(pb.ListModelsRequest(), timeout=30, metadata=metadata()).models:
        print(f"model: {model.id}, {model.context_tokens} tokens")


def generate(stub: InferenceStub, text: str) -> None:
    request = pb.GenerateRequest(text=text, max_tokens=20, temperature=0)
    print("generate: ", end="")
    for response in stub.Generate(request, timeout=60, metadata=metadata()):
        print(response.text, end="", flush=True)
    print()


def chat(stub: InferenceStub, messages: list[pb.ChatMessage], tools: list[pb.Tool]) -> pb.ChatMessage:
    """The assistant's answer, printed as it comes."""
    request = pb.ChatRequest(messages=messages, tools=tools, max_tokens=200, temperature=0)
    answer = pb.ChatMessage(role="assistant")
    print("chat: ", end="")
    for response in stub.Chat(request, timeout=60, metadata=metadata()):
        print(response.text, end="", flush=True)
        answer.content += response.text
        answer.tool_calls.extend(response.tool_calls)
    print()
    return answer


def chat_with_tool(stub: InferenceStub, question: str) -> None:
    messages = [pb.ChatMessage(role="user", content=question)]
    answer = chat(stub, messages, [WEATHER])
    while answer.tool_calls:
        messages.append(answer)
        for call in answer.tool_calls:
            print(f"call: {call.name}({call.arguments})")
            result = get_weather(**json.loads(call.arguments))
            messages.append(pb.ChatMessage(role="tool", tool_call_id=call.id, content=result))
        answer = chat(stub, messages, [WEATHER])


def main() -> int:
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
    with grpc.insecure_channel(address) as channel:
        stub = InferenceStub(channel)
        try:
            list_models(stub)
            generate(stub, "Once upon a time")
            chat(stub, [pb.ChatMessage(role="user", content="What is 12 plus 30?")], [])
            if len(sys.argv) > 2:  # instead of the tool: many models that take images know none
                image = Path(sys.argv[2]).read_bytes()
                chat(stub, [pb.ChatMessage(role="user", content="What is this?", images=[image])], [])
            else:
                chat_with_tool(stub, "What is the weather in Paris?")
        except grpc.RpcError as error:
            print(f"\n{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
