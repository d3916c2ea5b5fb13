// Vercel's `ai` with @ai-sdk/openai-compatible.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { ASKED, baseUrl, image, lightCall, mood, piecesOf, refused, run } from "../checks.mjs";

const provider = createOpenAICompatible({
  name: "baton",
  baseURL: baseUrl,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const common = { model: provider(ASKED.model), temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

const toolOf = (name, execute) =>
  tool({ description: ASKED[name].description, inputSchema: jsonSchema(ASKED[name].parameters), execute });

async function inForm(name) {
  const schema = jsonSchema(ASKED[name].schema);
  const { output } = await generateText({
    ...common,
    prompt: ASKED[name].question,
    output: Output.object({ schema }),
  });
  return output;
}

async function count(files) {
  const parts = files.map((file) => ({ type: "file", data: file, mediaType: "image/png" }));
  const content = [...parts, { type: "text", text: ASKED.image.question }];
  const model = provider(ASKED.image.model);
  const { usage } = await generateText({ ...common, model, maxOutputTokens: 4, messages: [{ role: "user", content }] });
  return [usage.inputTokens, usage.inputTokenDetails.cacheReadTokens];
}

await run({
  chat: async () => {
    const { text, usage } = await generateText({ ...common, prompt: ASKED.sum.question });
    assert.equal(text, ASKED.sum.answer);
    assert.ok(usage.outputTokens > 3);
  },
  stream: async () => {
    const { textStream, usage } = streamText({ ...common, prompt: ASKED.poem.question });
    const pieces = [];
    for await (const piece of textStream) pieces.push(piece);
    piecesOf(pieces);
    assert.ok((await usage).outputTokens > 3);
  },
  tool: async () => {
    for (const isStreamed of [false, true]) {
      const seen = [];
      const request = {
        ...common,
        prompt: ASKED.weather.question,
        stopWhen: stepCountIs(3),
        tools: {
          [ASKED.weather.name]: toolOf("weather", async (args) => {
            seen.push(args);
            return ASKED.weather.result;
          }),
        },
      };
      const answer = isStreamed ? streamText(request) : await generateText(request);
      assert.equal(await answer.text, ASKED.weather.answer);
      assert.deepEqual(seen, [ASKED.weather.arguments]);
    }
  },
  required: async () => {
    const { name, question } = ASKED.light;
    for (const toolChoice of ["required", { type: "tool", toolName: name }]) {
      const tools = { [name]: toolOf("light") };
      const { toolCalls, text } = await generateText({ ...common, prompt: question, tools, toolChoice });
      assert.ok(toolCalls.length, `no call but ${text}`);
      lightCall(toolCalls[0].toolName, toolCalls[0].input);
    }
  },
  schema: async () => assert.deepEqual(await inForm("person"), ASKED.person.answer),
  enforced: async () => mood(await inForm("mood")),
  image: () => image(count, APICallError, "messages[0].content[0].image_url.url"),
  // It checks numbers itself, so that only the model's name can be wrong.
  error: () =>
    refused(
      () => generateText({ ...common, model: provider("unknown"), prompt: ASKED.sum.question }),
      APICallError,
      "model 'unknown' is not served here",
      404,
    ),
});
