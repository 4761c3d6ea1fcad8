"""Protections of what a worker computes and is asked."""

from tests.mutants.mutant import Mutant

BAD_CALLS = "tests/workers/service/test_bad_calls.py"

WORKERS = (
    Mutant(
        name="call-of-another-epoch",
        file="workers/service/services.py",
        find="            if epoch != self._config.epoch:\n",
        replace="            if False:\n",
        reason="A call of another epoch is refused, or a late Abort ends a request of the island that came after.",
        tests=("tests/workers/service/test_service.py::test_calls_of_another_epoch_are_refused",),
    ),
    Mutant(
        name="send-computed-twice",
        file="workers/prefill/prefills.py",
        find="        if known is not None:\n            return known\n",
        replace="",
        reason="A doubled RemoteSend is computed once, or its second run fails a request that goes on well.",
        tests=("tests/workers/service/test_service.py::test_a_doubled_remote_send_is_computed_once",),
    ),
    Mutant(
        name="token-outside-the-vocabulary",
        file="workers/service/call_checks.py",
        find="        if largest >= self.vocab_size:\n",
        replace="        if False:\n",
        reason="A token outside the vocabulary is refused, or one bad call fails a forward of many requests.",
        tests=(f"{BAD_CALLS}::test_a_token_that_is_none_fails_nobody_else",),
    ),
    Mutant(
        name="too-long-for-its-pages",
        file="workers/handoff/reservations.py",
        find="if max_tokens > request.max_tokens:",
        replace="if False:",
        reason="A request gets no more tokens than it has pages for, or it runs out of pages while it is decoded.",
        tests=("tests/workers/service/test_service.py::test_more_tokens_than_were_reserved_are_refused",),
    ),
    Mutant(
        name="one-client-takes-all-places",
        file="workers/service/turns.py",
        find="            if self._running[client]:\n                continue\n",
        replace="",
        reason="A client has one of the places at a time, or one with long messages keeps all others waiting.",
        tests=("tests/workers/service/test_turns.py::test_clients_take_turns_and_have_one_place_each",),
    ),
    Mutant(
        name="rows-wait-for-a-long-prompt",
        file="workers/scheduling/scheduler.py",
        find="budget = max(min(budget - rows, chunk), LEAST_PROMPT_TOKENS)",
        replace="budget = max(budget - rows, LEAST_PROMPT_TOKENS)",
        reason="Chunks beside rows are short, or all answers pause while somebody's long prompt is computed.",
        tests=("tests/workers/scheduling/test_scheduler.py::test_chunks_are_bounded_beside_rows_only",),
    ),
    Mutant(
        name="short-prompts-overtake",
        file="workers/scheduling/scheduler.py",
        find="return self._asked_in_vain is not None and self._asked_in_vain in self._waiting",
        replace="return False",
        reason="What becomes free is for the prompt that waits for it, or a long prompt is overtaken for ever.",
        tests=("tests/workers/test_both_sides.py::test_a_prompt_of_a_peer_that_waits_for_room_is_not_overtaken",),
    ),
    Mutant(
        name="no-end-at-stop-tokens",
        file="workers/scheduling/decode_rows.py",
        find="reasons = np.where(stops.any(axis=1), int(FinishReason.STOP), self.limits)",
        replace="reasons = self.limits",
        reason="A sequence ends at its stop token, or the user gets what a model writes behind its end.",
        tests=(
            "tests/workers/decode/test_overlap_scheduling.py::"
            "test_a_stop_keeps_the_pages_until_the_step_in_flight_is_done",
        ),
    ),
    Mutant(
        name="not-finite-looks-like-an-end",
        file="workers/scheduling/decode_rows.py",
        find="return np.where(sampled == NOT_FINITE, int(FinishReason.ERROR), reasons)",
        replace="return reasons",
        reason="A row whose logits are not finite ends with an error, or a broken answer looks like a whole one.",
        tests=(
            "tests/workers/scheduling/test_scheduler.py::"
            "test_a_row_that_is_not_finite_ends_with_an_error_and_no_other_does",
        ),
    ),
    Mutant(
        name="one-token-too-many",
        file="workers/sampling/finish.py",
        find="FinishReason.LENGTH if num_output >= self.max_tokens else",
        replace="FinishReason.LENGTH if num_output > self.max_tokens else",
        reason="A sequence ends with max_tokens, or it grows over the pages that were reserved for it.",
        tests=("tests/workers/decode/test_verify_steps.py::test_right_drafts_give_their_tokens_in_one_step",),
    ),
    Mutant(
        name="drafts-held-unseen",
        file="workers/speculation/verification.py",
        find="        wrong[drafted] = samples.token_ids[drafted] != np.concatenate(self.drafts)\n",
        replace="        wrong[drafted] = False\n",
        reason="Drafts hold while the target agrees, or speculation changes what a model says.",
        tests=("tests/workers/decode/test_verify_steps.py::test_drafts_share_what_the_rows_leave_of_a_step",),
    ),
    Mutant(
        name="same-number-at-each-position",
        file="workers/sampling/random.py",
        find="_mix(_mix(seeds + GOLDEN_GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA)",
        replace="_mix(_mix(seeds + GOLDEN_GAMMA) + (positions.astype(np.uint64) * np.uint64(0)) * GOLDEN_GAMMA)",
        reason="A draw depends on seed and position alone, or samples repeat and a replay gives other tokens.",
        tests=("tests/workers/sampling/test_sampling.py::test_uniform_numbers_are_even_and_unlike_for_neighbours",),
    ),
    Mutant(
        name="decoded-before-its-kv-is-here",
        file="workers/decode/decodes.py",
        find="for request in landed(mailbox, self._awaiting):",
        replace="for request in list(self._awaiting):",
        reason="A request is decoded, and its prefix shared, once all its KV is here, or its tokens come from nothing.",
        tests=("tests/workers/test_races.py::test_a_prefix_is_not_shared_before_it_has_landed",),
    ),
    Mutant(
        name="thinking-without-an-end",
        file="workers/sampling/thinking.py",
        find="        return self._end_ids[self._num_written]\n",
        replace="        return None\n",
        reason="Thinking ends while max_tokens leaves room for the answer, or a client that asked for JSON gets none.",
        tests=(
            "tests/workers/sampling/test_thinking.py::"
            "test_thinking_ends_behind_so_many_tokens_wherever_a_request_is_placed_again",
        ),
    ),
    Mutant(
        name="mask-beyond-the-vocabulary",
        file="workers/sampling/guided.py",
        find="        mask[-1] &= self._last\n",
        replace="",
        reason="A grammar allows no id that the model lacks, or a row with no other id looks as if it had one.",
        tests=("tests/workers/sampling/test_guided.py::test_no_id_is_allowed_that_model_or_tokenizer_lacks",),
    ),
    Mutant(
        name="spaces-for-ever",
        file="workers/sampling/guided.py",
        find='return {} if says else {"whitespace_pattern": WHITESPACE}',
        replace="return {}",
        reason="Spaces between tokens of JSON have a bound, or a model that likes them writes nothing else.",
        tests=("tests/workers/sampling/test_guided.py::test_spaces_in_json_end",),
    ),
    Mutant(
        name="prompts-in-a-record",
        file="workers/replay/recorder.py",
        find="secrets=pseudonyms is None)",
        replace="secrets=True)",
        reason="A record has prompts only where an operator asks for them, or a file tells what clients wrote.",
        tests=("tests/e2e/test_record.py::test_a_record_without_prompts_has_none_and_replays_its_pages",),
    ),
    Mutant(
        name="record-that-others-read",
        file="workers/replay/record_file.py",
        find="os.O_CLOEXEC, 0o600)",
        replace="os.O_CLOEXEC, 0o644)",
        reason="Only its owner reads a record, or every user of the host does.",
        tests=("tests/workers/replay/test_record_file.py::test_only_its_owner_may_read_it_and_it_has_no_secret",),
    ),
    Mutant(
        name="experts-of-other-ranks",
        file="workers/models/experts.py",
        find="(y if self._alone else y.where((experts < held)[:, :, None], 0)).sum(1)",
        replace="y.sum(1)",
        reason="A rank adds nothing for experts that others have, or sums have whatever stood in memory.",
        tests=("tests/workers/models/test_experts.py::test_ranks_add_up_what_their_own_experts_give",),
    ),
    Mutant(
        name="device-that-gave-up",
        file="workers/following/leader.py",
        find="""            if why := self.memory.why_failed(0):
                self.give_up(why)
                raise RankLost(why) from error
""",
        replace="",
        reason="A failed sum ends the worker, or its request alone is told of an error, and the worker serves on.",
        tests=("tests/workers/following/test_leader.py::test_a_device_that_gave_up_ends_the_worker",),
    ),
    Mutant(
        name="kernel-told-to-stop",
        file="workers/ranks/ranks.cuh",
        find="        if (load_word(ranks.abort)) give_up(ranks, ABORTED);\n",
        replace="",
        reason="A kernel that waits for a rank ends when it is told to, or the others find out much later.",
        tests=("tests/workers/ranks/test_exchange.py::test_a_rank_that_waits_is_told_to_stop",),
    ),
    Mutant(
        name="buffers-of-streamed-sums",
        file="workers/ranks/streams.cuh",
        find="constexpr int BUFFERS = 2 * AHEAD + 1;",
        replace="constexpr int BUFFERS = 2 * AHEAD;",
        reason="A rank that is ahead writes over a chunk that a slower one has not read.",
        tests=("tests/workers/ranks/test_exchange.py::test_streamed_sums_have_the_same_bits",),
    ),
    Mutant(
        name="calls-behind-a-followers-thread",
        file="workers/following/worker_ranks.py",
        find="            self.follower.finish(FINISH_SECONDS)\n",
        replace="            pass\n",
        reason="A follower that leaves first makes the last calls, or its leader's device waits for it in vain.",
        tests=("tests/workers/following/test_worker_ranks.py",),
    ),
)
