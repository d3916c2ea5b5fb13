// openai-node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { ASKED, baseUrl, dataUri, image, lightCall, mood, piecesOf, refused, run } from "../checks.mjs";

const client = new OpenAI({ baseURL: baseUrl, apiKey: "none", maxRetries: 0 });

const user = (name) => ({ role: "user", content: ASKED[name].question });
const tool = (name) => {
  const { name: called, description, parameters } = ASKED[name];
  return { type: "function", function: { name: called, description, parameters } };
};
const form = (name) => ({ type: "json_schema", json_schema: { name, schema: ASKED[name].schema, strict: true } });
const ask = (fields) =>
  client.chat.completions.create({ model: ASKED.model, temperature: 0, max_tokens: 200, ...fields });

async function inForm(name) {
  const answer = await ask({ messages: [user(name)], response_format: form(name) });
  return JSON.parse(answer.choices[0].message.content);
}

async function countByChat(files) {
  const parts = files.map((file) => ({ type: "image_url", image_url: { url: dataUri(file) } }));
  const content = [...parts, { type: "text", text: ASKED.image.question }];
  const { usage } = await ask({ model: ASKED.image.model, max_tokens: 4, messages: [{ role: "user", content }] });
  return [usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens];
}

async function countByResponses(files) {
  const parts = files.map((file) => ({ type: "input_image", detail: "auto", image_url: dataUri(file) }));
  const input = [{ role: "user", content: [...parts, { type: "input_text", text: ASKED.image.question }] }];
  const { usage } = await client.responses.create({ model: ASKED.image.model, max_output_tokens: 4, input });
  return [usage.input_tokens, usage.input_tokens_details.cached_tokens];
}

await run({
  chat: async () => {
    const answer = await ask({ messages: [user("sum")] });
    assert.equal(answer.choices[0].message.content, ASKED.sum.answer);
    assert.ok(answer.usage.completion_tokens > 3);
  },
  stream: async () => {
    const pieces = [];
    for await (const chunk of await ask({ messages: [user("poem")], stream: true })) {
      pieces.push(chunk.choices[0].delta.content ?? "");
    }
    piecesOf(pieces);
  },
  tool: async () => {
    const seen = [];
    const runner = client.chat.completions.runTools({
      model: ASKED.model,
      temperature: 0,
      max_tokens: 200,
      stream: true,
      messages: [user("weather")],
      tools: [
        {
          type: "function",
          function: {
            ...tool("weather").function,
            parse: JSON.parse,
            function: (args) => {
              seen.push(args);
              return ASKED.weather.result;
            },
          },
        },
      ],
    });
    assert.equal(await runner.finalContent(), ASKED.weather.answer);
    assert.deepEqual(seen, [ASKED.weather.arguments]);
  },
  required: async () => {
    for (const choice of ["required", { type: "function", function: { name: ASKED.light.name } }]) {
      const answer = await ask({ messages: [user("light")], tools: [tool("light")], tool_choice: choice });
      const { message } = answer.choices[0];
      assert.ok(message.tool_calls, `no call but ${message.content}`);
      const called = message.tool_calls[0].function;
      lightCall(called.name, JSON.parse(called.arguments));
    }
  },
  schema: async () => assert.deepEqual(await inForm("person"), ASKED.person.answer),
  enforced: async () => mood(await inForm("mood")),
  image: async () => {
    await image(countByChat, OpenAI.BadRequestError, "messages[0].content[0].image_url.url");
    await image(countByResponses, OpenAI.BadRequestError, "input[0].content[0].image_url");
  },
  error: () =>
    refused(() => ask({ messages: [user("sum")], max_tokens: ASKED.refusal.max_tokens }), OpenAI.BadRequestError),
});
