"""A prefill and a decode loop in the test's own thread, over the fake transport and a clock that the test moves."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.pool_sizes import NO_SNAPSHOTS, SnapshotRule
from tandem.cache.plan.stored_layers import Stages
from tandem.cache.store.lanes import MakeLanes
from tandem.cache.store.parked_store import ParkedStore
from tandem.transfer.recall import mailbox_rows
from tandem.transfer.transport import Transport
from tandem.workers.config import AdapterSettings, LoopSettings, ParkingSettings, SpeculationSettings
from tandem.workers.counters import Counters
from tandem.workers.decode.kernel_threads import KernelThreads
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import WorkerError
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.drafters.load import load_drafter
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.requests.token_stream import TokenFanout, TokenStream, TokenUpdate
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.speculation.choice import make_drafter
from tandem.workers.speculation.drafter import Drafter
from tandem.workers.steps.step_loop import Ends, StepLoop
from tandem.workers.wire.reservation import Reservation
from tests.support.adapters import held_adapters
from tests.support.fake_transport import FakeFabric
from tests.support.poison import poison_free_pages
from tests.support.prompt_specs import spec_of
from tests.support.tvm_cache import TvmCache

PAGE, CHUNK, LEASE = 8, 16, 10.0
PREFILL, DECODE = 0, 1
NO_SPECULATION = SpeculationSettings()
NO_PARKING = ParkingSettings()
NEVER_BUSY = 200  # steps after which a request must have ended


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Collected(TokenFanout):
    """Keeps what the streams get."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason | WorkerError] = {}

    def publish(self, updates: list[TokenUpdate]) -> None:
        for update in updates:
            if update.run.token_ids:
                self.tokens.setdefault(id(update.token_stream), []).extend(update.run.token_ids)
            if update.run.reason != FinishReason.RUNNING:
                self.ended[id(update.token_stream)] = update.run.reason

    def fail(self, token_stream: TokenStream, error: WorkerError) -> None:
        self.ended[id(token_stream)] = error


