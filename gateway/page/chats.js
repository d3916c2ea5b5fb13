// Conversations, kept in this browser until they are deleted: one entry of its storage each. Other tabs see them too.

const PREFIX = "chat:";
const TITLE = 80; // characters

// { id, title, changed }, the last one first. What is not ours or broken is left out.
export function listChats() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  return ids.map((id) => ({ id, ...read(id) })).filter(({ messages }) => messages).sort((a, b) => b.changed - a.changed);
}

export function loadChat(id) { return read(id).messages ?? []; }

// False: the browser keeps no more.
export function saveChat(id, messages) {
  const title = textOf(messages[0].content).slice(0, TITLE) || "Image";
  try { localStorage.setItem(PREFIX + id, JSON.stringify({ title, changed: Date.now(), messages })); return true; }
  catch { return false; }
}

export function deleteChat(id) { localStorage.removeItem(PREFIX + id); }

function read(id) {
  try {
    const found = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(found?.messages) ? found : {};
  } catch { return {}; }
}

export function textOf(content) { return typeof content === "string" ? content : content?.at(-1).text ?? ""; }
export function imagesOf(content) {
  return Array.isArray(content) ? content.slice(0, -1).map((part) => part.image_url.url) : [];
}
