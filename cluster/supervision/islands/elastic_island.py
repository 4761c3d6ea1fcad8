"""An island whose workers come and go, one by one, while the others serve."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes.processes import ActorProcess
from tandem.cluster.scaling import Shape
from tandem.cluster.supervision.island import Island
from tandem.cluster.supervision.network import Network
from tandem.cluster.supervision.process_settings import workers_on_host
from tandem.transfer.island_ranks import IslandRanks
from tandem.transfer.membership import bundle
from tandem.workers.config import Role, WorkerConfig

LEAVE_SECONDS = 5.0  # for a worker that leaves to close what it holds
CUT_SECONDS = 60.0  # for all ranks to cut a peer, each of which takes a moment
LEAST_PLACES = 8  # each costs a process two rows of its mailbox, and with NIXL 10 MB of rings a rank


def places(config: ClusterConfig) -> IslandRanks:
    """Returns how many ranks each place of an elastic island has room for, in one epoch. Its first workers have the
    first places. The others are vacant, for workers of either role. With a record no place is vacant: the workers stay.
    """
    ranks, most = config.island.ranks, config.scaling.max_workers or 0
    sizes = sorted({config.island.prefill_ranks, config.island.decode_ranks})
    vacant = 0 if config.record.folder is not None else max(LEAST_PLACES, 2 * len(ranks), most) - len(ranks)
    return IslandRanks((*ranks, *(size for size in sizes for _ in range(vacant))))


class ElasticIsland(Island):
    """An island in which a PE is a place: workers hold it one after another, each in an epoch of its own. The island is
    formed with a number of places, some of them vacant. Each place has room for a fixed number of ranks.

    After form():
    - part() → restart() → seat(): others take the places of workers that were lost;
    - add() → seat(): workers take vacant places;
    - turn() → seat(): workers get another role, and keep their processes and weights;
    - dismiss(): workers leave.

    Each of them may raise ProcessEnded, when a worker was lost meanwhile. Then call part() with its place, too.
    """

    def _in_places(self, workers: list[WorkerConfig]) -> list[WorkerConfig]:
        there, first = places(self._config), {worker.pe: worker.epoch for worker in workers}
        epochs = tuple(first.get(pe, 0) for pe in range(len(there))) if len(there) > len(first) else ()
        ranks = tuple(there) if there.has_several else ()
        return [replace(worker, num_pes=len(there), ranks=ranks, epochs=epochs) for worker in workers]

    @property
    def _places(self) -> IslandRanks:
        return self._workers[0].island_ranks

    @property
    def roles(self) -> dict[int, Role]:
        """The roles of the workers, by PE."""
        return {worker.pe: worker.role for worker in self._workers}

    @property
    def turns(self) -> bool:
        """True if a worker may get another role: both roles need equal numbers of ranks."""
        return self._size(Role.PREFILL) == self._size(Role.DECODE)

    def takes(self, shape: Shape) -> bool:
        """Returns whether the island's workers can be changed to that shape while it serves."""
        kept = self._config.record.folder is not None  # a record needs workers that stay
        return self.formed and not kept and Counter(map(self._size, shape.roles)) <= Counter(self._places)

    def place_of(self, ended: ProcessEnded) -> int | None:
        """Returns the PE of the worker that has ended; None if it does not belong to the island."""
        members = zip(self._workers, self._members, strict=True)
        return next((worker.pe for worker, member in members if member.name == ended.name), None)

    def lost_worker(self, lost: ProcessEnded) -> int | None:
        """Returns the PE of the lost worker as place_of() does, but None if no worker is left to go on."""
        return self.place_of(lost) if self.formed and len(self.roles) > 1 else None

    def part(self, pes: Collection[int]) -> None:
        """Ends these workers at once; the others end all that they did with them, and go on. Idempotent."""
        members = self._at(pes)
        self._liveness.forget(members)
        for member in members:
            member.kill()
        self._let_go(pes)

    def restart(self, pes: Collection[int], epoch: int) -> None:
        """After part(): starts other processes in the places of these workers, with an epoch of their own."""
        assert self._group is not None, "launch() comes first"
        epochs = self._epochs(dict.fromkeys(pes, epoch))
        for pe in pes:
            gone = self._at({pe})
            workers = [replace(worker, epoch=epoch, epochs=epochs) for worker in self._workers if worker.pe == pe]
            for member in gone:
                self._loads.pop(member, None)
            started = self._group.replace_anywhere(gone, [*map(self._spec, workers)], threads=self._threads)
            self._liveness.add(started)
            others = [pair for pair in self._pairs if pair[0].pe != pe]
            self._hold([*others, *zip(workers, started, strict=True)])

    def add(self, roles: Sequence[Role], epoch: int) -> list[int]:
        """Starts workers of these roles in vacant places, with an epoch of their own; returns their PEs. StartFailed:
        there is no room for them, and nothing has changed."""
        assert self._group is not None, "launch() comes first"
        joining = self._vacant(roles)
        shape = _shape_of([*self.roles.values(), *roles])
        epochs = self._epochs(dict.fromkeys(joining, epoch))
        workers = [
            replace(self._changed(pe, role, epoch, epochs, shape), rank=rank)
            for pe, role in joining.items()
            for rank in range(self._places[pe])
        ]
        started = self._group.grow([self._spec(worker) for worker in workers], threads=self._threads)
        self._liveness.add(started)
        self._hold([*self._pairs, *zip(workers, started, strict=True)])
        return [*joining]

    def turn(self, roles: Mapping[int, Role], epoch: int) -> None:
        """Makes these workers leave their peers and take another role, in an epoch of their own."""
        shape, epochs = _shape_of({**self.roles, **roles}.values()), self._epochs(dict.fromkeys(roles, epoch))
        for number, worker in enumerate(self._workers):
            if worker.pe in roles:
                turned = self._changed(worker.pe, roles[worker.pe], epoch, epochs, shape)
                self._workers[number] = replace(turned, rank=worker.rank)
        self._let_go(roles)
        turned = [(member, worker) for worker, member in self._pairs if worker.pe in roles]
        self._ask([member for member, _ in turned], "leave")
        for member, worker in turned:
            member.name = self._spec(worker).name
        self._results([member.call("rejoin", member.name, worker) for member, worker in turned])

    def seat(self, pes: Collection[int], epoch: int) -> None:
        """Loads what these workers have not loaded yet, and joins them to the others. Call it after restart(), add() or
        turn()."""
        new = [(worker, member) for worker, member in self._pairs if worker.pe in pes]
        joining = [member for _, member in new]
        loading = [member for member in joining if member not in self._loads]
        self._loads |= {member: member.call("load") for member in loading}
        built = self._builds(loading)
        self._results([self._loads[member] for member in loading])
        self._liveness.results(built, math.inf)
        if loading:
            self._agree(self._measure(loading), self.num_pages)
        self._meet(new, epoch)
        known = {address.pe: address for address in self._addresses}
        for (worker, _), address in zip(new, self._listen(joining), strict=True):
            if worker.rank == 0:
                known[worker.pe] = self._known(worker, address)
        self._addresses = tuple(known[pe] for pe in self.roles)

    def _meet(self, new: Sequence[tuple[WorkerConfig, ActorProcess]], epoch: int) -> None:
        """Connects these processes with all others. Then the other workers may write to them."""
        members = [member for _, member in new]
        opened = dict(zip(map(_process, new), self._open(members), strict=True))
        others = [pair for pair in self._pairs if pair[1] not in members]
        there, leaders = [member for _, member in others], [member for worker, member in others if worker.rank == 0]
        numbers = list(map(_process, others))
        pes = list(dict.fromkeys(pe for pe, _ in opened))
        handles = {pe: opened | dict(zip(numbers, self._ask(there, "offer", pe, epoch), strict=True)) for pe in pes}
        every = [(pe, rank) for pe, size in enumerate(self._places) for rank in range(size)]
        joins = [member.call("join", [handles[worker.pe].get(one, b"") for one in every]) for worker, member in new]
        self._results(joins)
        for pe in pes:
            self._ask(there, "reach", pe, bundle([handle for (of, _), handle in opened.items() if of == pe]))
            self._ask(leaders, "admit", pe, epoch)

    def dismiss(self, pes: Collection[int]) -> None:
        """Removes these workers: the others end all that they did with them, and the processes end. Their places are
        vacant, even if ProcessEnded is raised."""
        gone = self._at(pes)
        self._liveness.forget(gone)
        try:
            self._let_go(pes)
        finally:
            self._stop_gently(gone, LEAVE_SECONDS)
            self.drop(pes)

    def drop(self, pes: Collection[int]) -> None:
        """Kills these workers, which the others no longer know or must not wait for. Idempotent."""
        assert self._group is not None, "launch() comes first"
        gone = self._at(pes)
        self._liveness.forget(gone)
        self._group.shrink(gone)
        for member in gone:
            self._loads.pop(member, None)
        self._hold([pair for pair in self._pairs if pair[0].pe not in pes])
        self._addresses = tuple(address for address in self._addresses if address.pe not in pes)

    def share_cores(self) -> None:
        """Makes workers on CPUs count their threads anew, by the present number of workers. Does not wait for it."""
        config, epochs = self._of_shape(self.shape), self._epochs({})
        for worker, member in self._pairs:
            member.call("share_cores", *_shares(config, worker.role, self._network), epochs)

    def look(self) -> None:
        """Returns a moment later. ProcessEnded when a worker is lost."""
        self._liveness.wait(())

    def _join(self) -> None:
        vacant = self._places.processes - len(self._members)
        self._all("join", [*self._open(self._members), *[b""] * vacant])

    @property
    def _pairs(self) -> list[tuple[WorkerConfig, ActorProcess]]:
        """Returns the ranks of all workers, with their processes."""
        return list(zip(self._workers, self._members, strict=True))

    def _at(self, pes: Collection[int]) -> list[ActorProcess]:
        return [member for worker, member in self._pairs if worker.pe in pes]

    def _hold(self, pairs: Sequence[tuple[WorkerConfig, ActorProcess]]) -> None:
        """Sets the workers and their processes."""
        ordered = sorted(pairs, key=_process)
        self._workers = [worker for worker, _ in ordered]
        self._members = [member for _, member in ordered]

    def _size(self, role: Role) -> int:
        """Returns the number of ranks of a worker of that role."""
        return self._config.island.prefill_ranks if role == Role.PREFILL else self._config.island.decode_ranks

    def _vacant(self, roles: Sequence[Role]) -> dict[int, Role]:
        """Chooses places for workers of these roles, by their PEs."""
        found: dict[int, Role] = {}
        for role in roles:
            left = (pe for pe, size in enumerate(self._places) if size == self._size(role))
            found[next(pe for pe in left if pe not in self.roles and pe not in found)] = role  # see takes()
        return found

    def _let_go(self, pes: Collection[int]) -> None:
        """Makes all others part with all of these workers, even if ProcessEnded is raised, because another worker is
        lost. A worker that misses a peer for long ends.

        The ranks of a worker cut a peer before the first of them frees what the peer was to write.
        """
        others = [pair for pair in self._pairs if pair[0].pe not in pes]
        calls: list[Future[Any]] = []
        for pe in pes:
            cuts = [(worker.pe, member.call("cut", pe)) for worker, member in others]
            self._liveness.outlast([call for _, call in cuts], CUT_SECONDS)
            failed = {of for of, call in cuts if not call.done() or call.exception() is not None}
            leaders = [member for worker, member in others if worker.rank == 0 and worker.pe not in failed]
            parts = [member.call("part", pe) for member in leaders]
            self._liveness.outlast(parts, CUT_SECONDS)
            calls += [*(call for _, call in cuts), *parts]
        self._results(calls)

    def _epochs(self, changed: Mapping[int, int]) -> tuple[int, ...]:
        """Returns the epoch of each place, 0 if it is vacant."""
        known = {**{worker.pe: worker.epoch for worker in self._workers}, **changed}
        return tuple(known.get(pe, 0) for pe in range(len(self._places)))

    def _changed(self, pe: int, role: Role, epoch: int, epochs: tuple[int, ...], shape: Shape) -> WorkerConfig:
        """Returns a worker's configuration in an island of that shape."""
        on_host, decode_workers = _shares(self._of_shape(shape), role, self._network)
        return replace(
            self._workers[0],
            role=role,
            pe=pe,
            epoch=epoch,
            epochs=epochs,
            workers_on_host=on_host,
            decode_workers=decode_workers,
        )

    def _of_shape(self, shape: Shape) -> ClusterConfig:
        section = self._config.island.model_copy(update=asdict(shape))
        return self._config.model_copy(update={"island": section})


def _process(pair: tuple[WorkerConfig, ActorProcess]) -> tuple[int, int]:
    """Returns PE and rank."""
    return pair[0].pe, pair[0].rank


def _shares(config: ClusterConfig, role: Role, network: Network) -> tuple[int, int | None]:
    """Returns workers_on_host and decode_workers of WorkerConfig, for a worker of that role."""
    decode_workers = config.island.num_decode if role == Role.DECODE else None
    return workers_on_host(config, network.num_hosts), decode_workers


def _shape_of(roles: Collection[Role]) -> Shape:
    return Shape(sum(role == Role.PREFILL for role in roles), sum(role == Role.DECODE for role in roles))
