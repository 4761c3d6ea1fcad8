"""Protections of what operators use: pages, batches of requests, and files of keys."""

from tests.mutants.mutant import Mutant

OPERATORS = (
    Mutant(
        name="status-for-everybody",
        file="cluster/frontends/http/monitoring.py",
        find="        self.open = {HEALTH, READY, PING, *pages,",
        replace="        self.open = {HEALTH, READY, PING, STATUS, *pages,",
        reason="The pages are open and hold nothing, or strangers read a cluster's workers and hosts.",
        tests=("tests/cluster/frontends/test_pages.py::test_the_status_needs_the_key",),
    ),
    Mutant(
        name="pages-without-a-policy",
        file="cluster/frontends/pages/page.py",
        find="default-src 'none'",
        replace="default-src *",
        reason="A page runs its own script alone, or an injected one sends the reader's key elsewhere.",
        tests=("tests/cluster/frontends/test_pages.py::test_a_page_runs_its_own_script_alone_and_asks_nobody_else",),
    ),
    Mutant(
        name="half-lines-stay",
        file="cluster/cli/batch/rows.py",
        find="            os.ftruncate(self._file, self._size)\n        except BaseException:",
        replace="            pass\n        except BaseException:",
        reason="A line that a kill has cut goes away, or the next result is written onto its end and lost.",
        tests=("tests/cluster/cli/test_batch.py::test_what_has_a_result_is_not_sent_again",),
    ),
    Mutant(
        name="two-writers-of-results",
        file="cluster/cli/batch/rows.py",
        find="fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        replace="fcntl.fcntl(self._file, fcntl.F_GETFD)",
        reason="One batch writes a file of results, or two of them answer each row twice.",
        tests=("tests/cluster/cli/test_batch.py::test_two_batches_do_not_write_one_file",),
    ),
    Mutant(
        name="batches-as-urgent-as-all",
        file="cluster/cli/batch/run.py",
        find='{"service_tier": FLEX} if priority is None else',
        replace="{} if priority is None else",
        reason="Rows have the last priority, or a batch delays the people who wait for answers.",
        tests=("tests/cluster/cli/test_batch.py::test_rows_go_behind_live_traffic",),
    ),
    Mutant(
        name="keys-file-without-a-lock",
        file="cluster/cli/keys/replaced_file.py",
        find="fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        replace="pass",
        reason="Two commands at a time add their keys one after another, or one of the keys is lost.",
        tests=("tests/cluster/cli/test_keys.py::test_commands_at_the_same_time_lose_no_key",),
    ),
    Mutant(
        name="keys-file-that-others-write",
        file="cluster/cli/keys/replaced_file.py",
        find="before.st_mode & 0o777 & ~OTHERS_WRITE",
        replace="before.st_mode & 0o777",
        reason="Nobody but its owner can write a file of keys, or a gateway refuses it.",
        tests=("tests/cluster/cli/test_keys.py::test_a_file_keeps_its_link_and_its_mode_and_a_failed_write_leaves_it",),
    ),
)
