"""When methods of a cluster's processes begin and end: their classes are patched, in the processes of benchmarks only.

Times are time.perf_counter()'s, which processes of one host share under Linux.
"""

import inspect
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tandem.cluster.processes.forks.forked_actor import ForkedActor
from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.processes import ActorSpec
from tandem.cluster.routing.prefill_hints import PrefillHints
from tandem.cluster.supervision.gateway_actor import GatewayActor
from tandem.cluster.supervision.worker_actor import WorkerActor
from tandem.workers.config import Role, WorkerConfig
from tests.support.local_processes import LocalGroup, LocalProcesses

QUIET_SECONDS = 0.01  # without an event, after which those before it are written

# module, class, method
TRACED: dict[str, Sequence[tuple[str, str, str]]] = {
    "gateway": (
        ("tandem.cluster.frontends.inference", "Inference", "Generate"),
        ("tandem.cluster.routing.router", "Router", "place"),
        ("tandem.cluster.routing.prefill_hints", "PrefillHints", "send"),
        ("tandem.cluster.requests.generation", "Generation", "_answer"),
        ("tandem.cluster.requests.generation", "Generation", "_first_message"),
        ("tandem.cluster.requests.generation", "Generation", "_message"),
    ),
    "prefill": (
        ("tandem.workers.prefill.prefills", "Prefills", "speculate"),
        ("tandem.workers.prefill.speculative_prefill", "SpeculativePrefill", "_compute"),
        ("tandem.workers.service.services", "WorkerService", "RemoteSend"),
        ("tandem.workers.prefill.prefills", "Prefills", "submit"),
        ("tandem.workers.prefill.forwards", "PromptForwards", "launch"),
        ("tandem.workers.prefill.prefills", "Prefills", "_sample"),
        ("tandem.workers.prefill.prefills", "Prefills", "_send_launched"),
        ("tandem.workers.handoff.handoff", "Handoff", "post"),
        ("tandem.workers.requests.first_token", "FirstTokens", "next"),
        ("tandem.workers.handoff.draining", "DrainingWrites", "finish"),
    ),
    "decode": (
        ("tandem.workers.service.services", "WorkerService", "PrepareReceive"),
        ("tandem.workers.decode.decodes", "Decodes", "prepare"),
        ("tandem.workers.service.services", "WorkerService", "StartGenerate"),
        ("tandem.workers.handoff.reservations", "Reservations", "receive"),
        ("tandem.workers.decode.decodes", "Decodes", "_launched"),
        ("tandem.workers.decode.decodes", "Decodes", "_deliver"),
        ("tandem.workers.service.services", "", "_generated"),
    ),
}


@dataclass(frozen=True)
class Event:
    """process: gateway, prefill or decode; name: Class.method and "begins" or "ends"."""

    seconds: float
    process: str
    name: str


@dataclass(frozen=True)
class _Traced:
    argument: Any
    log: Path


class TracedGateway(GatewayActor):
    def __init__(self, traced: _Traced) -> None:
        _trace("gateway", traced.log)
        super().__init__(traced.argument)

    def announcements(self, wanted: bool) -> None:
        """Turns announcements of prompts on or off."""
        announcements: Any = PrefillHints
        announcements.send = _send if wanted else _send_nothing


class TracedWorker(WorkerActor):
    def __init__(self, traced: _Traced) -> None:
        config: WorkerConfig = traced.argument
        os.environ["CUDA_VISIBLE_DEVICES"] = str(config.pe)
        _trace("prefill" if config.role == Role.PREFILL else "decode", traced.log)
        super().__init__(config)

    def announcements(self, _: bool) -> None:
        """A worker takes its arguments."""


class TracedProcesses(LocalProcesses):
    """One island's worker of PE n has the n-th GPU, where there are any."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log

    def announcements(self, wanted: bool) -> None:
        """See TracedGateway."""
        for actor in self._actors.values():
            actor.call("announcements", wanted).result(10)

    def start_group(
        self, specs: Sequence[ActorSpec], *, gpus: int, threads: int, where: Where = ANYWHERE
    ) -> LocalGroup[ForkedActor]:
        kinds: dict[type, type] = {GatewayActor: TracedGateway, WorkerActor: TracedWorker}
        traced = [ActorSpec(spec.name, kinds[spec.kind], _Traced(spec.argument, self._log)) for spec in specs]
        return super().start_group(traced, gpus=0, threads=threads)


_send = PrefillHints.send


async def _send_nothing(*_: object) -> None:
    pass


def read_events(log: Path) -> list[Event]:
    """Returns the events in the order of their times."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    found = [Event(float(seconds), process, name) for seconds, process, name in (line.split("\t") for line in lines)]
    return sorted(found, key=lambda event: event.seconds)


def _trace(process: str, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    noted: list[tuple[float, str]] = []

    def note(name: str) -> None:
        noted.append((time.perf_counter(), name))

    def write() -> None:  # not in note(): a call to the system would give the interpreter to another thread
        while True:
            time.sleep(QUIET_SECONDS)
            count = len(noted)
            if count and time.perf_counter() - noted[-1][0] > QUIET_SECONDS:
                os.write(file, "".join(f"{at:.7f}\t{process}\t{name}\n" for at, name in noted[:count]).encode())
                del noted[:count]

    threading.Thread(target=write, name="trace", daemon=True).start()

    for module_name, owner_name, method in TRACED[process]:
        module = import_module(module_name)
        owner = getattr(module, owner_name) if owner_name else module
        setattr(owner, method, _noted(getattr(owner, method), f"{owner_name}.{method}", note))


def _noted(call: Callable[..., Any], name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    async def noted_later(*arguments: Any, **options: Any) -> Any:
        note(f"{name} begins")
        try:
            return await call(*arguments, **options)
        finally:
            note(f"{name} ends")

    def noted(*arguments: Any, **options: Any) -> Any:
        note(f"{name} begins")
        try:
            return call(*arguments, **options)
        finally:
            note(f"{name} ends")

    return noted_later if inspect.iscoroutinefunction(call) else noted
