// The npm package @grpc/grpc-js with proto/inference.proto: streams, model info, errors by their codes, cancellation.

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { API_KEY, check, GRPC, MODEL, PROMPT, run } from "./steps.mjs";

const options = { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true };
const { tandem } = grpc.loadPackageDefinition(loader.loadSync(process.env.TANDEM_PROTO, options));
const client = new tandem.v1.Inference(GRPC, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${API_KEY}`);
const sampling = { max_tokens: 12, temperature: 0 };
const deadline = () => ({ deadline: Date.now() + 60_000 });

/** The messages of one request. Rejects with the call's error. */
function generate(request, given = metadata) {
  return new Promise((resolve, reject) => {
    const messages = [];
    const call = client.Generate(request, given, deadline());
    call.on("data", (message) => messages.push(message));
    call.on("end", () => resolve(messages));
    call.on("error", reject);
  });
}

async function code(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  throw new Error("an error was to be raised, and none was");
}

await run({
  "a stream": async () => {
    const messages = await generate({ text: PROMPT, sampling });
    const last = messages[messages.length - 1];
    check(["FINISH_REASON_LENGTH", "FINISH_REASON_STOP"].includes(last.finish_reason), "a finish reason", last);
    const tokens = messages.reduce((sum, message) => sum + message.token_ids.length, 0);
    check(last.usage.output_tokens === tokens && tokens > 0, "usage counts the tokens", last.usage, tokens);
    check(messages.map((message) => message.text).join(""), "a text");
  },
  "a chat": async () => {
    const chat = { messages: [{ role: "user", content: "What is a cache?" }] };
    check((await generate({ chat, sampling })).length > 0, "messages");
  },
  "model info": async () => {
    const info = await new Promise((resolve, reject) =>
      client.GetModelInfo({}, metadata, deadline(), (error, value) => (error ? reject(error) : resolve(value))),
    );
    check(info.max_model_len > 0 && info.name === MODEL, "the model", info);
  },
  "errors by code": async () => {
    const wrong = await code(generate({ text: PROMPT, sampling: { temperature: -1 } }));
    check(wrong.code === grpc.status.INVALID_ARGUMENT, "INVALID_ARGUMENT", wrong.message);
    check(wrong.details.includes("temperature"), "the field's name", wrong.details);
    const stranger = await code(generate({ text: PROMPT, sampling }, new grpc.Metadata()));
    check(stranger.code === grpc.status.UNAUTHENTICATED, "UNAUTHENTICATED", stranger.message);
  },
  "a cancelled stream": async () => {
    const call = client.Generate({ text: PROMPT, sampling: { max_tokens: 1000, ignore_eos: true } }, metadata, deadline());
    const error = await new Promise((resolve) => {
      call.on("data", () => call.cancel());
      call.on("error", resolve);
    });
    check(error.code === grpc.status.CANCELLED, "CANCELLED", error.message);
    check((await generate({ text: PROMPT, sampling })).length > 0, "the server goes on");
  },
});
