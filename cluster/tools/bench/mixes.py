"""Named mixes of requests, each with the service level that it is judged by."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tandem.cluster.tools.bench.lengths import Lengths


@dataclass(frozen=True)
class Slo:
    """The limits that a request must keep, on both sides, and the fraction of requests that must.

    ttft_ms: from the call to the first token. gap_ms: p90 of the request's gaps between messages with tokens.
    """

    ttft_ms: float
    gap_ms: float
    fraction: float = 0.9


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts and outputs, and how requests arrive.

    rate: requests a second that a sweep begins with. burstiness: of arrivals, see gamma_arrivals.
    """

    prompts: Lengths
    outputs: Lengths
    slo: Slo
    rate: float
    about: str
    burstiness: float = 1.0


OUTPUTS = Lengths.uniform(128, 384)
UNLIKE = Lengths.lognormal(800, 0.8, 8192)
MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        "A": Mix(UNLIKE, OUTPUTS, Slo(500, 15), 16.0, "prompts of unlike lengths"),
        "A2": Mix(Lengths.uniform(512, 1536), OUTPUTS, Slo(500, 15), 16.0, "prompts of about 1K"),
        "B": Mix(Lengths.lognormal(8000, 0.25, 16000), OUTPUTS, Slo(2000, 15), 3.0, "long prompts"),
        "C": Mix(Lengths.uniform(96, 160), OUTPUTS, Slo(500, 15), 64.0, "short prompts"),
        "bursty": Mix(UNLIKE, OUTPUTS, Slo(500, 15), 12.0, "A, arriving in bursts", burstiness=0.25),
        "mixed": Mix(
            Lengths.either(128, 12288, 0.05), OUTPUTS, Slo(500, 15), 16.0, "short prompts beside one in twenty of 12K"
        ),
        "laptop": Mix(Lengths.uniform(32, 96), Lengths.uniform(8, 24), Slo(500, 50), 8.0, "for a tiny model on a CPU"),
    }
)
