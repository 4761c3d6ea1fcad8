"""Protections of callers' keys: what each may see and do, and that its limits are counted."""

from tests.mutants.mutant import Mutant

DOORS = "tests/cluster/keys/test_doors.py"
KEYS = (
    Mutant(
        name="keys-that-meet-in-ids",
        file="cluster/keys/access.py",
        find='        return f"{request_id}{SCOPE}{self.key.name}"\n',
        replace="        return request_id\n",
        reason="Callers of different keys meet in no id, or one can end the other's request.",
        tests=(f"{DOORS}::test_ids_of_unlike_keys_do_not_meet",),
    ),
    Mutant(
        name="operators-routes-for-keys",
        file="cluster/frontends/http/app.py",
        find='        if scope["path"] in self._operators:\n',
        replace="        if False:\n",
        reason="A key opens the routes of inference alone.",
        tests=(f"{DOORS}::test_routes_of_operators_are_forbidden",),
    ),
    Mutant(
        name="workers-that-keys-see",
        file="cluster/frontends/inference.py",
        find="self._for_keys() if current_origin.get().access.name else await self._cluster()",
        replace="await self._cluster()",
        reason="The holder of a key learns of no worker, and of no other caller's adapter.",
        tests=(f"{DOORS}::test_a_key_sees_no_workers",),
    ),
    Mutant(
        name="counts-that-nobody-looks-at-again",
        file="cluster/keys/meter.py",
        find="            self._check(key, (1, tokens), own=True)\n",
        replace="            pass\n",
        reason="Of two processes that count at a time one sees the other, or both admit the last request.",
        tests=("tests/cluster/keys/test_meter.py::test_of_two_processes_that_count_at_a_time_one_sees_the_other",),
    ),
    Mutant(
        name="left-over-tokens-kept",
        file="cluster/keys/meter.py",
        find="self._meter.take_back(Unit.TOKENS, self._tokens - prompt_tokens - output_tokens, self._second)",
        replace="pass",
        reason="Tokens that a request did not use are given back, or a key pays for answers that ended early.",
        tests=(f"{DOORS}::test_what_is_not_produced_is_given_back",),
    ),
    Mutant(
        name="questions-that-a-closed-connection-ends",
        file="cluster/peers/links.py",
        find="    return task is None or task.cancelling() > 0\n",
        replace="    return True\n",
        reason="A closed connection ends one question, or a host counts keys as if it were alone from then on.",
        tests=(
            "tests/cluster/keys/test_far_counts.py::test_a_connection_that_is_closed_meanwhile_does_not_end_the_asking",
        ),
    ),
    Mutant(
        name="free-embeddings-of-lost-workers",
        file="cluster/requests/embedding/reading.py",
        find="had = had_prompts(error)",
        replace="had = False",
        reason="What a lost worker may have computed counts, as the prompts of requests that generate do.",
        tests=(f"{DOORS}::test_prompts_whose_workers_die_count_once",),
    ),
)
