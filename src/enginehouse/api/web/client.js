// Requests to the API. Every failure is a `Refusal` with the API's own sentence and code.

export class Refusal extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
    this.code = error.code || "";
    this.param = error.param || "";
    this.requestId = error.request_id || "";
    this.loading = error.loading;
  }
}

let onSignedOut = () => {};

/** Sets what happens when the server no longer accepts the session. */
export function whenSignedOut(call) {
  onSignedOut = call;
}

/** The answer of the server, unread. Raises `Refusal` unless its status is a success. */
export async function send(method, path, body, { headers = {}, signal } = {}) {
  let answer;
  const isJson = body !== undefined && typeof body !== "string" && !(body instanceof Blob);
  try {
    answer = await fetch(path, {
      method,
      signal,
      credentials: "same-origin",
      headers: isJson ? { "content-type": "application/json", ...headers } : headers,
      body: isJson ? JSON.stringify(body) : body,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, {
      message: "The server does not answer. Check that it runs and that this machine reaches it.",
      code: "unreachable",
    });
  }
  if (!answer.ok) {
    const refusal = new Refusal(answer.status, await explained(answer));
    if (answer.status === 401 && path !== "/api/session") onSignedOut();
    throw refusal;
  }
  return answer;
}

async function explained(answer) {
  try {
    const { error } = await answer.json();
    return typeof error === "object" && error ? error : {};
  } catch {
    return {};
  }
}

async function ask(method, path, body, options) {
  const answer = await send(method, path, body, options);
  if (answer.status === 204) return null;
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

export const get = (path, options) => ask("GET", path, undefined, options);
export const post = (path, body, options) => ask("POST", path, body ?? {}, options);
export const put = (path, body, options) => ask("PUT", path, body, options);
export const patch = (path, body, options) => ask("PATCH", path, body, options);
export const remove = (path, options) => ask("DELETE", path, undefined, options);

/** A name as one part of a path. Models may have slashes in theirs, which their routes take as they are. */
export const part = (name) => encodeURIComponent(name);
export const parts = (name) => name.split("/").map(encodeURIComponent).join("/");

/** The lines of a stream of server-sent events, as `{event, data, id}`; also `{event: ""}` for a sign of life. */
export async function* readEvents(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffered += value;
      const blocks = buffered.split(/\r?\n\r?\n/);
      buffered = blocks.pop();
      for (const block of blocks) yield parsed(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  const found = { event: "", data: "", id: "" };
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event: ")) found.event = line.slice(7);
    else if (line.startsWith("id: ")) found.id = line.slice(4);
    else if (line.startsWith("data: ")) found.data += line.slice(6);
    else if (line.startsWith("data:")) found.data += line.slice(5);
  }
  return found;
}
