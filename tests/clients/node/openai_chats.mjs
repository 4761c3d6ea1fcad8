// The npm package openai: chats whole and streamed, completions, models, structured output, and errors by their types.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { API_KEY, BASE_URL, CHAT, check, MODEL, PROMPT, refusal, run } from "./steps.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0 });
const GREEDY = { model: MODEL, messages: CHAT, max_tokens: 24, temperature: 0 };
const Answer = z.object({ size: z.enum(["small", "large"]), is_fast: z.boolean() });

await run({
  "a chat": async () => {
    const whole = await client.chat.completions.create(GREEDY);
    check(whole.choices[0].message.content && whole.usage.completion_tokens > 0, "a text with usage", whole);
  },
  "a stream": async () => {
    const whole = await client.chat.completions.create(GREEDY);
    let text = "";
    let usage = null;
    const options = { ...GREEDY, stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create(options)) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    check(text === whole.choices[0].message.content, "a stream says the same", text, whole);
    check(usage.total_tokens === whole.usage.total_tokens, "usage in the stream", usage);
  },
  "a stream of events": async () => {
    const stream = client.chat.completions.stream(GREEDY);
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalContent();
    check(text === final, "the helper's events", text, final);
  },
  "a stream that the client closes": async () => {
    const stream = await client.chat.completions.create({ ...GREEDY, max_tokens: 1000, stream: true });
    for await (const chunk of stream) if (chunk) break;
    check((await client.chat.completions.create(GREEDY)).choices.length === 1, "the server goes on");
  },
  "completions and models": async () => {
    const whole = await client.completions.create({ model: MODEL, prompt: PROMPT, max_tokens: 8, logprobs: 1 });
    check(whole.choices[0].logprobs.tokens.length > 0, "log-probabilities", whole);
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    check(names.includes(MODEL), "the served model", names);
  },
  "structured output": async () => {
    const format = zodResponseFormat(Answer, "answer");
    const said = await client.chat.completions.parse({ ...GREEDY, max_tokens: 600, response_format: format });
    check(Answer.safeParse(said.choices[0].message.parsed).success, "an object of the schema", said);
  },
  "errors by type": async () => {
    const wrong = await refusal(client.chat.completions.create({ ...GREEDY, temperature: -1 }));
    check(wrong instanceof OpenAI.BadRequestError && wrong.param === "temperature", "BadRequestError", wrong);
    const other = await refusal(client.chat.completions.create({ ...GREEDY, model: "another" }));
    check(other instanceof OpenAI.NotFoundError && other.code === "model_not_found", "NotFoundError", other);
    const stranger = new OpenAI({ baseURL: BASE_URL, apiKey: "wrong", maxRetries: 0 });
    const denied = await refusal(stranger.chat.completions.create(GREEDY));
    check(denied instanceof OpenAI.AuthenticationError, "AuthenticationError", denied);
  },
});
