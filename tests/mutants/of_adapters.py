"""Protections of requests with LoRA adapters."""

from tests.mutants.mutant import Mutant

HELD = "workers/adapters/adapters.py"
TURNS = "tests/workers/adapters/test_slot_turns.py"
LIVES = "tests/workers/adapters/test_lives_of_adapters.py"

ADAPTERS = (
    Mutant(
        name="prefixes-across-adapters",
        file="workers/service/call_checks.py",
        find="    return adapter_salt(adapter, salt)\n",
        replace="    return salt\n",
        reason="KV that one adapter has computed is no prefix of another's, or requests get tokens of both.",
        tests=(f"{LIVES}::test_prefixes_are_shared_within_an_adapter_alone",),
    ),
    Mutant(
        name="adapter-gone-within-a-request",
        file=HELD,
        find="        if held.removed and not held.users:\n",
        replace="        if held.removed:\n",
        reason="An adapter's memory outlives its removal while requests use it, or they end with the base's tokens.",
        tests=(f"{LIVES}::test_running_requests_outlive_their_adapter",),
    ),
    Mutant(
        name="removed-adapter-taken",
        file=HELD,
        find="        return held is not None and not held.removed\n",
        replace="        return held is not None\n",
        reason="No new request may use an adapter that was removed, or its memory is never free.",
        tests=(f"{LIVES}::test_running_requests_outlive_their_adapter",),
    ),
    Mutant(
        name="slot-of-a-running-request",
        file=HELD,
        find="        return len(self._unused) - taken >= spare\n",
        replace="        return True\n",
        reason="A request waits while others use all slots; else its forward fails.",
        tests=("tests/workers/adapters/test_other_workers.py::test_a_parked_request_goes_on_with_its_adapter",),
    ),
    Mutant(
        name="host-memory-of-dropped-adapters",
        file=HELD,
        find="            del self._held[digest]\n            self._places.append(held.place)\n",
        replace="            del self._held[digest]\n",
        reason="Adapters in turn take bounded host memory, or a worker soon loads none any more.",
        tests=(f"{LIVES}::test_host_memory_is_bounded",),
    ),
    Mutant(
        name="another-adapter-of-that-name",
        file="workers/service/adapter_calls.py",
        find='            if request.digest not in (b"", found.digest):\n',
        replace="            if False:\n",
        reason="A worker loads the weights that others have loaded, or a request meets another adapter on each side.",
        tests=(f"{LIVES}::test_what_cannot_be_loaded_is_refused_and_leaves_nothing",),
    ),
    Mutant(
        name="slots-without-turns",
        file="workers/handoff/slot_turns.py",
        find="        if not first:\n",
        replace="        if True:\n",
        reason="An adapter in use gives way to one that has waited, or that one waits for ever.",
        tests=(f"{TURNS}::test_every_adapter_gets_its_turn_however_many_ask",),
    ),
    Mutant(
        name="slot-for-whoever-comes",
        file="workers/handoff/slot_turns.py",
        find="spare + len(before))",
        replace="spare)",
        reason="A slot that became free is for the first adapter that waits for one.",
        tests=(f"{TURNS}::test_a_free_slot_is_for_the_first_that_waits",),
    ),
    Mutant(
        name="prompts-behind-a-slot",
        file="workers/scheduling/scheduler.py",
        find="                continue\n            if not has_room(request):\n",
        replace="                return\n            if not has_room(request):\n",
        reason="Prompts that need no slot do not wait for one that does.",
        tests=(f"{TURNS}::test_a_prompt_without_a_slot_is_passed_by_others_for_a_while",),
    ),
    Mutant(
        name="behind-a-parked-request-without-a-slot",
        file="workers/decode/parking.py",
        find="                self._slotless.add(request)\n",
        replace="",
        reason="Requests that need no slot do not wait for a parked one that does.",
        tests=(f"{TURNS}::test_a_parked_request_without_a_slot_is_passed_by_others_for_a_while",),
    ),
    Mutant(
        name="ranks-that-read-different-files",
        file="workers/service/adapter_calls.py",
        find="            await self._agree(number, found.digest, request.path)\n",
        replace="",
        reason="A folder that changes while ranks read it is refused, or the worker ends.",
        tests=("tests/workers/adapters/test_changing_folders.py",),
    ),
)
