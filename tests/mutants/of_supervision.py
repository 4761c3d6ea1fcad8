"""Protections of processes: one process at a place, one epoch at a time, and no end before its time."""

from tests.mutants.mutant import Mutant

SUPERVISORS = "tests/cluster/supervision/test_supervisors.py"

SUPERVISION = (
    Mutant(
        name="process-outlives-its-lease",
        file="cluster/processes/leases.py",
        find="self._ends = max(self._ends, self._heard + self._seconds)",
        replace="self._ends = max(self._ends, self._clock() + self._seconds)",
        reason="A lease counts from the renewal before, or a process that is cut off serves beside its successor.",
        tests=("tests/cluster/processes/test_leases.py::test_a_lease_counts_from_the_renewal_before_the_last",),
    ),
    Mutant(
        name="lease-comes-back",
        file="cluster/processes/leases.py",
        find="self._over = self._over or self._clock() >= self._ends",
        replace="self._over = self._clock() >= self._ends",
        reason="A lease that was over stays over, or a process goes on whose successor has started.",
        tests=("tests/cluster/processes/test_leases.py::test_a_renewal_that_comes_late_does_not_bring_a_lease_back",),
    ),
    Mutant(
        name="order-that-waits-for-room-that-cannot-come",
        file="cluster/processes/ray_group.py",
        find="            self._check_growth(len(self._placed), len(specs))\n",
        replace="            pass\n",
        reason="More workers than hosts could hold are refused at once, or an order waits for half a minute.",
        tests=(
            "tests/cluster/processes/test_ray_group.py"
            "::test_more_than_hosts_could_ever_hold_are_refused_before_a_host_is_asked",
        ),
    ),
    Mutant(
        name="gpu-filled-twice",
        file="cluster/processes/gpus.py",
        find="            self._socket.bind(name)\n",
        replace="            pass\n",
        reason="A GPU is filled by one process, or two count the same bytes as free and one fails later.",
        tests=("tests/cluster/processes/test_gpus.py::test_workers_claim_what_they_measure",),
    ),
    Mutant(
        name="island-state-out-of-order",
        file="cluster/routing/islands.py",
        find="        if before is not None and state.version <= before.state.version:\n            return False\n",
        replace="",
        reason="An older state of an island is ignored, or requests go to processes that have ended.",
        tests=("tests/cluster/routing/test_islands.py::test_a_state_that_comes_late_changes_nothing",),
    ),
    Mutant(
        name="epoch-used-twice",
        file="cluster/supervision/island_supervisor.py",
        find="        self._account.epoch = self._account.draw()\n",
        replace="",
        reason="Each incarnation of an island has an epoch of its own, or late calls of a lost one are obeyed.",
        tests=(f"{SUPERVISORS}::TestIsland::test_a_lost_member_ends_the_epoch",),
    ),
    Mutant(
        name="survivors-ended-while-they-serve",
        file="cluster/supervision/island_supervisor.py",
        find="            if not any(self._stop.answers(asked, GATEWAY_SECONDS)):\n",
        replace="            if True:\n",
        reason="After a loss survivors finish what they can, or one process that ends costs every request its tokens.",
        tests=(f"{SUPERVISORS}::TestIsland::test_survivors_are_left_until_the_gateway_says_so",),
    ),
    Mutant(
        name="restarts-without-an-end",
        file="cluster/supervision/supervisor.py",
        find="        if len(self._times) >= self._max_restarts:\n            return False\n",
        replace="",
        reason="Restarts are bounded, or a cluster that cannot serve starts again for ever and no operator hears.",
        tests=(f"{SUPERVISORS}::TestBudget::test_counts_within_a_window",),
    ),
    Mutant(
        name="parts-before-all-ranks-have-cut",
        file="cluster/supervision/islands/elastic_island.py",
        find="            self._liveness.outlast([call for _, call in cuts], CUT_SECONDS)\n",
        replace="",
        reason="A worker frees what a lost peer was to write once none of its ranks can be written any more.",
        tests=("tests/cluster/test_scaling.py::TestElasticRanks::test_nothing_is_freed_before_all_ranks_have_cut",),
    ),
    Mutant(
        name="loss-taken-for-a-fault-of-the-change",
        file="cluster/supervision/islands/worker_changes.py",
        find="            self._island.look()\n            raise\n",
        replace="            raise\n",
        reason="A worker that cannot reach a lost one does not end the others, or all streams are placed again.",
        tests=(
            "tests/cluster/test_scaling.py::TestElasticIsland::test_a_loss_that_another_notices_first_is_made_up_for",
        ),
    ),
)
