"""Protections of LoRA adapters: weights are never mixed, and no stranger's folder is read."""

from tests.mutants.mutant import Mutant

ROUTING, DOORS = "tests/cluster/routing/test_adapters.py", "tests/cluster/frontends/test_adapters.py"

SERVED_ADAPTERS = (
    Mutant(
        name="queue-behind-a-slot",
        file="cluster/routing/router.py",
        find="            if wanted.lets_pass and self._queue.let_pass():\n",
        replace="            if False:\n",
        reason="Requests that need no slot do not wait in the queue for one that does.",
        tests=(
            f"{ROUTING}::test_others_pass_a_request_that_waits_for_a_slot",
            "tests/e2e/test_adapters.py::test_others_pass_a_request_that_waits_for_a_slot",
        ),
    ),
    Mutant(
        name="queue-behind-an-adapter-that-nobody-holds",
        file="cluster/routing/router.py",
        find="        return bool(self.prompt.adapter) and all(self.lacking.values())\n",
        replace="        return self.lacks_slot\n",
        reason="An adapter whose folder is gone makes its own requests wait, and no others.",
        tests=(f"{ROUTING}::test_others_pass_a_request_whose_adapter_no_worker_holds",),
    ),
    Mutant(
        name="prefixes-of-any-adapter",
        file="cluster/routing/router.py",
        find="key_salt = adapter_salt(prompt.adapter, prompt.salt)",
        replace="key_salt = prompt.salt",
        reason="The router counts prefixes of one adapter, or it takes those of another for them.",
        tests=(f"{ROUTING}::test_a_workers_prefixes_count_for_their_adapter_alone",),
    ),
    Mutant(
        name="workers-without-the-adapter",
        file="cluster/routing/islands.py",
        find="            if adapter in link.adapters\n",
        replace="",
        reason="Both workers hold the adapter of a request, or each attempt is refused.",
        tests=(f"{ROUTING}::test_both_workers_hold_the_adapter",),
    ),
    Mutant(
        name="replay-of-a-removed-adapter",
        file="cluster/routing/router.py",
        find="        self._check_adapter(wanted.prompt.adapter)\n",
        replace="",
        reason="A request is told that its adapter is gone, or it waits for room until its deadline.",
        tests=(f"{ROUTING}::test_a_request_that_waits_ends_when_its_adapter_is_removed",),
    ),
    Mutant(
        name="resume-by-other-weights",
        file="cluster/requests/reading/received.py",
        find="        _check_adapter(message, adapter)\n",
        replace="        pass\n",
        reason="A stream goes on with the weights that began it, or its text is of two models.",
        tests=(f"{DOORS}::test_a_resume_by_other_weights_is_refused",),
    ),
    Mutant(
        name="adapter-kept-by-some",
        file="cluster/routing/adapter_loads.py",
        find="            await self._undo(loaded)\n",
        replace="",
        reason="All workers hold an adapter or none does, or failed additions fill their memory.",
        tests=(f"{DOORS}::test_one_worker_that_fails_undoes_all",),
    ),
    Mutant(
        name="adapter-from-any-folder",
        file="cluster/frontends/adapters/changes.py",
        find="        if folder not in allowed:\n",
        replace="        if False:\n",
        reason="Adapters come from folders that the operator names, or a caller learns what any folder holds.",
        tests=(f"{DOORS}::test_a_bad_folder_names_the_field",),
    ),
)
