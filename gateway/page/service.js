// Calls the public REST API. Errors are in words for people.

import { at } from "./elements.js";

export function get(path) { return fetch(path, { headers: headers() }); }

export async function call(path, body, signal) {
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  let response;
  try { response = await fetch(path, { ...options, headers: headers(), signal }); }
  catch (error) { throw error.name === "AbortError" ? error : new Error("The service cannot be reached."); }
  if (response.ok) return response;
  if (response.status === 401) {
    at("settings").open = true;
    throw new Error("The service asks for an API key: enter one in the settings.");
  }
  const answer = await response.json().catch(() => null);
  throw new Error(answer?.error?.message ?? `The service answered ${response.status}.`);
}

function headers() {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// Server-sent events: yields each one's JSON; an error event is thrown.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
