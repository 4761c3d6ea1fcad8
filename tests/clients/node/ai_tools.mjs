// The npm packages ai and @ai-sdk/openai-compatible: a tool that the model has to call, whole and streamed.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool } from "ai";
import { z } from "zod";
import { API_KEY, BASE_URL, check, MODEL, run } from "./steps.mjs";

const tandem = createOpenAICompatible({ name: "tandem", baseURL: BASE_URL, apiKey: API_KEY });
const degrees = tool({
  description: "The temperature of a city.",
  inputSchema: z.object({ city: z.enum(["Berlin", "Paris"]) }),
  execute: async ({ city }) => `${city}: 21`,
});
const ASKED = {
  model: tandem(MODEL),
  prompt: "How warm is it?",
  maxOutputTokens: 600,
  temperature: 0,
  maxRetries: 0,
  tools: { degrees },
  providerOptions: { tandem: { parallel_tool_calls: false } }, // a small model calls until max_tokens
};

await run({
  "a required call": async () => {
    for (const toolChoice of ["required", { type: "tool", toolName: "degrees" }]) {
      const { toolCalls, toolResults } = await generateText({ ...ASKED, toolChoice });
      check(toolCalls[0]?.toolName === "degrees" && !toolCalls[0].invalid, "a call", toolCalls);
      check(toolResults[0]?.output.endsWith(": 21"), "the tool runs", toolResults);
    }
  },
  "a streamed call": async () => {
    const stream = streamText({ ...ASKED, toolChoice: "required" });
    const kinds = new Set();
    for await (const part of stream.fullStream) kinds.add(part.type);
    check(kinds.has("tool-call") && kinds.has("tool-result"), "the parts of a call", [...kinds]);
  },
});
