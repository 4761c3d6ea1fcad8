"""One worker: model, cache, transport, step thread and gRPC service, put together and taken apart in order."""

import asyncio
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc.aio
import torch
from torch import Tensor

from tandem.cache.kernels.native.crew import load_crew
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.proto import worker_pb2_grpc
from tandem.transfer.endpoint import LOOPBACK, Endpoint
from tandem.transfer.factory import create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.recall import mailbox_rows
from tandem.transfer.transport import Transport
from tandem.workers.adapters.adapters import Adapters, adapters_of
from tandem.workers.checkpoint.tokenizer_files import end_tokens
from tandem.workers.config import LoopSettings, WorkerConfig
from tandem.workers.decode.kernel_threads import KernelThreads, threads_of
from tandem.workers.engine.captures import FIRST_USE, captures_of
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.watched_engine import WatchedEngine
from tandem.workers.event_loop import EventLoopThread
from tandem.workers.following.worker_ranks import WorkerRanks
from tandem.workers.models.drafters.load import Model, load_drafter
from tandem.workers.models.weights import load_decoder
from tandem.workers.pool_pages import keep_on_host, pages_in, pool_pages, snapshot_rule, with_host_bytes
from tandem.workers.ports.authentication import TokenRequired
from tandem.workers.ports.private_socket import PrivateSocket
from tandem.workers.ports.tls import Identity, bracketed
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.replay.recorder import Recorder, begin_record
from tandem.workers.requests.token_stream import TokenFanout
from tandem.workers.runner.memory_budget import measure_budget, on_the_gpu
from tandem.workers.runner.model_cache import make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.guided import Grammars
from tandem.workers.service.gpu_memory import GpuMemory
from tandem.workers.service.server_options import server_options
from tandem.workers.service.services import WorkerService
from tandem.workers.service.well_formed import WellFormedRequired
from tandem.workers.speculation.choice import make_drafter
from tandem.workers.steps.peer_changes import PeerChanges
from tandem.workers.steps.step_loop import Ends, StepLoop
from tandem.workers.steps.step_thread import StepThread

T = TypeVar("T")
Watch = Callable[[PageWriter], PageWriter]
HOST = "127.0.0.1"
FOLLOWS = "none: it follows rank 0 of its worker"  # the address of a rank that serves nobody
SERVE_SECONDS = 570.0  # FlashInfer compiles what it needs at first use: two minutes, more on few cores
COMMAND_SECONDS = 30.0
RELEASE_SECONDS = 20.0  # longer than a prefill worker waits for its writes


