// One conversation with a model: what was said, the answer that is being streamed, and how fast it comes. No views.

import { readEvents, send } from "./client.js";
import { changed } from "./live.js";

const MEASURED_SECONDS = 0.2; // of tokens, until their rate is shown

/** `messages`: {role, content, files?, model?, reasoning?, node?, firstToken?, perSecond?, tokens?, ended?, error?} */
export const conversation = { messages: [], running: null, system: "" };

export function forget() {
  conversation.messages = [];
  changed(true);
}

export function stop() {
  if (conversation.running) conversation.running.stopping.abort();
}

/** What the next request sends. */
export function asked() {
  const { system, messages } = conversation;
  const said = messages.filter((one) => !one.error && (one.content || (one.files || []).length));
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...said.map((one) => ({ role: one.role, content: (one.files || []).length ? contentOf(one) : one.content })),
  ];
}

function contentOf(message) {
  const pieces = message.files.map((file) =>
    file.kind === "image"
      ? { type: "image_url", image_url: { url: file.url } }
      : { type: "input_audio", input_audio: { data: file.url.split(",")[1], format: file.name.split(".").pop() } },
  );
  return [{ type: "text", text: message.content }, ...pieces];
}

export async function ask(model, text, files) {
  conversation.messages.push({ role: "user", content: text, files });
  const body = { model, stream: true, stream_options: { include_usage: true }, messages: asked() };
  const answer = { role: "assistant", model, content: "", reasoning: "" };
  conversation.messages.push(answer);
  const running = { stopping: new AbortController(), began: performance.now(), answer };
  conversation.running = running;
  changed(true);
  try {
    await stream(body, running);
  } catch (error) {
    if (error.name === "AbortError") answer.ended = "stopped";
    else answer.error = error.message;
  } finally {
    conversation.running = null;
    changed(true);
  }
}

async function stream(body, { answer, began, stopping }) {
  const reply = await send("POST", "/v1/chat/completions", body, { signal: stopping.signal });
  answer.node = reply.headers.get("x-enginehouse-node") || "";
  let first = 0;
  let pieces = 0;
  for await (const event of readEvents(reply)) {
    if (!event.data || event.data === "[DONE]") continue;
    const data = JSON.parse(event.data);
    if (data.error) throw new Error(data.error.message || "The engine broke off its answer.");
    const delta = (data.choices && data.choices[0] && data.choices[0].delta) || {};
    const piece = delta.content || "";
    const thought = delta.reasoning_content || delta.reasoning || "";
    if (piece || thought) {
      if (!first) {
        first = performance.now();
        answer.firstToken = (first - began) / 1000;
      }
      pieces += 1;
      answer.content += piece;
      answer.reasoning += thought;
    }
    if (data.usage) answer.tokens = data.usage.completion_tokens;
    const seconds = (performance.now() - first) / 1000;
    // A short answer may arrive in one piece: then its speed is that of the network, and says nothing.
    if (pieces > 1 && seconds > MEASURED_SECONDS) answer.perSecond = (Math.max(answer.tokens || 0, pieces) - 1) / seconds;
    changed();
  }
  if (!first) answer.ended = "an empty answer";
}

/** The conversation so far as a request for other programs: without the last answer, and without what is in files. */
export function requestCode(model, draft, origin) {
  const said = asked().map((one) => ({ ...one, content: typeof one.content === "string" ? one.content : "…" }));
  while (said.length && said[said.length - 1].role === "assistant") said.pop();
  if (draft) said.push({ role: "user", content: draft });
  const messages = said.some((one) => one.role === "user")
    ? said
    : [...said, { role: "user", content: "What is the capital of France?" }];
  const body = JSON.stringify({ model, messages }, null, 2).replace(/'/g, "'\\''");
  const curl = [
    `curl -s ${origin}/v1/chat/completions \\`,
    '  -H "authorization: Bearer $ENGINEHOUSE_KEY" -H "content-type: application/json" \\',
    `  -d '${body}'`,
  ].join("\n");
  const python = [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key="…")  # enginehouse keys create`,
    "answer = client.chat.completions.create(",
    `    model=${JSON.stringify(model)},`,
    `    messages=${JSON.stringify(messages, null, 4).replace(/\n/g, "\n    ")},`,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
  return { curl, python };
}
