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

const respond = (question, fields) =>
  client.responses.create({ model: ASKED.model, temperature: 0, max_output_tokens: 200, input: question, ...fields });

async function polled(id) {
  for (const until = Date.now() + 60_000; Date.now() < until; ) {
    const answer = await client.responses.retrieve(id);
    if (!["queued", "in_progress"].includes(answer.status)) return answer;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  throw new Error("not over within 60 s");
}

/** What a stream has, at most `number`; then it is left. */
async function taken(stream, number = Infinity) {
  const all = [];
  for await (const one of stream) if (all.push(one) >= number) break;
  return all;
}

async function storedResponses() {
  const { question } = ASKED.sum;
  const first = await respond(question);
  const second = await respond(question, { previous_response_id: first.id });
  const third = await respond(question, { previous_response_id: second.id });
  const counts = [first, second, third].map(({ usage }) => usage.input_tokens);
  assert.deepEqual(counts, [...new Set(counts)].sort((one, other) => one - other));
  assert.deepEqual((await client.responses.retrieve(third.id)).output, third.output);
  const begun = await respond(ASKED.poem.question, { background: true });
  assert.equal((await polled(begun.id)).output_text, ASKED.poem.answer);
  const unwanted = await respond(ASKED.poem.question, { background: true });
  assert.ok(["cancelled", "completed"].includes((await client.responses.cancel(unwanted.id)).status));
  const events = await taken(await respond(ASKED.poem.question, { stream: true }), 5);
  const { id } = events[0].response;
  const asked = { stream: true, starting_after: events.at(-1).sequence_number };
  events.push(...(await taken(await client.responses.retrieve(id, asked))));
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  assert.equal(events.at(-1).response.output[0].content[0].text, ASKED.poem.answer);
  await client.responses.delete(id);
  await assert.rejects(client.responses.retrieve(id), OpenAI.NotFoundError);
}

async function storedChats() {
  const { completions } = client.chat;
  const metadata = { mark: `${process.pid} ${Date.now()}` };
  const whole = await ask({ messages: [user("sum")], store: true, metadata });
  assert.deepEqual((await completions.retrieve(whole.id)).choices, whole.choices);
  const chunks = await taken(await ask({ messages: [user("poem")], store: true, stream: true }), 4);
  const [{ id }] = chunks;
  const query = { stream: true, starting_after: chunks.length };
  chunks.push(...(await taken(await client.get(`/chat/completions/${id}`, { query, stream: true }))));
  piecesOf(chunks.map((chunk) => chunk.choices[0].delta.content ?? ""));
  assert.equal((await completions.retrieve(id)).choices[0].message.content, ASKED.poem.answer);
  const listed = async () => (await taken(completions.list({ metadata, limit: 1 }))).map((one) => one.id).sort();
  assert.deepEqual(await listed(), [whole.id]);
  await completions.update(id, { metadata });
  assert.deepEqual(await listed(), [whole.id, id].sort());
  const messages = await taken(completions.messages.list(whole.id));
  assert.deepEqual(messages.map((message) => message.content), [ASKED.sum.question]);
  assert.ok((await completions.delete(whole.id)).deleted);
  await assert.rejects(completions.retrieve(whole.id), OpenAI.NotFoundError);
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
  stored: async () => {
    await storedResponses();
    await storedChats();
  },
  embed: async () => {
    const { data } = await client.embeddings.create({ model: ASKED.embed.model, input: ASKED.embed.texts });
    const [first, second, third] = data.map((one) => one.embedding);
    const distance = (one, other) => Math.max(...one.map((number, at) => Math.abs(number - other[at])));
    assert.ok(distance(first, second) < 1e-4 && distance(first, third) > 1e-2);
  },
  error: () =>
    refused(() => ask({ messages: [user("sum")], max_tokens: ASKED.refusal.max_tokens }), OpenAI.BadRequestError),
});
