// The npm package openai: a tool call that the model has to make, streamed, and run by its helper.

import OpenAI from "openai";
import { API_KEY, BASE_URL, CHAT, check, MODEL, run } from "./steps.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0 });
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Berlin", "Paris"] } },
  required: ["city"],
  additionalProperties: false,
};
const TOOL = { type: "function", function: { name: "degrees", description: "The temperature.", parameters } };
const NAMED = { type: "function", function: { name: "degrees" } };
const ASKED = { model: MODEL, messages: CHAT, max_tokens: 600, temperature: 0, tools: [TOOL] };

await run({
  "a required call": async () => {
    for (const tool_choice of ["required", NAMED]) {
      const asked = { ...ASKED, tool_choice, parallel_tool_calls: false };
      const message = (await client.chat.completions.create(asked)).choices[0].message;
      const call = message.tool_calls[0];
      check(call.function.name === "degrees", "the function", call);
      check(["Berlin", "Paris"].includes(JSON.parse(call.function.arguments).city), "arguments of the schema", call);
      let streamed = "";
      for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
        streamed += chunk.choices[0]?.delta?.tool_calls?.[0]?.function?.arguments ?? "";
      }
      check(streamed === call.function.arguments, "a stream says the same", streamed, call);
      const messages = [...CHAT, message, { role: "tool", tool_call_id: call.id, content: "21" }];
      const after = await client.chat.completions.create({ ...ASKED, messages, tool_choice: "none", max_tokens: 8 });
      check(after.choices[0].message.content !== null, "the answer of the tool goes back", after);
    }
  },
  "a tool that the helper runs": async () => {
    const called = [];
    const degrees = { ...TOOL.function, parse: JSON.parse, function: ({ city }) => (called.push(city), "21") };
    const tools = [{ type: "function", function: degrees }];
    const runner = client.chat.completions.runTools({ ...ASKED, tools, tool_choice: NAMED });
    await runner.done();
    check(called.length > 0, "the helper calls it", called);
  },
});
