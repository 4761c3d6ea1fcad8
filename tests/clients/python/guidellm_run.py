"""guidellm: a short run over chats and one over completions; all its requests succeed."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import API_KEY, HTTP, MODEL, TOKENIZER, check, run

REQUESTS = 6
SECONDS = 200.0


def measured(form: str) -> None:
    with tempfile.TemporaryDirectory(prefix="guidellm-") as folder:
        report = Path(folder) / "report.json"
        backend = f"kind=openai_http,target={HTTP},model={MODEL},api_key={API_KEY},request_format={form}"
        command = [Path(sys.executable).parent / "guidellm", "run", "--backend", backend, "--disable-console"]
        command += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}", "--profile", "kind=concurrent,streams=2"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
        command += ["--output", f"kind=json,path={report}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        check(ended.returncode == 0, "guidellm ends well", ended.stderr[-1000:])
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    check(totals["successful"] == REQUESTS and totals["errored"] == 0, f"{REQUESTS} requests succeed", totals)
    tokens = benchmark["metrics"]["output_token_count"]["successful"]["mean"]
    check(tokens == 8.0, "8 output tokens each, as asked", tokens)


def chats() -> None:
    measured("/v1/chat/completions")


def completions() -> None:
    measured("/v1/completions")


if __name__ == "__main__":
    run(chats, completions)
