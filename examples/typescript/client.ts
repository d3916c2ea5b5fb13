// Asks Baton over gRPC: the models, a text to continue, a conversation, and one that calls a tool or sees an image.
// Usage: npm start -- [HOST:PORT [IMAGE]]. `npm run generate` makes the types that it imports.
import { credentials, loadPackageDefinition, Metadata, type ClientReadableStream, type ServiceError } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import type { ProtoGrpcType } from "./generated/inference.ts";
import type { ChatMessage } from "./generated/baton/v1/ChatMessage.ts";
import type { ChatResponse__Output } from "./generated/baton/v1/ChatResponse.ts";
import type { GenerateResponse__Output } from "./generated/baton/v1/GenerateResponse.ts";
import type { ListModelsResponse__Output } from "./generated/baton/v1/ListModelsResponse.ts";
import type { Tool } from "./generated/baton/v1/Tool.ts";
import type { ToolCall } from "./generated/baton/v1/ToolCall.ts";

const proto = fileURLToPath(new URL("../../../protos/inference.proto", import.meta.url)); // from build/
const definition = loadSync(proto, { keepCase: true, longs: String, defaults: true });
const { baton } = loadPackageDefinition(definition) as unknown as ProtoGrpcType;
const client = new baton.v1.Inference(process.argv[2] ?? "127.0.0.1:8001", credentials.createInsecure());

const metadata = new Metadata();
if (process.env.BATON_API_KEY) metadata.set("authorization", `Bearer ${process.env.BATON_API_KEY}`);

const inSeconds = (seconds: number) => ({ deadline: Date.now() + seconds * 1000 });

const WEATHER: Tool = {
  name: "get_weather",
  description: "Get the current weather in a given location",
  parameters: JSON.stringify({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
};

/** What a real tool would look up. */
function getWeather({ city }: { city: string }): string {
  return `{"city": ${JSON.stringify(city)}, "temperature": 21, "condition": "sunny"}`;
}

function listModels(): Promise<ListModelsResponse__Output> {
  return new Promise((resolve, reject) => {
    client.ListModels({}, metadata, inSeconds(30), (error, answer) =>
      answer ? resolve(answer) : reject(error ?? new Error("no answer")),
    );
  });
}

async function generate(text: string): Promise<void> {
  const call: ClientReadableStream<GenerateResponse__Output> = client.Generate(
    { text, max_tokens: 20, temperature: 0 },
    metadata,
    inSeconds(60),
  );
  process.stdout.write("generate: ");
  for await (const response of call as AsyncIterable<GenerateResponse__Output>) process.stdout.write(response.text);
  process.stdout.write("\n");
}

/** The assistant's answer, printed as it comes. */
async function chat(messages: ChatMessage[], tools: Tool[]): Promise<ChatMessage & { tool_calls: ToolCall[] }> {
  const call = client.Chat({ messages, tools, max_tokens: 200, temperature: 0 }, metadata, inSeconds(60));
  const answer = { role: "assistant", content: "", tool_calls: [] as ToolCall[] };
  process.stdout.write("chat: ");
  for await (const response of call as AsyncIterable<ChatResponse__Output>) {
    process.stdout.write(response.text);
    answer.content += response.text;
    answer.tool_calls.push(...response.tool_calls);
  }
  process.stdout.write("\n");
  return answer;
}

async function chatWithTool(question: string): Promise<void> {
  const messages: ChatMessage[] = [{ role: "user", content: question }];
  let answer = await chat(messages, [WEATHER]);
  while (answer.tool_calls.length) {
    messages.push(answer);
    for (const call of answer.tool_calls) {
      console.log(`call: ${call.name}(${call.arguments})`);
      const content = getWeather(JSON.parse(call.arguments ?? "{}"));
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
    answer = await chat(messages, [WEATHER]);
  }
}

try {
  for (const model of (await listModels()).models) console.log(`model: ${model.id}, ${model.context_tokens} tokens`);
  await generate("Once upon a time");
  await chat([{ role: "user", content: "What is 12 plus 30?" }], []);
  const path = process.argv[3]; // of an image, instead of the tool: many models that take images know none
  if (path) await chat([{ role: "user", content: "What is this?", images: [readFileSync(path)] }], []);
  else await chatWithTool("What is the weather in Paris?");
} catch (error) {
  console.error(`\n${(error as ServiceError).message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
