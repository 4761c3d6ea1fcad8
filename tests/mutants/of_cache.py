"""Protections of pages, and of what stands in them."""

from tests.mutants.mutant import Mutant

CACHE = (
    Mutant(
        name="page-free-while-it-is-written",
        file="cache/kernels/native/page_counts.c",
        find="if (references[page] == 0 && writers[page] == 0) is_free",
        replace="if (references[page] == 0) is_free",
        reason="A page with a remote writer is not free: the writer would change the KV of the page's next request.",
        tests=("tests/cache/pages/test_allocator.py::test_a_page_outlives_its_readers_while_it_has_a_writer",),
    ),
    Mutant(
        name="page-free-while-it-is-written-numpy",
        file="cache/pages/allocator.py",
        find="left = self._references[at] + self._writers[at]",
        replace="left = self._references[at]",
        reason="The same without a compiler: a hold keeps a page, or its writer changes the KV of the next request.",
        tests=("tests/cache/pages/test_allocator.py::test_a_page_outlives_its_readers_while_it_has_a_writer",),
    ),
    Mutant(
        name="shared-page-written-into",
        file="cache/pages/allocator.py",
        find="return self._references[pages] > 1",
        replace="return self._references[pages] > 2",
        reason="A page with two users is copied before one appends to it, or a request reads another's tokens.",
        tests=("tests/cache/operations/test_sequences.py::test_pop_into_a_shared_page_copies_it_at_the_next_append",),
    ),
    Mutant(
        name="owed-pages-given-away",
        file="cache/pages/page_users.py",
        find="self.num_owed += int(np.count_nonzero(self._counts(pages, self._indexed) > 0))",
        replace="self.num_owed += 0",
        reason="A page shared under a window is owed to each other user, or a reserved request runs out of pages.",
        tests=("tests/cache/pages/test_page_users.py",),
    ),
    Mutant(
        name="sent-before-it-has-landed",
        file="cache/operations/receptions.py",
        find="        if self.table.receiving[self.table.row(sequence)]:\n",
        replace="        if False:\n",
        reason="A sequence that is being received is not read or sent on, or a peer gets KV that is not there yet.",
        tests=("tests/cache/operations/test_bad_calls.py::test_what_has_not_landed_is_not_sent_on",),
    ),
    Mutant(
        name="prefix-without-its-salt",
        file="cache/plan/prefix_chain.py",
        find='digest = blake2b(salt, digest_size=DIGEST_BYTES, person=b"salt").digest() if salt else b""',
        replace='digest = b""',
        reason="A prefix is found under its own salt only, or one tenant's timings tell what another has asked.",
        tests=("tests/cache/pages/test_prefix_changes.py::test_salts_and_pages_have_names_of_their_own",),
    ),
    Mutant(
        name="prefix-without-what-precedes-it",
        file="cache/plan/prefix_chain.py",
        find="blake2b(digest + tokens[begin : begin + stride], digest_size=DIGEST_BYTES)",
        replace="blake2b(tokens[begin : begin + stride], digest_size=DIGEST_BYTES)",
        reason="A page is shared where all tokens before it agree, too, or a request continues another context.",
        tests=("tests/cache/pages/test_prefix_index.py::test_pages_of_two_prompts_are_no_prefix_of_a_third",),
    ),
    Mutant(
        name="digest-blind-to-places",
        file="cache/digest.py",
        find="return ((words * columns).sum(1) * positions).sum()",
        replace="return (words * columns).sum()",
        reason="The digest of KV depends on positions, or pages that changed places are decoded unnoticed.",
        tests=("tests/cache/test_digest.py::test_positions_that_changed_places_change_it",),
    ),
)
