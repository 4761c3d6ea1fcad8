"""A cluster as a Python object: launch() starts one, connect() uses a running one."""

from tandem.cluster.llm.launch import connect, launch
from tandem.cluster.llm.llm import LLM, AsyncLLM
from tandem.cluster.llm.outputs import Answer, Output

__all__ = ["LLM", "Answer", "AsyncLLM", "Output", "connect", "launch"]
