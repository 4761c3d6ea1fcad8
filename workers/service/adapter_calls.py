"""The calls that load LoRA adapters into a worker and remove them, and the check that it holds a request's."""

from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.adapters.held_adapter import HeldAdapter
from tandem.workers.config import AdapterSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import AdapterNotHeld, InvalidCall
from tandem.workers.service.call_checks import check_digest
from tandem.workers.wire.prompt_spec import PromptSpec

MAX_NAME, MAX_PATH = 256, 4096  # characters


def check_load(request: worker_pb2.LoadAdapterRequest, settings: AdapterSettings) -> None:
    """Raises InvalidCall for a call that cannot be right."""
    for field, text, most in (("name", request.name, MAX_NAME), ("path", request.path, MAX_PATH)):
        if not 1 <= len(text) <= most:
            raise InvalidCall(f"{field} has {len(text)} characters; 1 … {most} are accepted")
    if request.digest:
        check_digest(request.digest, "digest")
    if not settings.max_resident:
        raise InvalidCall(f"path {request.path:.80}: adapters.max_resident is 0; 1 or more is accepted")


def check_held(engine: Engine, prompt: PromptSpec) -> PromptSpec:
    """The prompt. Raises AdapterNotHeld where no new request may use its adapter here."""
    if prompt.adapter and not is_held(engine.adapters, prompt.adapter):
        raise AdapterNotHeld(prompt.adapter)
    return prompt


def is_held(adapters: tuple[HeldAdapter, ...], digest: bytes) -> bool:
    """Whether new requests may use the adapter."""
    return any(one.digest == digest and not one.removed for one in adapters)


def adapter_infos(adapters: tuple[HeldAdapter, ...]) -> list[inference_pb2.AdapterInfo]:
    """For a WorkerInfo."""
    return [inference_pb2.AdapterInfo(**one._asdict()) for one in adapters]
