"""lm_eval: local-completions scores choices and generates, local-chat-completions generates, on tasks written here.

The right answers are the server's own greedy ones, so that an evaluation which reads log-probabilities and texts
rightly gives 1.0.
"""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
import openai
from lm_eval.tasks import TaskManager
from steps import API_KEY, BASE_URL, MODEL, TOKENIZER, check, run

os.environ["OPENAI_API_KEY"] = API_KEY
FOLDER = Path(tempfile.mkdtemp(prefix="lm-eval-"))
PROMPTS = ("The with statement is used to", "A function definition", "The for statement is used to")
OTHERS = (" zebra xylophone", " 7 7 7 7 9 Q", " qqq zzz")
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
TEXTS = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{TARGET}}"
target_delimiter: ""
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def write_tasks() -> None:
    client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY)
    docs = []
    for number, prompt in enumerate(PROMPTS):
        asked = {"model": MODEL, "max_tokens": 12, "temperature": 0, "stop": ["\n"]}
        text = client.completions.create(prompt=prompt, **asked).choices[0].text
        said = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **asked).choices[0]
        choices = list(OTHERS)
        choices.insert(number, text)
        docs.append({"prompt": prompt, "text": text, "said": said.message.content, "choices": choices, "label": number})
    data = FOLDER / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (FOLDER / "choices.yaml").write_text(CHOICES.replace("DATA", str(data)))
    for name, target in (("texts", "text"), ("chats", "said")):
        task = TEXTS.replace("DATA", str(data)).replace("NAME", name).replace("TARGET", target)
        (FOLDER / f"{name}.yaml").write_text(task)


def evaluated(task: str, kind: str, **options: object) -> dict[str, object]:
    if not (FOLDER / "docs.jsonl").exists():
        write_tasks()
    args = {"model": MODEL, "base_url": f"{BASE_URL}/{kind}", "num_concurrent": 2, "max_retries": 1, "max_length": 2048}
    tokens = {"tokenizer": TOKENIZER, "tokenizer_backend": "huggingface"} if kind == "completions" else {}
    found = lm_eval.simple_evaluate(
        model="local-completions" if kind == "completions" else "local-chat-completions",
        model_args=args | tokens,
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    return found["results"][task]


def choices_by_log_likelihood() -> None:
    found = evaluated("choices", "completions")
    check(found["acc,none"] == 1.0, "the model's own words are the likeliest", found)


def generated_texts() -> None:
    found = evaluated("texts", "completions")
    check(found["exact_match,none"] == 1.0, "the same texts as the API gives", found)


def generated_chats() -> None:
    found = evaluated("chats", "chat/completions", apply_chat_template=True)
    check(found["exact_match,none"] == 1.0, "the same texts as the API gives", found)


if __name__ == "__main__":
    run(choices_by_log_likelihood, generated_texts, generated_chats)
