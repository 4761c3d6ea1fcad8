"""Protections of one-sided writes: where they go, in which order, and for which use of a row."""

from tests.mutants.mutant import Mutant

WIRE_MAP = "tests/transfer/test_wire_map.py"

TRANSFER = (
    Mutant(
        name="signal-before-payload",
        file="transfer/shared_memory.py",
        find="        target[1] = int(payload)\n        self._keep_order()\n        target[0] = signal\n",
        replace="        target[0] = signal\n        self._keep_order()\n        target[1] = int(payload)\n",
        reason="A payload is written before its signal, or a request begins with the first token of another one.",
        tests=("tests/transfer/test_order_of_words.py::test_a_reader_never_sees_a_signal_before_its_payload",),
    ),
    Mutant(
        name="payload-read-before-signal",
        file="transfer/shared_memory.py",
        find="snapshot[:, 0] = shared[:, 0]\n        self._keep_order()\n        snapshot[:, 1] = shared[:, 1]\n",
        replace="snapshot[:, 1] = shared[:, 1]\n        self._keep_order()\n        snapshot[:, 0] = shared[:, 0]\n",
        reason="A signal is read before its payload, or a request begins with the first token of another one.",
        tests=(
            "tests/transfer/test_order_of_words.py::"
            "test_a_post_while_the_mailbox_is_read_shows_no_signal_without_its_payload",
        ),
    ),
    Mutant(
        name="signal-of-an-earlier-use",
        file="transfer/completion.py",
        find="return np.where(words >> TOKEN_BITS == generations, words & MAX_TOKENS, 0)",
        replace="return words & MAX_TOKENS",
        reason="A signal counts for its generation of the row only, or a request is decoded before its KV is there.",
        tests=("tests/transfer/test_completion.py::test_landed_counts_only_signals_of_the_asked_generation",),
    ),
    Mutant(
        name="row-released-under-its-next-holder",
        file="transfer/completion.py",
        find="if self._held[signal.row] and self._generations[signal.row] == signal.generation:",
        replace="if self._held[signal.row]:",
        reason="A late release spares the row's next holder, or two requests wait for signals in one row.",
        tests=("tests/transfer/test_completion.py::test_release_is_idempotent_and_spares_the_next_holder",),
    ),
    Mutant(
        name="answer-to-an-earlier-recall",
        file="transfer/recall.py",
        find=" and int(mailbox[self._answers + pe, 0]) == _word(queue[0]):",
        replace=":",
        reason="A recall ends with its own answer, or pages return while their writer still writes.",
        tests=("tests/workers/test_races.py::test_a_recall_is_answered_only_when_the_writer_is_quiet",),
    ),
    Mutant(
        name="map-beyond-the-pool",
        file="transfer/wire_map.py",
        find="    if last >= num_slots:\n",
        replace="    if False:\n",
        reason="A map's slots lie within the pool, or a damaged map has a sender write into other memory.",
        tests=(f"{WIRE_MAP}::test_bad_slots_are_refused",),
    ),
    Mutant(
        name="map-with-one-slot-twice",
        file="transfer/wire_map.py",
        find="    if overlaps.size:\n",
        replace="    if False:\n",
        reason="A map gives each position a slot of its own, or one token's KV replaces another's.",
        tests=(f"{WIRE_MAP}::test_overlap_is_found_among_many_runs",),
    ),
    Mutant(
        name="map-of-too-few-positions",
        file="transfer/wire_map.py",
        find="    if runs.num_tokens != expected:\n",
        replace="    if False:\n",
        reason="A map covers the whole prompt, or a request is decoded with positions that nobody has written.",
        tests=(f"{WIRE_MAP}::test_a_bad_field_is_named",),
    ),
    Mutant(
        name="map-of-any-length",
        file="transfer/wire_map.py",
        find="runs = decode_runs(data, max_tokens=expected)",
        replace="runs = decode_runs(data, max_tokens=1 << 40)",
        reason="A few bytes of a map stand for no more positions than are expected, or they fill a sender's memory.",
        tests=(f"{WIRE_MAP}::test_a_bad_field_is_named",),
    ),
    Mutant(
        name="map-that-skips-what-is-read",
        file="transfer/wire_map.py",
        find='            _check_skips(f"runs[{group}]", decoded, max(needed - first, 0))\n',
        replace="            pass\n",
        reason="A map skips only what no query reads, or a request is decoded with positions that nobody has written.",
        tests=(f"{WIRE_MAP}::test_with_a_window_exactly_what_is_behind_it_is_skipped",),
    ),
    Mutant(
        name="state-in-the-order-of-one-side",
        file="transfer/regions.py",
        find="[found[begin] for begin in sorted(found)] if has_heads",
        replace="list(found.values())[:: 1 if own.shard.size > peer.shard.size else -1] if has_heads",
        reason="Both sides cut a state in one order, or what travels in one piece is sorted in at the wrong heads.",
        tests=("tests/contracts/test_state_shards.py::test_each_rank_gets_the_states_of_its_heads",),
    ),
    Mutant(
        name="state-from-a-rank-without-its-heads",
        file="transfer/regions.py",
        find="for begin in sorted(found)] if has_heads else []",
        replace="for begin in sorted(found)]",
        reason="A rank is written by those that have its heads, or a mailbox has too few lanes for its writers.",
        tests=("tests/contracts/test_state_shards.py::test_a_rank_is_written_by_those_with_its_heads",),
    ),
    Mutant(
        name="peer-of-another-epoch",
        file="transfer/membership.py",
        find='        "epoch": config.epoch,\n',
        replace="",
        reason="PEs of unlike epochs do not join, or a process of a lost island writes into the pages of the next.",
        tests=("tests/contracts/test_joining.py::test_a_handle_of_another_island_or_shape_is_refused",),
    ),
    Mutant(
        name="tcp-signal-before-its-frames",
        file="transfer/tcp/receiving.py",
        find="peer.frame_landed.wait_for(lambda: peer.failure or all(map(int.__ge__, peer.landed, before)))",
        replace="pass",
        reason="A signal waits for the frames of all connections, or a request is decoded before its KV is there.",
        tests=("tests/transfer/test_tcp.py::test_a_signal_waits_for_the_slowest_of_all_connections",),
    ),
)
