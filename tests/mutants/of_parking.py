"""Protections of parked requests, and of requests that stay."""

from tests.mutants.mutant import Mutant

PARKING_FILE = "workers/decode/parking.py"
LOOPS = "tests/workers/decode/test_parking.py"
ROWS = "tests/workers/decode/test_parked_rows.py"
LANES = "tests/workers/decode/test_parking_lanes.py"
YIELDED_FILE, YIELDED = "workers/decode/yielded_rows.py", "tests/workers/decode/test_yielded_rows.py"

PARKING = (
    Mutant(
        name="parked-before-its-steps-are-read",
        file=PARKING_FILE,
        find="        self._leaving = [request for request in leaving if self._is_stepped(request)]\n",
        replace="        self._leaving = []\n",
        reason="A request is parked once no step has it, or it goes on without the token that a step has sampled.",
        tests=(f"{ROWS}::test_a_row_whose_step_is_in_flight_is_parked_once_that_is_read",),
    ),
    Mutant(
        name="parked-in-vain",
        file=PARKING_FILE,
        find="        return chosen if rows <= 0 and max(short) <= 0 and len(chosen) >= len(first) else []\n",
        replace="        return chosen\n",
        reason="Nobody leaves where that makes too little room, or requests come and go for one that waits anyway.",
        tests=(f"{LOOPS}::test_it_does_not_give_way_to_its_own_priority_or_in_vain",),
    ),
    Mutant(
        name="parked-by-its-own-priority",
        file=PARKING_FILE,
        find="one.level > ask.prompt.priority",
        replace="one.level >= ask.prompt.priority",
        reason="Only a lower number parks a request, or two of one priority park each other for ever.",
        tests=(f"{LOOPS}::test_it_does_not_give_way_to_its_own_priority_or_in_vain",),
    ),
    Mutant(
        name="parked-for-ever",
        file=PARKING_FILE,
        find="FIRST if waited > self._seconds else ",
        replace="",
        reason="What was parked for long goes before all others, or a stream pauses as long as others come.",
        tests=(f"{LOOPS}::test_nothing_goes_before_one_that_was_parked_for_too_long",),
    ),
    Mutant(
        name="parked-again-by-whom-it-waited-for",
        file=PARKING_FILE,
        find="request.parked, request.level, request.reserved = False, own, reach[0]",
        replace="request.parked, request.reserved = False, reach[0]",
        reason="A request keeps what it has risen to, or the next one of a lower number parks it at once.",
        tests=(f"{LOOPS}::test_a_request_that_has_risen_is_not_parked_again_by_whom_it_waited_for",),
    ),
    Mutant(
        name="pages-freed-while-they-are-copied",
        file=PARKING_FILE,
        find="        for is_past, request in copying:\n            if is_past is None or is_past():\n",
        replace="        for _, request in copying:\n            if True:\n",
        reason="A peer writes into pages once their copies are done, or a parked request comes back with its KV.",
        tests=(f"{LANES}::test_steps_of_others_run_while_pages_are_copied",),
    ),
    Mutant(
        name="row-before-its-pages-are-back",
        file=PARKING_FILE,
        find="        for is_past, request in rising:\n            if is_past is None or is_past():\n",
        replace="        for _, request in rising:\n            if True:\n",
        reason="A resumed request has its row once its pages are there, or all rows wait for them.",
        tests=(f"{LANES}::test_steps_of_others_run_while_pages_are_copied",),
    ),
    Mutant(
        name="resumed-before-its-pages-are-back",
        file="cache/operations/parking.py",
        find="        self._fences.arrive(row)\n",
        replace="",
        reason="On each rank a forward waits for the pages that it reads, or it reads what was there before.",
        tests=("tests/cache/operations/test_parking.py::test_random_programs_with_parked_sequences[two groups]",),
    ),
    Mutant(
        name="parked-before-its-pages-are-back",
        file="cache/store/copies.py",
        find="        found = [self._of(self._pages[of.group], of.pages) for of in moves]\n",
        replace="        found = []\n",
        reason="A page goes down again once it has come up, or what was there before is parked.",
        tests=("tests/cache/store/test_parked_store.py::test_a_page_goes_down_once_it_has_come_up",),
    ),
    Mutant(
        name="parked-memory-kept",
        file=PARKING_FILE,
        find="        self._engine.forget(request.sequence_id)\n",
        replace="",
        reason="A parked request that is cancelled gives its host memory back, or cancels fill it.",
        tests=(f"{LOOPS}::test_a_request_is_cancelled_while_it_is_parked",),
    ),
    Mutant(
        name="dropped-where-nothing-is-left",
        file=PARKING_FILE,
        find="                self._decodes.abort(request.request_id, writer_quiet=True)\n",
        replace="                self._rows.join([request])\n",
        reason="Where host memory is full a row is dropped, or its next step finds no page and fails all rows.",
        tests=(f"{LOOPS}::test_what_host_memory_has_no_room_for_is_dropped",),
    ),
    Mutant(
        name="pages-for-one-step-alone",
        file="workers/handoff/sequence_room.py",
        find="        self.margin = 2 * (settings.speculation.tokens + 1) + LONGEST_APPEND\n",
        replace="        self.margin = 0\n",
        reason="Rows have pages for all that may be written before the next check, or a step fails for lack of one.",
        tests=(f"{LOOPS}::test_requests_take_pages_as_they_grow", f"{ROWS}::test_storms"),
    ),
    Mutant(
        name="whole-output-after-the-prompt",
        file="workers/handoff/reservations.py",
        find="        request.reserved = min(capacity, request.reserved)\n",
        replace="        request.reserved = capacity\n",
        reason="A prompt that is computed here goes on with the pages it has, or it fails where others have the rest.",
        tests=(
            "tests/workers/test_both_sides.py::test_requests_whose_prompts_are_computed_here_take_pages_as_they_grow",
        ),
    ),
    Mutant(
        name="prompts-before-a-request-that-is-parked-for-too-long",
        file="workers/scheduling/scheduler.py",
        find="        if self.keeps_room:\n            return\n",
        replace="",
        reason="Prompts for peers that come without end leave no room for a parked request, unless they wait for it.",
        tests=(
            "tests/workers/test_both_sides.py::test_a_parked_request_goes_on_though_prompts_for_a_peer_come_without_end",
        ),
    ),
    Mutant(
        name="prompts-wait-while-kv-of-a-peer-is-awaited",
        file=PARKING_FILE,
        find=" and not self._reservations.awaits_peers",
        replace="",
        reason="Two workers wait for each other if both hold prompts back for a parked request whose place awaits KV.",
        tests=(
            "tests/workers/test_both_sides.py"
            "::test_workers_do_not_wait_for_each_other_with_requests_that_are_parked_for_too_long",
        ),
    ),
    Mutant(
        name="rows-pause-without-end",
        file=YIELDED_FILE,
        find="            urgent = None\n",
        replace="            pass\n",
        reason="Rows pause for half of the time at most, or urgent prompts without end leave others without tokens.",
        tests=(
            f"{YIELDED}::test_pauses_take_at_most_half_of_the_time",
            f"{YIELDED}::test_random_pauses_are_bounded_and_lose_nobody",
        ),
    ),
    Mutant(
        name="rows-that-pause-keep-their-room",
        file=PARKING_FILE,
        find="[*self._rows.requests, *self.yielded.requests]",
        replace="self._rows.requests",
        reason="Rows that pause for one urgent request can be parked for the next, which else waits for its room.",
        tests=(f"{YIELDED}::test_a_row_that_pauses_is_parked_for_another_request",),
    ),
    Mutant(
        name="anybody-passes-others",
        file="cluster/requests/validation.py",
        find="        if not first <= priority <= last:\n",
        replace="        if False:\n",
        reason="The operator says who may go before others, or every client gives itself the first priority.",
        tests=(
            "tests/cluster/requests/test_priorities.py::test_nobody_goes_before_others_unless_the_configuration_says_so",
        ),
    ),
    Mutant(
        name="last-priority-starves",
        file="workers/scheduling/ageing.py",
        find="    return priority - int(waited // seconds)\n",
        replace="    return priority\n",
        reason="What waits rises with time, or requests of the last priority wait for ever.",
        tests=("tests/workers/scheduling/test_prompt_order.py::test_lower_priorities_go_first_and_what_waits_rises",),
    ),
)
