"""Protections of requests with LoRA adapters."""

from tests.mutants.mutant import Mutant

HELD = "workers/adapters/adapters.py"
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
)
