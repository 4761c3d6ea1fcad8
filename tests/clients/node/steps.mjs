// Where the server is, and how a script says what it did: as scripts/steps.py.

export const HTTP = process.env.TANDEM_HTTP ?? "http://127.0.0.1:8000";
export const BASE_URL = `${HTTP}/v1`;
export const GRPC = process.env.TANDEM_GRPC ?? "127.0.0.1:50051";
export const MODEL = process.env.TANDEM_MODEL ?? "model";
export const API_KEY = process.env.TANDEM_API_KEY ?? "none";
export const CHAT = [{ role: "user", content: "What is a cache?" }];
export const PROMPT = "The with statement is used to";

/** Throws unless it holds. said: what the API promises; got: what came instead. */
export function check(holds, said, ...got) {
  if (!holds) throw new Error(`${said}; got ${got.map((one) => JSON.stringify(one)).join(", ")}`);
}

/** The error that the promise ends with. */
export async function refusal(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  throw new Error("an error was to be raised, and none was");
}

/** Runs all of them, whatever the others do. A step prints one line: `ok NAME` or `failed NAME: reason`. */
export async function run(steps) {
  let failed = false;
  for (const [name, step] of Object.entries(steps)) {
    try {
      await step();
      console.log(`ok ${name}`);
    } catch (error) {
      failed = true;
      console.error(error);
      console.log(`failed ${name}: ${String(error).replace(/\s+/g, " ").slice(0, 2000)}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
