// The npm packages ai and @ai-sdk/openai-compatible: text whole and streamed, objects of a schema, completions.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, streamText } from "ai";
import { z } from "zod";
import { API_KEY, BASE_URL, check, MODEL, PROMPT, refusal, run } from "./steps.mjs";

const tandem = createOpenAICompatible({
  name: "tandem",
  baseURL: BASE_URL,
  apiKey: API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const GREEDY = { model: tandem(MODEL), prompt: "What is a cache?", maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
const schema = z.object({ size: z.enum(["small", "large"]), is_fast: z.boolean() });

await run({
  "a text": async () => {
    const { text, usage, finishReason } = await generateText(GREEDY);
    check(text && usage.outputTokens > 0, "a text with usage", text, usage);
    check(["stop", "length"].includes(finishReason), "a finish reason", finishReason);
  },
  "a stream": async () => {
    const { text } = await generateText(GREEDY);
    const stream = streamText(GREEDY);
    let streamed = "";
    for await (const delta of stream.textStream) streamed += delta;
    check(streamed === text, "a stream says the same", streamed, text);
    check((await stream.usage).outputTokens > 0, "usage in the stream", await stream.usage);
  },
  "an object": async () => {
    const asked = { ...GREEDY, maxOutputTokens: 600, output: Output.object({ schema }) };
    const { output } = await generateText(asked);
    check(schema.safeParse(output).success, "an object of the schema", output);
    const stream = streamText(asked);
    let last = null;
    for await (const part of stream.partialOutputStream) last = part;
    check(schema.safeParse(last).success, "the last part is whole", last);
  },
  "a completion": async () => {
    const asked = { ...GREEDY, model: tandem.completionModel(MODEL), prompt: PROMPT };
    check((await generateText(asked)).text, "a text");
  },
  "errors by type": async () => {
    const error = await refusal(generateText({ ...GREEDY, temperature: -1 }));
    check(APICallError.isInstance(error) && error.statusCode === 400, "APICallError with its status", String(error));
    check(error.message.includes("temperature"), "the server's words", error.message);
  },
});
