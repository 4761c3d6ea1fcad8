"""The scripts, each with the client whose behaviour it shows."""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NODE = "node"


@dataclass(frozen=True)
class Script:
    """environment: of Environments. package: the client, by its name in the registry. route: a path that the server
    may lack."""

    environment: str
    package: str
    file: str
    route: str = ""

    @property
    def name(self) -> str:
        return f"{self.environment}/{Path(self.file).stem}"

    @property
    def path(self) -> Path:
        return FOLDER / (NODE if self.environment == NODE else "python") / self.file


SCRIPTS = (
    Script("python", "openai", "openai_chats.py"),
    Script("python", "openai", "openai_completions.py"),
    Script("python", "openai", "openai_tools.py"),
    Script("python", "openai", "openai_responses.py", "/v1/responses"),
    Script("openai-1", "openai", "openai_chats.py"),
    Script("openai-1", "openai", "openai_completions.py"),
    Script("openai-1", "openai", "openai_tools.py"),
    Script("openai-1", "openai", "openai_responses.py", "/v1/responses"),
    Script("openai-3", "openai", "openai_chats.py"),
    Script("openai-3", "openai", "openai_completions.py"),
    Script("openai-3", "openai", "openai_tools.py"),
    Script("openai-3", "openai", "openai_responses.py", "/v1/responses"),
    Script("python", "langchain-openai", "langchain_chats.py"),
    Script("python", "langchain-openai", "langchain_tools.py"),
    Script("python", "langchain-openai", "langchain_responses.py", "/v1/responses"),
    Script("python", "llama-index-llms-openai-like", "llama_index_chats.py"),
    Script("python", "llama-index-llms-openai-like", "llama_index_tools.py"),
    Script("python", "litellm", "litellm_chats.py"),
    Script("python", "litellm", "litellm_tools.py"),
    Script("python", "litellm", "litellm_messages.py", "/v1/messages"),
    Script("python", "instructor", "instructor_json.py"),
    Script("python", "instructor", "instructor_tools.py"),
    Script("python", "dspy", "dspy_predict.py"),
    Script("python", "openai-agents", "agents_tool.py"),
    Script("python", "openai-agents", "agents_responses.py", "/v1/responses"),
    Script("python", "anthropic", "anthropic_messages.py", "/v1/messages"),
    Script("python", "lm_eval", "lm_eval_tasks.py"),
    Script("python", "locust", "locust_load.py"),
    Script("guidellm", "guidellm", "guidellm_run.py"),
    Script(NODE, "openai", "openai_chats.mjs"),
    Script(NODE, "openai", "openai_tools.mjs"),
    Script(NODE, "@ai-sdk/openai-compatible", "ai_sdk.mjs"),
    Script(NODE, "@ai-sdk/openai-compatible", "ai_tools.mjs"),
    Script(NODE, "@grpc/grpc-js", "grpc.mjs"),
)
