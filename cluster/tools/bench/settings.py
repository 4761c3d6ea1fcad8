"""The options of `tandem bench serve`, and the settings that follow from them."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cluster.errors import UsageError
from tandem.cluster.tools.bench.generators import default_processes
from tandem.cluster.tools.bench.lengths import Lengths
from tandem.cluster.tools.bench.mixes import MIXES, Mix, Slo
from tandem.cluster.tools.bench.targets import Served, TargetSpec
from tandem.cluster.tools.bench.workload import Workload

VOCABULARY = 32000  # ids below it are tokens of every model that is served today
DEFAULT_MIX, EMBEDDED_MIX = "A", "laptop"
BUDGET_SECONDS, EMBEDDED_BUDGET_SECONDS = 420.0, 75.0


@dataclass(frozen=True)
class LoadOptions:
    """Options of loads. seconds: of measured arrivals; requests: how many instead, when given.

    warm_up_seconds: of arrivals before them; tail_seconds: of arrivals after them, at the longest.
    """

    seconds: float = 30.0
    requests: int | None = None
    warm_up_seconds: float = 3.0
    tail_seconds: float = 5.0
    burstiness: float = 1.0
    max_concurrency: int = 4096
    timeout: float = 600.0


@dataclass(frozen=True)
class Settings:
    """The command's options, by their names. None stands for the value of the mix, the server or the machine."""

    target: TargetSpec  # with neither grpc nor urls, a cluster is started for this run
    load: LoadOptions
    mix: str | None
    prompt_tokens: str | None
    output_tokens: str | None
    prefix: int
    prefixes: int
    turns: int
    pause_seconds: float
    trace: Path | None
    rates: tuple[float, ...]
    sweeps: bool
    slo_ttft_ms: float | None
    slo_gap_ms: float | None
    slo_fraction: float | None
    burstiness: float | None
    precision: float
    budget_seconds: float | None
    processes: int | None
    seed: int
    vocab_size: int | None

    def check(self) -> None:
        """Raises UsageError for bad options, before anything is started."""
        if self.target.grpc and self.target.urls:
            raise UsageError("give --grpc HOST:PORT, --url URL, or neither, which starts a cluster here")
        if self.mix_name not in MIXES:
            raise UsageError(f"--mix is {self.mix!r:.80}; it must be one of {', '.join(MIXES)}")
        if bad := [rate for rate in self.rates if not 0 < rate <= 1e6]:
            raise UsageError(f"--rate is {bad[0]:g}; it must be above 0 and at most 1000000 requests/s")
        if self.burstiness is not None and not self.burstiness > 0:
            raise UsageError(f"--burstiness is {self.burstiness:g}; it must be above 0: 1 is Poisson, inf is even")
        if self.trace is not None and self.turns > 1:
            raise UsageError("--trace has requests of its own; leave --turns out")
        if self.target.endpoint == "chat" and not self.target.urls:
            raise UsageError("--endpoint is chat; it needs --url: over gRPC, prompts are token ids")
        self.workload(Served("", None, None)).check()

    @property
    def is_embedded(self) -> bool:
        return not (self.target.grpc or self.target.urls)

    @property
    def mix_name(self) -> str:
        return self.mix or (EMBEDDED_MIX if self.is_embedded else DEFAULT_MIX)

    @property
    def _mix(self) -> Mix:
        return MIXES[self.mix_name]

    @property
    def slo(self) -> Slo:
        given = {"ttft_ms": self.slo_ttft_ms, "gap_ms": self.slo_gap_ms, "fraction": self.slo_fraction}
        return dataclasses.replace(self._mix.slo, **{name: value for name, value in given.items() if value is not None})

    @property
    def load_options(self) -> LoadOptions:
        given = self._mix.burstiness if self.burstiness is None else self.burstiness
        return dataclasses.replace(self.load, burstiness=given)

    @property
    def start_rate(self) -> float:
        """The rate at which a sweep starts."""
        return self.rates[0] if self.rates else self._mix.rate

    @property
    def budget(self) -> float:
        return self.budget_seconds or (EMBEDDED_BUDGET_SECONDS if self.is_embedded else BUDGET_SECONDS)

    @property
    def num_processes(self) -> int:
        return self.processes or default_processes()

    def workload(self, served: Served) -> Workload:
        """Makes the workload. Raises UsageError."""
        prompts, outputs = self.prompt_tokens, self.output_tokens
        return Workload(
            self._mix.prompts if prompts is None else Lengths.parse("--prompt-tokens", prompts),
            self._mix.outputs if outputs is None else Lengths.parse("--output-tokens", outputs),
            self.vocab_size or min(VOCABULARY, served.vocab_size or VOCABULARY),
            seed=self.seed,
            prefix=self.prefix,
            prefixes=self.prefixes,
            turns=self.turns,
            pause=self.pause_seconds,
            trace=None if self.trace is None else str(self.trace),
            most_tokens=served.max_model_len,
        )

    def described(self, served: Served) -> dict[str, Any]:
        """Returns the facts that a reader of the results must know, by vLLM's names where it has them."""
        workload = self.workload(served)
        return {
            "backend": "openai" if self.target.urls else "tandem",
            "endpoint_type": self.target.endpoint if self.target.urls else "grpc",
            "model_id": served.model,
            "mix": self.mix_name,
            "prompt_tokens": str(workload.prompts),
            "output_tokens": str(workload.outputs),
            "trace": workload.trace,
            "left_out": workload.left_out,
            "prefix": self.prefix,
            "prefixes": self.prefixes,
            "turns": self.turns,
            "seed": self.seed,
            "slo": dataclasses.asdict(self.slo),
            "processes": self.num_processes,
            "max_concurrency": self.load.max_concurrency,
        }