class Worker:
    """Lifecycle: load() → open(pages) → join(handles) → serve() → stop(). stop() may come at any time, and twice.

    Between serve() and stop() a worker may change its island, its role or both, with the weights that it has:
    leave() → rejoin(config) → open(pages) → …
    """

    def __init__(
        self, config: WorkerConfig, transports: Callable[[str, TransportConfig], Transport] = create_transport
    ) -> None:
        """transports: makes the transport of that name."""
        self.config = config
        self._transports = transports
        self._set_threads()
        self._ranks = WorkerRanks(config)
        self.model_config, self._drafter_config = self._ranks.model, self._ranks.drafter
        self._layout = self._ranks.layout
        self.loaded_bytes = 0
        self.total_bytes = 0
        self._prepared = 0  # parts of what comes after the weights
        self.address = ""
        self._opened: Transport | None = None
        self._events = EventLoopThread("grpc")
        self._cache: PagedKVCache | None = None
        self._adapters: Adapters | None = None
        self._loop: StepLoop | None = None
        self._step_thread: StepThread | None = None
        self._grammars: Grammars | None = None
        self._recorder: Recorder | None = None
        self._eos_token_ids: tuple[int, ...] = ()  # after load()
        self._server: grpc.aio.Server | None = None
        self._socket: PrivateSocket | None = None

    def load(self) -> None:
        """Reads weights and end tokens; loaded_bytes and total_bytes can be read by another thread meanwhile.
        Raises GpuTooSmall."""
        with ThreadPoolExecutor(1, "tokenizer") as aside:
            model = self.model_config
            ends = aside.submit(end_tokens, Path(self.config.model_path), model.eos_token_ids, model.vocab_size)
            with on_the_gpu("the weights"):
                self._load_weights()
            self._eos_token_ids = ends.result()

    def _load_weights(self) -> None:
        config, folder = self.config, Path(self.config.model_path)
        before = 0, 0

        def progress(loaded: int, total: int) -> None:
            self.loaded_bytes, self.total_bytes = before[0] + loaded, before[1] + total

        where = {"device": config.device, "ranks": self._ranks.ranks, "adapters": config.adapters}
        target = load_decoder(folder, self.model_config, load_format=config.load_format, report=progress, **where)
        self._adapted = target.adapted
        before = self.loaded_bytes, self.total_bytes
        self._model: Model = target
        if self._drafter_config is not None:
            self._model = load_drafter(
                folder,
                config.speculation,
                target,
                self._drafter_config,
                load_format=config.load_format,
                report=progress,
            )

    @property
    def layout(self) -> KVLayout:
        """The layout of the worker's pages."""
        return self._layout

    @property
    def largest_layout(self) -> KVLayout:
        """The layout of the shard with the largest pages in the island. All workers of the island count their pages by
        it."""
        return self._ranks.largest_layout

    @property
    def gpu(self) -> str:
        """The UUID of its GPU, after load()."""
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def pages_that_fit(self, utilization: float) -> int:
        """Returns the number of pages that fit this part of the GPU's memory, or raises GpuTooSmall. Called between
        load() and open()."""
        config = self.config
        with on_the_gpu("the largest forward beside the weights"):
            budget = measure_budget(
                self._model,
                utilization,
                max_batch_tokens=config.max_batch_tokens,
                max_sequences=config.max_sequences,
                max_positions=config.max_batch_tokens // 2 * config.max_model_len,  # of sequences of two new tokens
            )
        layout = self.largest_layout
        return pages_in(config, layout, budget.room(layout.token_bytes * config.page_size))

    def open(self, num_pages: int, endpoint: Endpoint = LOOPBACK) -> bytes:
        """This PE's half of the membership handshake. num_pages is the same on every PE: pools are symmetric. endpoint:
        where this PE listens, with a transport that does.
        """
        config = self.config
        self._num_pages = num_pages
        member = TransportConfig(
            pe=config.pe,
            num_pes=config.num_pes,
            layout=self._layout,
            num_pages=pool_pages(config, self.largest_layout, num_pages),
            num_signals=mailbox_rows(config.num_signals, config.num_pes),
            island=config.island,
            epoch=config.epoch,
            epochs=config.epochs,
            endpoint=endpoint,
            device=config.device,
        )
        self._opened = self._ranks.transport(self._transports, member)
        self._meter = PushMeter(self._opened)
        return self._ranks.opened(self._opened.open())

    def join(self, handles: Sequence[bytes]) -> None:
        """Maps the peers; after it returned on every PE the island is formed."""
        self._transport.join(self._ranks.joined(handles))

    def serve(self, host: str = HOST, identity: Identity | None = None) -> str:
        """Starts stepping and answering; what gRPC calls the worker service. host: the address to listen on.

        identity: asks callers for mutual TLS. ValueError without it unless host is a loopback address.
        """
        if identity is None and host != HOST:
            raise ValueError(f"host is {host!r}; without an identity it must be {HOST}")
        self.address = self._events.run(self._start(host, identity), timeout=SERVE_SECONDS)
        return self.address

    @property
    def cache(self) -> PagedKVCache:
        """The cache, between serve() and leave() or stop(); for the step thread only."""
        assert self._cache is not None, "serve() comes first"
        return self._cache

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """The symmetric pages, one tensor per layer group; valid between join() and stop()."""
        return self._transport.pools

    def on_step_thread(self, command: Callable[[], T]) -> T:
        """Runs `command` where cache and transport may be touched, between two steps. TimeoutError when it hangs."""
        assert self._step_thread is not None, "serve() comes first"
        return self._step_thread.call(command).result(COMMAND_SECONDS)

    @property
    def peers(self) -> PeerChanges:
        """The changes of peers, between serve() and leave() or stop(), where the transport is elastic."""
        return PeerChanges(self._transport, self._loop, self.on_step_thread)

    @property
    def warm_parts(self) -> int:
        """Kernels, graphs and forwards that the start has made ready so far."""
        return self._prepared

    @property
    def prepared(self) -> int:
        """Grows while the worker gets on with what prepares it. From any thread."""
        return self.loaded_bytes + self._prepared

    @property
    def lost(self) -> str:
        """See Transport.lost. From any thread."""
        opened = self._opened
        return self._ranks.lost or ("" if opened is None else opened.lost)

    def ping(self) -> None:
        """Returns once the step thread takes commands; at once before serve(). TimeoutError when it hangs."""
        if self.address:
            self.on_step_thread(lambda: None)

    def release(self, prefix: str, writer_quiet: bool) -> None:
        """Aborts every request whose id begins with `prefix`, and refuses those that are yet to arrive.

        writer_quiet as in Abort, for what the worker decodes. When it returns, the worker writes no more for any such
        request; WriterNotQuiet if that takes too long.
        """
        loop = self._loop
        if loop is not None:
            for quiet in self.on_step_thread(lambda: loop.release(prefix, writer_quiet)):
                quiet.result(RELEASE_SECONDS)

    def share_cores(self, workers_on_host: int, decode_workers: int | None, epochs: tuple[int, ...]) -> None:
        """While it serves: its island has other workers now, with which it shares its host. See WorkerConfig."""
        shares = {"workers_on_host": workers_on_host, "decode_workers": decode_workers, "epochs": epochs}
        own, alone = threads_of(replace(self.config, **shares))
        self.on_step_thread(lambda: self._threads.share(own, alone))

    def leave(self) -> None:
        """Ends calls, the step thread and the transport, in this order; the weights stay. All PEs leave at once: the
        transport's end may be collective. Idempotent, and right at any time."""
        self.address = ""  # from now on ping() asks no step thread
        if self._server is not None:
            self._events.run(self._end_server(self._server), timeout=10)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._step_thread is not None:
            self._step_thread.stop()
            self._step_thread = None
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self._ranks.leave()
        if self._adapters is not None:
            self._adapters.close()
            self._adapters = None
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
        self._loop = None
        if self._cache is not None:
            self._cache.close()
        self._cache = None  # with what was captured over its pools, before their memory ends
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def rejoin(self, config: WorkerConfig) -> None:
        """Takes the process's place in its island's next epoch, after leave(). open() comes next."""
        gc.collect()  # what cycles of the epoch before still hold of its pools: the next ones need that memory
        self.config = config
        self._ranks.rejoin(config)
        self._set_threads()

    def stop(self) -> None:
        """Leaves the island for good."""
        try:
            self.leave()
        finally:
            self._events.stop()

    def _set_threads(self) -> None:
        own, alone = threads_of(self.config)
        if own is not None:
            torch.set_num_threads(own)
        crew = load_crew() if self.config.device == "cpu" else None
        self._threads = KernelThreads(crew, own, alone)

    @property
    def _transport(self) -> Transport:
        assert self._opened is not None, "open() comes first"
        return self._opened

    async def _start(self, host: str, identity: Identity | None) -> str:
        config = self.config = with_host_bytes(self.config, self.largest_layout, self._num_pages)
        vocab_size = self.model_config.vocab_size
        recorder = self._recorder = begin_record(config, self._num_pages, self._layout.fingerprint, vocab_size)
        engine = self.assemble(None if recorder is None else recorder.watch, recorder)
        if self._ranks.follower is not None:
            await asyncio.to_thread(self._ranks.wait_for_captures, SERVE_SECONDS)
            return FOLLOWS
        loop = self._loop = self._make_loop(engine)
        self._step_thread = StepThread(loop, "step")
        grammars = self._grammars = Grammars(Path(config.model_path), vocab_size, self._eos_token_ids)
        service = WorkerService(
            config,
            vocab_size,
            self._step_thread,
            loop,
            grammars,
            GpuMemory(self.gpu if config.device == "cuda" else None),
            self.model_config.max_encoder_tokens(config.max_batch_tokens, config.page_size),
        )
        self._step_thread.start()
        for captures in (FIRST_USE, captures_of(config)):
            self._prepared += 1
            await asyncio.wrap_future(self._step_thread.call(partial(loop.capture, captures)))
        checks = TokenRequired(config.token), WellFormedRequired()
        self._server = grpc.aio.server(options=server_options(config), interceptors=checks)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)
        if identity is None:
            self._socket = PrivateSocket(self._server)
            address = self._socket.target
        else:
            free = f"{bracketed(host)}:0"
            address = f"{bracketed(host)}:{self._server.add_secure_port(free, identity.server_credentials())}"
        await self._server.start()
        return address

    async def _end_server(self, server: grpc.aio.Server) -> None:
        """Ends the server on the event loop, where its last reference ends: gRPC then closes a socket that this loop
        reads."""
        self._server = None
        await server.stop(grace=None)

    def assemble(self, watch: Watch | None = None, recorder: Recorder | None = None) -> Engine:
        """Makes the engine over a new cache, between join() and leave(). A rank that follows begins to follow. watch:
        gives what the cache writes through. recorder: writes down what the engine does."""
        config = self.config
        counted = config, self.largest_layout, self._num_pages
        cache = self._cache = make_cache(
            self.model_config,
            self._layout,
            self._transport.pools,
            max_sequences=config.max_sequences * 2,
            max_length=config.max_model_len,
            writer=self._meter if watch is None else watch(self._meter),
            drafter=self._drafter_config,
            snapshots=snapshot_rule(*counted),
        )
        keep_on_host(cache, *counted, self._transport.pools, self._ranks.ranks, sharing=self._sharing)
        adapters = self._adapters = adapters_of(config, self.model_config, self._adapted)
        parts = cache, ModelRunner(self._model, cache, adapters), self._transport
        with_ranks = self._ranks.engine(*parts, recorder)
        if self._ranks.follower is not None:
            self._step_thread = StepThread(self._ranks.follower, "step")
            self._step_thread.start()
            self._step_thread.call(lambda: None)  # it begins to look for calls after the first command
        if with_ranks is not None:
            return with_ranks
        return Engine(*parts) if recorder is None else WatchedEngine(*parts, recorder)

    def _make_loop(self, engine: Engine) -> StepLoop:
        """Makes the loop on the event loop, through which tokens go."""
        config = self.config
        settings = LoopSettings.of(config, sharing=self._sharing, eos_token_ids=self._eos_token_ids)
        fanout = TokenFanout(asyncio.get_running_loop(), config.max_stream_messages_per_second)
        drafter = make_drafter(config.speculation, engine) if self._has_lasting_keys else None
        return StepLoop(engine, settings, Ends(self._meter, fanout, self._threads, drafter))

    @property
    def _sharing(self) -> bool:
        return self.config.prefix_sharing and self._has_lasting_keys

    @property
    def _has_lasting_keys(self) -> bool:
        # With RoPE by length K depends on the length of its prompt, or of its step: K of one prompt is not K of another
        # with the same prefix, and that of a verify step not K of single steps.
        model = self.model_config
        by_length = model.rope.by_length and self.config.max_model_len > (model.rope_switch or 0)
        return not by_length
