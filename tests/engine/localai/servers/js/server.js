// grpc-js with the behaviours that the tests of the gRPC client ask for; see real_servers.py.
"use strict";
const grpc = require("@grpc/grpc-js");

const raw = (message) => message;
const method = (name, streams) => ({
  path: `/backend.Backend/${name}`,
  requestStream: streams,
  responseStream: streams,
  requestSerialize: raw,
  requestDeserialize: raw,
  responseSerialize: raw,
  responseDeserialize: raw,
});

let cancelled = 0;

async function send(call, message) {
  if (!call.write(message)) {
    await new Promise((resolve) => {
      call.once("drain", resolve);
      call.once("close", resolve);
      call.once("cancelled", resolve);
    });
  }
}

const filling = (size) => {
  const metadata = new grpc.Metadata();
  metadata.set("x-filling", "f".repeat(size));
  return metadata;
};

async function obey(call, order) {
  switch (order.do) {
    case "stream":
    case "fail": {
      const message = order.do === "stream" && order.text ? Buffer.from(order.text) : Buffer.alloc(order.size || 0);
      for (let number = 0; number < (order.count || 0) && !call.cancelled; number++) await send(call, message);
      if (order.do === "fail") call.emit("error", { code: order.status, details: order.text });
      else call.end();
      return;
    }
    case "wait":
      call.on("cancelled", () => { cancelled++; });
      await send(call, Buffer.from("begun"));
      return;
    case "cancelled":
      await send(call, Buffer.from(String(cancelled)));
      return call.end();
    case "deadline": {
      const end = call.getDeadline();
      await send(call, Buffer.from(end === Infinity ? "none" : String(Number(end) - Date.now())));
      return call.end();
    }
    case "metadata":
      await send(call, Buffer.from(call.metadata.get(order.name).join(",")));
      return call.end();
    case "headers":
      call.sendMetadata(filling(order.size));
      await send(call, Buffer.from("filled"));
      return call.end(filling(order.size));
    default:
      call.emit("error", { code: grpc.status.INVALID_ARGUMENT, details: "unknown order" });
  }
}

function behave(call) {
  let order = null;
  let count = 0;
  let size = 0;
  call.on("error", () => {});
  call.on("data", async (message) => {
    if (order === null) {
      order = JSON.parse(message.toString());
      if (order.do !== "collect" && order.do !== "echo") await obey(call, order);
      return;
    }
    count++;
    size += message.length;
    if (order.do === "echo") call.write(message);
    if (order.pause_ms) {
      call.pause();
      setTimeout(() => call.resume(), order.pause_ms);
    }
  });
  call.on("end", () => {
    if (order.do === "echo") call.end();
    if (order.do === "collect") {
      call.write(Buffer.from(`${count} messages of ${size} bytes`));
      call.end();
    }
  });
}

function option(name) {
  const place = process.argv.indexOf(name);
  return place < 0 ? 0 : Number(process.argv[place + 1]);
}

const options = { "grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1 };
if (option("--max-age-ms")) {
  options["grpc.max_connection_age_ms"] = option("--max-age-ms");
  options["grpc.max_connection_age_grace_ms"] = 30000;
}
if (option("--max-streams")) options["grpc.max_concurrent_streams"] = option("--max-streams");
const server = new grpc.Server(options);
server.addService(
  { Predict: method("Predict", false), PredictStream: method("PredictStream", true) },
  { Predict: (call, reply) => reply(null, call.request), PredictStream: behave },
);
server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(port);
});
process.stdin.once("data", () => server.tryShutdown(() => process.exit(0)));
process.stdin.once("end", () => process.exit(0)); // whoever started it is gone
process.stdin.resume();
