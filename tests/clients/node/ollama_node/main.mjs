// ollama-js.
import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { ASKED, baseUrl, mood, piecesOf, run } from "../checks.mjs";

const client = new Ollama({ host: baseUrl.replace(/\/v1$/, "") });

const user = (name) => ({ role: "user", content: ASKED[name].question });
const tool = (name) => {
  const { name: called, description, parameters } = ASKED[name];
  return { type: "function", function: { name: called, description, parameters } };
};
const options = { temperature: 0, num_predict: 200 };
const ask = (fields) => client.chat({ model: ASKED.model, options, ...fields });
const inForm = async (name) =>
  JSON.parse((await ask({ messages: [user(name)], format: ASKED[name].schema })).message.content);

async function count(files) {
  const message = { ...user("image"), images: files.map((file) => Buffer.from(file, "base64")) };
  const answer = await ask({ model: ASKED.image.model, messages: [message], options: { num_predict: 4 } });
  return answer.prompt_eval_count;
}

/** Fails unless `call` rejects with the client's error that carries this message and the status 400. */
const refused = (call, message) =>
  assert.rejects(call, (error) => {
    assert.equal(error.name, "ResponseError");
    assert.ok(error.error.includes(message), `the message is lost: ${error.error}`);
    assert.equal(error.status_code, 400);
    return true;
  });

await run({
  chat: async () => {
    const answer = await ask({ messages: [user("sum")] });
    assert.equal(answer.message.content, ASKED.sum.answer);
    assert.ok(answer.eval_count > 3 && answer.eval_duration < answer.total_duration);
    const plain = await client.generate({ model: ASKED.model, prompt: ASKED.sum.question, options });
    assert.equal(plain.response, ASKED.sum.answer);
    const { models } = await client.list();
    assert.ok(models.some(({ name }) => name === `${ASKED.model}:latest`));
  },
  stream: async () => {
    const pieces = [];
    let last;
    for await (last of await ask({ messages: [user("poem")], stream: true })) pieces.push(last.message.content);
    piecesOf(pieces);
    assert.equal(last.done_reason, "stop");
  },
  tool: async () => {
    const { message } = await ask({ messages: [user("weather")], tools: [tool("weather")] });
    const [{ function: called }] = message.tool_calls;
    assert.deepEqual([called.name, called.arguments], [ASKED.weather.name, ASKED.weather.arguments]);
    const result = { role: "tool", tool_name: called.name, content: ASKED.weather.result };
    const answer = await ask({ messages: [user("weather"), message, result], tools: [tool("weather")] });
    assert.equal(answer.message.content, ASKED.weather.answer);
  },
  required: "not in its API",
  schema: async () => assert.deepEqual(await inForm("person"), ASKED.person.answer),
  enforced: async () => mood(await inForm("mood")),
  image: async () => {
    const { file, tokens, damaged, message } = ASKED.image;
    assert.equal((await count([file])) - (await count([])), tokens);
    await refused(() => count([damaged]), `messages[0].images[0]: ${message}`);
  },
  error: async () => {
    const asked = { messages: [user("sum")], options: { num_predict: 0 } };
    await refused(() => ask(asked), "options.num_predict is 0; it must be at least 1");
    await refused(() => client.pull({ model: ASKED.model }), "/api/pull is not supported");
  },
});
