"""Reports each process of a worker that has several."""

from collections.abc import Sequence, Set

from tandem.proto import inference_pb2
from tandem.workers.engine.rank_progress import RankProgress
from tandem.workers.service.resident import resident_bytes


def rank_infos(ranks: Sequence[RankProgress], stalled: Set[int] = frozenset()) -> list[inference_pb2.RankInfo]:
    """stalled: the ranks that the others wait for."""
    return [_info(rank, one.pid, rank in stalled) for rank, one in enumerate(ranks)]


def _info(rank: int, pid: int, stalled: bool) -> inference_pb2.RankInfo:
    try:
        resident, alive = resident_bytes(pid), True
    except OSError:
        resident, alive = 0, False
    return inference_pb2.RankInfo(rank=rank, pid=pid, alive=alive, stalled=stalled, resident_bytes=resident)
