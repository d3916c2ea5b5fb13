// What checks.py is for Python: what is asked of every client, and how a script reports it.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

export const baseUrl = process.argv[2];
export const ASKED = JSON.parse(readFileSync(process.argv[3], "utf8"));
const CHECKS = ["chat", "stream", "tool", "required", "schema", "enforced", "image", "stored", "embed", "error"];

/** Runs a client's checks, one line each, and ends the script: with 1 if any failed. A text: why there is none. */
export async function run(given) {
  const checks = { stored: "not in its API", embed: "not asked of it", ...given };
  let hasFailed = false;
  for (const name of CHECKS) {
    let outcome = "ok", reason = "";
    if (typeof checks[name] === "string") [outcome, reason] = ["skip", checks[name]];
    else try {
      await checks[name]();
    } catch (error) {
      console.error(error);
      outcome = "fail";
      reason = `${error.name}: ${error.message}`;
      hasFailed = true;
    }
    console.log(`CHECK ${name} ${outcome} ${reason.replaceAll("\n", " ").slice(0, 300)}`);
  }
  process.exit(hasFailed ? 1 : 0);
}

/** Fails unless a stream's pieces are the poem, and several. */
export function piecesOf(pieces) {
  assert.equal(pieces.join(""), ASKED.poem.answer);
  assert.ok(pieces.filter(Boolean).length > 1, `not streamed: ${pieces}`);
}

/** Fails unless this is a call as the check `required` wants it. */
export function lightCall(name, args) {
  assert.equal(name, ASKED.light.name);
  assert.ok(["on", "off"].includes(args.state), `arguments that do not fit: ${JSON.stringify(args)}`);
}

/** Fails unless this is an answer as the check `enforced` wants it. */
export function mood(answer) {
  assert.deepEqual(Object.keys(answer), ["mood"]);
  assert.ok(["happy", "sad"].includes(answer.mood), `an answer that does not fit: ${JSON.stringify(answer)}`);
}

/**
 * Fails unless images are taken as checks.py wants it. `count`: PNG files in base64, asked about before ASKED's
 * question |-> the request's tokens, and how many were cached; `part`: the field of the first one.
 */
export async function image(count, Kind, part) {
  const { file, tokens, damaged, message } = ASKED.image;
  const [text] = await count([]);
  const [first] = await count([file]);
  const [again, cached] = await count([file]);
  assert.deepEqual([first - text, again], [tokens, first]);
  assert.ok(cached > tokens, `${cached} of ${again} tokens are cached`);
  await refused(() => count([damaged]), Kind, `${part}: ${message}`);
}

export const dataUri = (file) => `data:image/png;base64,${file}`;

/** Fails unless `call` rejects with a `Kind` of error that carries the service's message and status. */
export async function refused(call, Kind, message = ASKED.refusal.message, status = 400) {
  await assert.rejects(call, (error) => {
    assert.ok(error instanceof Kind, `another error: ${error}`);
    assert.ok(error.message.includes(message), `the message is lost: ${error.message}`);
    assert.equal(error.status ?? error.statusCode, status);
    return true;
  });
}
