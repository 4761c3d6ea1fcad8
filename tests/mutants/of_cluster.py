"""Protections at the gateway: room given back, turns, bounds, and each token once."""

from tests.mutants.mutant import Mutant

ROUTER = "tests/cluster/routing/test_router.py"
RESUME = "tests/cluster/requests/test_resume.py"
CLAIMED = "tests/cluster/requests/test_claimed_ids.py"
ADMISSION = "tests/cluster/routing/test_admission.py"

CLUSTER = (
    Mutant(
        name="receiver-freed-before-its-sender",
        file="cluster/routing/router.py",
        find=(
            "            quiet = placement.is_local or await placement.prefill.abort(request_id)\n"
            "            await placement.decode.abort(request_id, writer_quiet=quiet)\n"
        ),
        replace=(
            "            await placement.decode.abort(request_id, writer_quiet=True)\n"
            "            quiet = placement.is_local or await placement.prefill.abort(request_id)\n"
        ),
        reason="The sender ends before its receiver frees pages, or it writes into those of the next request.",
        tests=(f"{ROUTER}::test_the_receiver_hears_of_an_end_after_the_sender_has_answered",),
    ),
    Mutant(
        name="silence-taken-for-quiet",
        file="cluster/routing/router.py",
        find="await placement.decode.abort(request_id, writer_quiet=quiet)",
        replace="await placement.decode.abort(request_id, writer_quiet=True)",
        reason="Pages are freed on the sender's word, not on its silence, or a slow sender writes into others' pages.",
        tests=(f"{ROUTER}::test_a_receiver_is_not_told_that_a_sender_is_quiet_which_did_not_say_so",),
    ),
    Mutant(
        name="late-reservation-kept",
        file="cluster/routing/router.py",
        find="        await asyncio.wait([call])\n        await decode.abort(request_id, writer_quiet=True)\n",
        replace="        await asyncio.wait([call])\n",
        reason="A reservation that comes when its client has left is given back, or its pages wait for their lease.",
        tests=(f"{ROUTER}::test_a_reservation_that_comes_when_its_client_has_left_is_given_back_behind_it",),
    ),
    Mutant(
        name="late-reservation-given-back-too-soon",
        file="cluster/routing/router.py",
        find="        await asyncio.wait([call])\n",
        replace="",
        reason="An Abort follows the reservation that it ends, or it finds nothing and the pages wait for their lease.",
        tests=(f"{ROUTER}::test_a_reservation_that_comes_when_its_client_has_left_is_given_back_behind_it",),
    ),
    Mutant(
        name="lost-answer-keeps-pages",
        file="cluster/routing/router.py",
        find="            self.in_background(decode.abort(request.request_id, writer_quiet=True))",
        replace="            pass",
        reason="A worker that may have reserved is told that nobody comes, or its pages wait for their lease.",
        tests=(f"{ROUTER}::test_a_reservation_whose_answer_was_lost_is_given_back_and_another_worker_asked",),
    ),
    Mutant(
        name="load-never-taken-back",
        file="cluster/routing/router.py",
        find="self._count(placement.decode, placement.prefill, -placement.total_tokens, -placement.prompt_tokens)",
        replace="pass",
        reason="What a request counted is taken back at its end, or routing avoids workers that are idle.",
        tests=(f"{ROUTER}::test_a_request_that_is_complete_ends_no_workers_call",),
    ),
    Mutant(
        name="busy-client-overtakes",
        file="cluster/routing/admission.py",
        find="turn.number = table.highest(Column.TURNS_DONE) + 1 + table.total(turn.client)",
        replace="turn.number = table.highest(Column.TURNS_DONE) + 1",
        reason="A client has one turn a round, or one that sends a thousand requests keeps all others waiting.",
        tests=(f"{ADMISSION}::test_one_client_with_much_does_not_hold_up_another",),
    ),
    Mutant(
        name="queue-without-a-bound",
        file="cluster/routing/admission.py",
        find="        if requests >= self._max_requests:\n",
        replace="        if False:\n",
        reason="The queue is bounded, or a burst fills the memory and every client waits until its deadline.",
        tests=(f"{ADMISSION}::test_bounds_name_their_key_and_say_when_to_come_again",),
    ),
    Mutant(
        name="replay-refused-by-a-full-queue",
        file="cluster/routing/admission.py",
        find="            if not admitted:\n",
        replace="            if True:\n",
        reason="A full queue takes back what it had admitted, or a loss ends streams that have begun.",
        tests=(f"{ADMISSION}::test_a_full_queue_takes_what_was_admitted_before",),
    ),
    Mutant(
        name="cancelled-turn-lost",
        file="cluster/routing/admission.py",
        find="            if self._head is turn:\n                self._pass_on()\n",
        replace="",
        reason="A turn passes on when its request goes, or one client that leaves stops the whole queue.",
        tests=(f"{ADMISSION}::test_a_turn_given_to_one_that_was_cancelled_at_that_moment_goes_on",),
    ),
    Mutant(
        name="replay-forgets-what-was-sent",
        file="cluster/requests/generation.py",
        find="return np.concatenate((self._request.token_ids, np.array(self._sent, np.int64)))",
        replace="return self._request.token_ids",
        reason="After a loss the tokens sent are prompt, or the client gets the beginning of its answer twice.",
        tests=(f"{RESUME}::test_what_was_sent_is_prompt_after_a_loss_and_no_token_comes_twice",),
    ),
    Mutant(
        name="resume-forgets-what-was-received",
        file="cluster/requests/generation.py",
        find="        self._sent += token_ids\n\n    def _calls(",
        replace="\n    def _calls(",
        reason="A client that resumes gets the rest only, or it has the beginning of its answer twice.",
        tests=(f"{RESUME}::test_what_a_client_has_is_prompt_and_is_not_sent_again",),
    ),
    Mutant(
        name="replay-longer-than-asked",
        file="cluster/requests/generation.py",
        find="return self._request.params.max_tokens - len(self._sent)",
        replace="return self._request.params.max_tokens",
        reason="A replay asks for the tokens that are left, or the client gets more than max_tokens.",
        tests=(f"{RESUME}::test_what_was_sent_is_prompt_after_a_loss_and_no_token_comes_twice",),
    ),
    Mutant(
        name="attempts-without-a-bound",
        file="cluster/requests/replay.py",
        find="while len(reasons) < self._max_attempts:",
        replace="while len(reasons) < 100:",
        reason="A request has a bounded number of attempts, or one that ends its workers ends all of them in turn.",
        tests=(f"{RESUME}::test_attempts_are_bounded",),
    ),
    Mutant(
        name="failing-forward-tried-for-ever",
        file="cluster/requests/replay.py",
        find="                if failed:\n                    raise\n",
        replace="",
        reason="A request whose forward fails twice ends, or it fails the forwards of others again and again.",
        tests=(f"{RESUME}::test_a_forward_that_fails_twice_is_not_tried_again",),
    ),
    Mutant(
        name="one-id-twice-in-a-process",
        file="cluster/requests/active_requests.py",
        find="            if not claim.resumes:\n                raise in_use(claim.request_id)\n",
        replace="",
        reason="A new request does not take a running one's id, or one client ends what another waits for.",
        tests=(f"{RESUME}::test_an_id_that_runs_is_refused_and_its_request_goes_on",),
    ),
    Mutant(
        name="running-id-not-counted",
        file="cluster/requests/active_requests.py",
        find="        self._table.add(self._table.id_column(claim.request_id), 1)\n",
        replace="",
        reason="Other processes see which ids run, or a doubled call is computed in two of them.",
        tests=(f"{CLAIMED}::test_a_call_counts_while_it_runs_and_is_not_given_to_one_that_begins",),
    ),
    Mutant(
        name="placed-before-its-id-is-free",
        file="cluster/requests/active_requests.py",
        find="            await self._claims.take(call.claim, holders)\n",
        replace="",
        reason="A call waits until no other process runs its id, or a resumed client gets two answers mixed.",
        tests=(f"{CLAIMED}::test_what_runs_elsewhere_is_refused",),
    ),
    Mutant(
        name="both-of-two-go-on",
        file="cluster/requests/active_requests.py",
        find="mine = call.settled or not later",
        replace="mine = call.settled",
        reason="Of two calls that begin at once one is refused, or both processes compute the same request.",
        tests=(f"{CLAIMED}::test_of_two_that_begin_at_once_the_earlier_goes_on",),
    ),
    Mutant(
        name="resumed-call-goes-on",
        file="cluster/requests/active_requests.py",
        find="        await self._end(call)\n",
        replace="",
        reason="A call whose client resumes elsewhere ends, or it computes on for nobody until its deadline.",
        tests=(f"{CLAIMED}::test_a_later_call_that_resumes_ends_the_one_that_runs",),
    ),
    Mutant(
        name="late-resume-ends-a-newer-one",
        file="cluster/requests/active_requests.py",
        find="        if later and call.claim.resumes:\n            return peer_pb2.CLAIM_OUTCOME_SUPERSEDED\n",
        replace="",
        reason="The latest resume keeps an id, or a delayed one ends the stream that the client reads.",
        tests=(f"{CLAIMED}::test_an_earlier_resume_does_not_end_a_later_one",),
    ),
    Mutant(
        name="replay-draws-anew",
        file="cluster/requests/validation.py",
        find="            params = replace(params, seed=secrets.randbits(63))\n",
        replace="            pass\n",
        reason="A request has one seed for all its placements, or a replay goes on with another answer.",
        tests=(f"{RESUME}::test_a_request_without_a_seed_gets_one_of_its_own",),
    ),
    Mutant(
        name="last-message-before-its-tokens",
        file="cluster/routing/token_inbox.py",
        find="return bool(self._messages) and self._messages[0].fed <= self._num_fed",
        replace="return bool(self._messages)",
        reason="A message waits for the tokens fed before it, or an answer ends without some of its tokens.",
        tests=("tests/cluster/routing/test_token_feed.py::test_a_message_waits_for_what_was_fed_before_it",),
    ),
    Mutant(
        name="one-id-in-two-processes",
        file="cluster/peers/claims.py",
        find="        if outcome == peer_pb2.CLAIM_OUTCOME_IN_USE:\n",
        replace="        if False:\n",
        reason="One request of an id runs in all processes, or a doubled call is computed and paid for twice.",
        tests=("tests/cluster/peers/test_claims.py::test_one_that_goes_on_with_it_is_enough",),
    ),
)
