"""The calls by which a worker uses its device and reaches its peers: actions, questions and polls."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from tandem.cache.digest import digest_kv
from tandem.cache.operations.holdings import PageCounts, Room, SequenceState
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.pages.prefix_log import PrefixChanges
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.position_map import PositionMap
from tandem.transfer.completion import pack_payload
from tandem.transfer.recall import Recall, RecallDesk, RecallInbox
from tandem.transfer.transport import Fence, Transport
from tandem.workers.engine.actions import action, actions_of
from tandem.workers.engine.adapter_actions import AdapterActions
from tandem.workers.engine.admission import Admission
from tandem.workers.engine.capabilities import Capabilities
from tandem.workers.engine.captures import Captures
from tandem.workers.engine.launches import Launches
from tandem.workers.engine.peers import Peers
from tandem.workers.engine.rank_progress import RankProgress
from tandem.workers.engine.step import Launched, Step
from tandem.workers.engine.store_calls import StoreCalls
from tandem.workers.ranks.ranks import ALONE, Ranks, sum_words
from tandem.workers.requests.post import Post
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.runner.stream_mark import all_past
from tandem.workers.sampling.pending_samples import LateSamples, PendingSamples
from tandem.workers.sampling.pooling import Pooled, Reading
from tandem.workers.sampling.prompt_logits import PromptLogits
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SlidingWindow
from tandem.workers.scheduling.batch import DecodeStep


class Engine(StoreCalls, AdapterActions):
    """Owns the cache, the runner and this PE's end of the transport. Owned by the step thread (decision 0127).

    - Actions change what the engine holds. The same actions, in the same order, give the same page ids.
    - Questions change nothing. Their answers depend only on earlier actions.
    - Polls look at the device and at peers. Their answers lead to actions.

    Loops, handoff and service make decisions, and use a worker's device only through these calls. They choose the ids
    of sequences.
    """

    def __init__(self, cache: PagedKVCache, runner: ModelRunner, transport: Transport, shared: Ranks = ALONE) -> None:
        """shared: the collectives of the worker's ranks."""
        self._cache = cache
        self._shared = shared
        self._runner, self._adapters = runner, runner.adapters
        self._transport = transport
        self._recalls, self._recalled = RecallDesk(transport), RecallInbox(transport)
        self._launches = Launches(runner)
        self._late: LateSamples | None = None  # of the last step, until its masks come
        self._sizes = runner.graph_sizes
        self.layout = cache.layout
        self.max_sequence_length = cache.max_sequence_length
        self.peers = Peers.of(transport)

    # Actions: before the first request

    @action
    def capture(self, wanted: Captures) -> None:
        """Prepares the device. Takes seconds on a GPU."""
        runner = self._runner
        if wanted.warm_up:
            runner.warm_up()
            self._warm_up_adapters()
        if wanted.steps:
            runner.capture_steps(wanted.steps)
        if wanted.prompts:
            runner.capture_prompts(wanted.prompts)
        if wanted.verified:
            runner.capture_verification(wanted.verified, None, wanted.max_ngram)
            runner.capture_drafts(max(wanted.verified // 2, 1), wanted.draft_tokens)
        if wanted.joint:
            runner.capture_steps_with_prompts()
        self._sizes = runner.graph_sizes

    # Actions: sequences

    @action
    def admit(self, sequence: int, asked: Admission) -> int:
        """Adds a sequence and reserves room for it. Returns how many tokens of its prompt are cached.

        Raises OutOfPages, OutOfSequences, AdapterNotHeld, or InvalidArgument for a window. On an error the sequence is
        not added.
        """
        cache = self._cache
        prompt = asked.prompt
        cache.add_sequence(sequence, prompt.encoder.length)
        try:
            self._take_adapter(sequence, prompt.adapter)
            most = asked.most_bytes
            matched = cache.match_prefix(sequence, prompt.token_ids, prompt.salt, most) if asked.shares else 0
            if asked.slides and prompt.sliding is not None:
                cache.enable_sliding_window(sequence, prompt.sliding.window, prompt.sliding.sinks)
            cache.reserve(sequence, asked.num_tokens, asked.longest_append)
        except BaseException:
            self._release_adapter(sequence)
            cache.remove_sequence(sequence)
            raise
        return matched

    @action
    def narrow(self, sequence: int, num_tokens: int, longest_append: int, sliding: SlidingWindow | None = None) -> None:
        """Replaces the reserved room of a sequence whose prompt is computed. With `sliding` the sequence first begins
        to slide. Raises OutOfPages, and then the room stays as it was."""
        if sliding is not None:
            self._cache.enable_sliding_window(sequence, sliding.window, sliding.sinks)
        self._cache.reserve(sequence, num_tokens, longest_append)

    @action
    def expect(self, sequence: int, num_tokens: int) -> PositionMap:
        """Grows the sequence by positions that a peer will write, once peers_mark() is past. Returns where."""
        return self._cache.prepare_receive(sequence, num_tokens, rotated=True)

    @action
    def received(self, sequence: int) -> None:
        """Notes that no peer can write into the sequence any more. Idempotent."""
        self._cache.finish_receive(sequence)

    @action
    def publish(self, sequence: int, token_ids: Int64Array, salt: bytes) -> None:
        """See PagedKVCache.publish_prefix."""
        self._cache.publish_prefix(sequence, token_ids, salt)

    @action
    def take_back(self, surplus: Mapping[int, int], *, is_last: bool) -> None:
        """Takes back the last surplus[i] positions of sequence i, whose drafts were rejected. is_last: no step was
        launched after theirs. Otherwise that step moves back by as many positions."""
        self._cache.pop_each(tuple(surplus), list(surplus.values()))
        if self._runner.drafts is not None and not is_last:
            self._runner.drafts.moved_back(surplus)

    @action
    def free(self, sequence: int) -> tuple[Int32Array, ...]:
        """Removes a sequence. Its pages are free at once, or after received() while a peer may write. Idempotent.
        Returns the pages that it held, of each group; a record compares them."""
        self._release_adapter(sequence)
        return self._cache.remove_sequence(sequence)

    # Actions: parking

    @action
    def park(self, sequence: int) -> None:
        """See PagedKVCache.park. The sequence gives its pages up with free(), once mark(copies=True) is past."""
        self._cache.park(sequence)
        self._park_adapter(sequence)

    @action
    def resume(self, sequence: int, num_tokens: int, longest_append: int) -> tuple[Int32Array, ...]:
        """See PagedKVCache.resume: mark(copies=True) tells when its pages are there. Raises OutOfPages or
        OutOfSequences, and then the sequence stays parked."""
        with self._adapter_of_parked(sequence):
            return self._cache.resume(sequence, num_tokens, longest_append)

    @action
    def forget(self, sequence: int) -> None:
        """Forgets a parked sequence that does not come back. Idempotent."""
        self._cache.drop_parked(sequence)
        self._forget_adapter(sequence)

    # Actions: forwards

    @action
    def launch(self, step: Step) -> Launched:
        """Launches one forward; eager kernels compute it at once. A step with guided rows does not sample before
        mask(), and no other step may follow before that. Raises DraftsFailed."""
        if step.rows is None:
            return self._launches.prompts(step)
        assert self._late is None, "mask() comes first"
        launched = self._launches.rows(step.rows, step)
        self._late = cast(LateSamples | None, launched.rows) if step.rows.sampling.is_guided else None
        return launched

    @action
    def read_out(self, chunks: PromptChunks, readings: Sequence[Reading | None]) -> Pooled:
        """Computes chunks of prompts that nobody decodes, for what readings[i] wants of chunk i. Nothing is pushed or
        sampled, and no peer has reserved anything."""
        return self._runner.pooled_prompts(chunks, readings)

    @action
    def prepare(self, rows: DecodeStep) -> None:
        """Prepares rows whose KV is still arriving, and which are launched next, before their tokens are known. The
        engine may drop this."""
        self._runner.foresee(rows.sequence_ids, rows.sampling, rows.positions)

    @action
    def draft(
        self,
        sequences: Sequence[int],
        tokens: Int64Array,
        counts: Int64Array,
        sampling: SampleBatch,
        positions: Int64Array,
    ) -> list[Int64Array]:
        """See Drafts.draft, where capabilities.drafts."""
        assert self._runner.drafts is not None, "capabilities are asked first"
        return self._runner.drafts.draft(sequences, tokens, counts, sampling, positions)

    @action
    def sample(
        self,
        logits: PromptLogits,
        sampling: SampleBatch,
        positions: Int64Array,
        pushes: Sequence[int] = (),
        posts: Sequence[Post] = (),
        masks: Int32Array | None = None,
    ) -> PendingSamples:
        """Samples a token for each row of the logits, see ModelRunner.sample_async. Then a head computes its part of
        the prompts. Their KV is whole only after that. Then the sequences `pushes` are pushed, see
        PagedKVCache.send_cached, and the tokens posted, in order. Each signal follows all earlier writes to its PE.
        Raises PeerGone."""
        tokens, pending = self._runner.sample_async(logits.on_device, sampling, positions, masks)
        left, logits.left = logits.left, None
        if left is not None:
            left(tokens)
        for sequence in pushes:
            self._cache.send_cached(sequence)
        for post in posts:
            payload = tokens[post.row]
            if post.digest is not None:
                payload = pack_payload(int(payload), self.digest(*post.digest))
            self._transport.post(post.pe, post.mailbox_row, post.signal, payload)
        return pending

    @action
    def mask(self, masks: Int32Array) -> None:
        """Takes the masks of the guided rows of the step that was launched last, see masks_of(). The step samples
        now."""
        assert self._late is not None, "the last step waits for no masks"
        late, self._late = self._late, None
        late.launch(masks)

    @action
    def drain(self) -> None:
        """See ModelRunner.drain. What waits for its masks is never sampled."""
        self._late = None
        self._runner.drain()

    # Actions: transfers

    @action
    def mark_send(self, sequence: int, begin: int, position_map: PositionMap, target_pe: int) -> None:
        """See PagedKVCache.mark_send."""
        self._cache.mark_send(sequence, begin, position_map, target_pe)

    @action
    def push(self, sequence: int) -> None:
        """See PagedKVCache.send_cached."""
        self._cache.send_cached(sequence)

    @action
    def recall(self, recall: Recall) -> None:
        """Asks a writer to stop; see RecallDesk.ask."""
        self._recalls.ask(recall)

    @action
    def withdraw(self, recall: Recall) -> None:
        """Withdraws a recall that is not needed any more."""
        self._recalls.withdraw(recall)

    @action
    def answer(self, recall: Recall) -> None:
        """See RecallInbox.answer."""
        self._recalled.answer(recall)

    # Peers that change; see Transport.cut

    def part(self, pe: int) -> None:
        """Forgets a peer that was cut. Nothing here waits for it or writes to it any more."""
        self._recalls.forget(pe)
        self._recalled.forget(pe)
        self.peers = self.peers.with_epoch(pe, 0)

    def welcome(self, pe: int, epoch: int) -> None:
        """Admits the process that replaces a lost peer."""
        self._transport.admit(pe)
        self.peers = self.peers.with_epoch(pe, epoch)

    # Questions

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the engine. They change when something is captured."""
        runner, following = self._runner, self._runner.next_drafts
        most, looks_up = (0, False) if following is None else (following.num_sequences, following.looks_up)
        return Capabilities(runner.overlaps, runner.drafts is not None, most, looks_up, self._sizes)

    def takes(
        self, num_sequences: int, num_tokens: int, rows: Sequence[int] = (), adapters: Sequence[bytes] = ()
    ) -> bool:
        """Returns whether one launch computes these rows and num_tokens prompt tokens. Without rows: whether a graph
        computes the prompts, which cannot push KV. adapters: of the prompts."""
        if len(rows):
            graphs = self._runner.overlaps and any(adapters)
            return not graphs and self._runner.takes_prompts(rows, num_sequences, num_tokens)
        return self._runner.has_prompt_graph(num_sequences, num_tokens)

    def room(self, num_tokens: int, longest_append: int, encoder_len: int = 0) -> Room:
        """Returns the room for one more sequence; see Admission."""
        return self._cache.room(num_tokens, longest_append, encoder_len)

    def sequence(self, sequence: int) -> SequenceState:
        """Returns the present state of the sequence."""
        return self._cache.sequence(sequence)

    def can_park(self, sequence: int) -> bool:
        """See PagedKVCache.can_park."""
        return self._cache.can_park(sequence)

    def held(self, sequence: int) -> tuple[int, ...]:
        """Returns how many pages of each layer group the sequence has. Other sequences may share some."""
        return self._cache.num_held(sequence)

    def digest(self, sequence: int, begin: int, end: int, sliding: tuple[int, int] | None = None) -> int:
        """See digest_kv. Waits for the device. All ranks of a worker call it, and get the same."""
        add_up = partial(sum_words, self._shared, device=self._transport.pools[0].device)
        return digest_kv(self._cache, sequence, begin, end, sliding, add_up)

    @property
    def pages(self) -> PageCounts:
        return self._cache.pages

    @property
    def lets_go(self) -> bool:
        """Returns whether the forward in flight may use free pages: of windows, sliding sequences or snapshots."""
        return self.layout.drops_past or self.layout.recurs or self._cache.any_slides()

    @property
    def prefix_position(self) -> int:
        """See PagedKVCache.prefix_position. Any thread may read it."""
        return self._cache.prefix_position

    def prefix_changes(self, since: int | None = None, *, stored: bool = False) -> PrefixChanges:
        """See PagedKVCache.prefix_changes."""
        return self._cache.prefix_changes(since, stored=stored)

    # Polls

    def mark(self, *, copies: bool = False) -> Callable[[], bool] | None:
        """See ModelRunner.mark. copies: also whether copies between the pools and the store are done."""
        return all_past(self._runner.mark(), self._cache.copies_past() if copies else None)

    def peers_mark(self) -> Callable[[], bool] | None:
        """Returns a call that tells whether peers may write into the pages that are free or reserved now. None if they
        may."""
        return self.mark(copies=True) if self.lets_go else self._cache.copies_past()

    def fence(self, pe: int) -> Fence:
        """See Transport.fence."""
        return self._transport.fence(pe)

    def mailbox(self) -> Int64Array:
        """See Transport.mailbox."""
        return self._transport.mailbox()

    def recalls_answered(self, mailbox: Int64Array) -> list[Recall]:
        """See RecallDesk.exchange."""
        return self._recalls.exchange(mailbox)

    def recalls_asked(self) -> list[Recall]:
        """See RecallInbox.unanswered."""
        return self._recalled.unanswered()

    @property
    def lost(self) -> str:
        """See Transport.lost. From any thread."""
        return self._transport.lost

    def loss(self, pe: int) -> str:
        """See Transport.loss. From any thread."""
        return self._transport.loss(pe)

    @property
    def ranks(self) -> list[RankProgress]:
        """The progress of the worker's processes, the leader first; none if it has one process. Any thread may ask."""
        return []

    def wait_for_ranks(self) -> None:
        """Returns once all ranks of this worker have done the actions before. Raises RankLost."""

    @property
    def silent_seconds(self) -> float:
        """See Transport.silent_seconds."""
        return self._transport.silent_seconds


ACTIONS = actions_of(Engine)
"""The names of all actions."""
