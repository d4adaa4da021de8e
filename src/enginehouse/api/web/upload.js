// Uploads a file in parts: resumed where it stopped, verified by its digest, never in memory as a whole.

import { Refusal, send } from "./client.js";
import { Sha256 } from "./sha256.js";

const PART_BYTES = 8 * 1024 * 1024;
const TRIES = 5;

/** Uploads `file` unless the server has it. `show(phase, done)` is told how far it is. Returns its digest. */
export async function upload(file, show, signal) {
  const digest = new Sha256();
  for (let at = 0; at < file.size; at += PART_BYTES) {
    digest.update(new Uint8Array(await file.slice(at, at + PART_BYTES).arrayBuffer()));
    show("reading", Math.min(file.size, at + PART_BYTES));
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
  }
  const sha256 = digest.hex();
  let { offset, isComplete } = await reached(sha256, signal);
  let tries = TRIES;
  while (!isComplete) {
    show("uploading", offset);
    const end = Math.min(file.size, offset + PART_BYTES);
    try {
      await send("PUT", `/api/uploads/${sha256}`, file.slice(offset, end), {
        signal,
        headers: {
          "content-type": "application/octet-stream",
          "content-range": `bytes ${offset}-${end - 1}/${file.size}`,
        },
      });
      offset = end;
      isComplete = end === file.size;
      tries = TRIES;
    } catch (error) {
      // The part may have arrived although its answer was lost.
      tries -= 1;
      if (
        !(error instanceof Refusal) ||
        tries <= 0 ||
        error.code === "disk_full" ||
        ![0, 409, 502, 503, 504].includes(error.status)
      )
        throw error;
      ({ offset, isComplete } = await reached(sha256, signal));
    }
  }
  show("uploading", file.size);
  return sha256;
}

async function reached(sha256, signal) {
  try {
    const answer = await send("HEAD", `/api/uploads/${sha256}`, undefined, { signal });
    return {
      offset: Number(answer.headers.get("upload-offset") || 0),
      isComplete: answer.headers.get("upload-complete") === "?1",
    };
  } catch (error) {
    if (error instanceof Refusal && error.status === 404) return { offset: 0, isComplete: false };
    throw error;
  }
}