class CountedWrites(PageWriter):
    """Passes everything on; bytes_written counts issued bytes, landed or not. tokens_written counts tokens that went
    with forwards. For layouts of one group."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.bytes_written = self.tokens_written = 0

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        self._transport.write_tokens(pe, group, layer, k, v, token_indices, slots)
        layout = self._transport.layout
        self.bytes_written += len(slots) * layout.token_bytes // layout.num_layers
        self.tokens_written += len(slots) * (layer == 0)

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        self._transport.write_slots(pe, group, source_slots, target_slots, stages)
        self.bytes_written += target_slots.size * self._transport.layout.token_bytes

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        return self._transport.peer_pool(pe, group)


class LoopPair:
    """Nothing happens unless the test steps a loop or moves the clock."""

    def __init__(
        self,
        folder: Path,
        *,
        num_pages: int = 32,
        num_signals: int = 8,
        max_sequences: tuple[int, int] = (64, 64),
        most: int = 16,
        sharing: bool = False,
        verify: bool = True,
        speculation: SpeculationSettings = NO_SPECULATION,
        drafter: Callable[[Engine], Drafter | None] | None = None,
        kernels: KernelFactory = choose_kernels,
        snapshots: SnapshotRule = NO_SNAPSHOTS,
        parking: ParkingSettings = NO_PARKING,
        parked_slots: int = 64,
        adapters: Sequence[Path] = (),
        slots: tuple[int, int] = (1, 1),
        parked_lanes: MakeLanes | None = None,
    ) -> None:
        """max_sequences: of the caches. most: sequences of each worker. drafter: None makes the one that `speculation`
        names. adapters: folders of LoRA adapters, which both workers hold. slots: for them on each worker's device."""
        config = load_config(folder)
        drafting = load_drafter_config(speculation, config)
        layout = kv_layout(config, PAGE, drafter=drafting)
        self.clock = Clock()
        self.fabric = FakeFabric(2, layout, num_pages=num_pages, num_signals=mailbox_rows(num_signals, 2))
        self.transports = self.fabric.joined()
        self._writes = [CountedWrites(transport) for transport in self.transports]
        target = load_decoder(folder, config)
        model = target if drafting is None else load_drafter(folder, speculation, target, drafting)

        def cache_over(transport: Transport, writer: PageWriter, most: int) -> TvmCache:
            pools, longest = transport.pools, config.max_length
            cache = TvmCache.of(
                make_cache(
                    config,
                    layout,
                    pools,
                    max_sequences=most,
                    max_length=longest,
                    writer=writer,
                    drafter=drafting,
                    kernels=kernels,
                    snapshots=snapshots,
                )
            )
            poison_free_pages(cache, transport.pools)
            if parking.most:
                cache.keep_parked(ParkedStore(pools, [parked_slots] * len(pools), None, parked_lanes))
            return cache

        self.caches = [cache_over(*ends) for ends in zip(self.transports, self._writes, max_sequences, strict=True)]
        settings = LoopSettings(
            LEASE, sharing, verify, max_batch_tokens=CHUNK, max_sequences=most, speculation=speculation, parking=parking
        )
        self.fanout = Collected()
        make = drafter or partial(make_drafter, speculation)
        self.digests: list[bytes] = []  # of the adapters

        def runner(cache: TvmCache, slots: int) -> ModelRunner:
            if not adapters:
                return ModelRunner(model, cache)
            own = load_decoder(folder, config, adapters=AdapterSettings(slots, 8))  # whose slots are this worker's
            assert own.adapted is not None
            held, self.digests = held_adapters(config, own.adapted, adapters)
            return ModelRunner(own, cache, held)

        self.runners = [runner(*parts) for parts in zip(self.caches, slots, strict=True)]
        engines = [Engine(*parts) for parts in zip(self.caches, self.runners, self.transports, strict=True)]
        self.loops = [
            StepLoop(
                engine,
                settings,
                Ends(PushMeter(writes), self.fanout, KernelThreads(None, 1), make(engine)),
                self.clock,
            )
            for engine, writes in zip(engines, self._writes, strict=True)
        ]
        self.prefill = self.loops[PREFILL].prefills
        self.decode = self.loops[DECODE].decodes
        self._streams: dict[str, TokenStream] = {}

    def step_prefill(self) -> float | None:
        return self.loops[PREFILL].step()

    def step_decode(self) -> float | None:
        return self.loops[DECODE].step()

    @property
    def prefill_counters(self) -> Counters:
        return self.loops[PREFILL].counters

    @property
    def decode_counters(self) -> Counters:
        return self.loops[DECODE].counters

    @staticmethod
    def params(num_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, seed=1)

    def prepare(self, request_id: str, prompt: Sequence[int], num_tokens: int = 4, *, priority: int = 0) -> Reservation:
        return self.decode.prepare(request_id, replace(spec_of(prompt), priority=priority), num_tokens, PREFILL)

    def send(self, request_id: str, prompt: Sequence[int], reservation: Reservation, num_tokens: int = 4) -> None:
        """RemoteSend, with a call that waits for it."""
        self.prefill.submit(request_id, spec_of(prompt), self.params(num_tokens), reservation)
        self.prefill.attend(request_id)

    def start(
        self, request_id: str, reservation: Reservation, num_tokens: int = 4, params: SamplingParams | None = None
    ) -> None:
        stream = TokenStream()
        self.decode.start(request_id, reservation.reservation_id, params or self.params(num_tokens), stream)
        self._streams[request_id] = stream

    def run_prefill(self) -> None:
        """Steps until nothing is left to compute."""
        for _ in range(NEVER_BUSY):
            if self.step_prefill() != 0:
                return
        raise AssertionError("the prefill loop does not come to an end")

    def run_decode(self) -> None:
        """Steps until every started request whose KV landed has ended."""
        self.step_decode()
        for _ in range(NEVER_BUSY):
            if not (self.decode.num_running or self.decode._steps or self.loops[DECODE].prefills.num_running):
                return
            self.step_decode()
        raise AssertionError("the decode loop does not come to an end")

    def complete(self, request_id: str, prompt: Sequence[int], num_tokens: int = 4) -> list[int]:
        """All tokens of one request from beginning to end."""
        reservation = self.prepare(request_id, prompt, num_tokens)
        return self.finish(request_id, prompt, reservation, num_tokens)

    def finish(
        self,
        request_id: str,
        prompt: Sequence[int],
        reservation: Reservation,
        num_tokens: int = 4,
        params: SamplingParams | None = None,
    ) -> list[int]:
        """Returns all tokens of a request that is reserved. params: in place of params()."""
        params = params or self.params(num_tokens)
        future = self.prefill.submit(request_id, spec_of(prompt), params, reservation)
        self.start(request_id, reservation, num_tokens, params)
        self.run_prefill()
        self.run_decode()
        assert self.ended(request_id) in (FinishReason.LENGTH, FinishReason.STOP)
        return [future.result(0).first_token, *self.tokens(request_id)]

    def tokens(self, request_id: str) -> list[int]:
        """Returns the tokens after the first."""
        return self.fanout.tokens.get(id(self._streams[request_id]), [])

    def ended(self, request_id: str) -> FinishReason | WorkerError | None:
        return self.fanout.ended.get(id(self._streams[request_id]))

    def heed_recalls(self) -> None:
        """The receiver asks, the writer answers, the receiver takes the answer."""
        self.step_decode()
        self.clock.now += 1
        self.step_prefill()
        self.step_decode()

    @property
    def bytes_written(self) -> int:
        return self._writes[PREFILL].bytes_written

    @property
    def tokens_written(self) -> int:
        return self._writes[PREFILL].tokens_written

    @property
    def in_flight(self) -> int:
        """Writes on their way to the decode worker."""
        return self.fabric.num_in_flight(DECODE)

    def assert_free(self) -> None:
        for cache in self.caches:
            assert cache.is_empty
            assert cache.num_draining_pages == 0
            assert cache.num_free_pages == cache.num_pages
