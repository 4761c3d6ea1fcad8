"""An island whose workers come and go, one by one, while the others serve."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes.processes import ActorProcess
from tandem.cluster.scaling import Shape
from tandem.cluster.supervision.island import Island
from tandem.cluster.supervision.network import Network
from tandem.cluster.supervision.process_settings import workers_on_host
from tandem.workers.config import Role, WorkerConfig

LEAVE_SECONDS = 5.0  # for a worker that leaves to close what it holds


LEAST_PLACES = 8  # each costs a worker two rows of its mailbox, and with NIXL 10 MB of rings


def places(config: ClusterConfig) -> int:
    """How many workers an elastic island can have at a time in one epoch. Records are of workers that stay for an
    epoch."""
    workers, most = len(config.island.ranks), config.scaling.max_workers or 0
    return workers if config.record.folder is not None else max(LEAST_PLACES, 2 * workers, most)


class ElasticIsland(Island):
    """A PE is a place, which one worker after another may have, each in an epoch of its own. The island is formed with
    a number of places, some of them vacant.

    After form():
    - part() → restart() → seat(): others take the places of workers that were lost;
    - add() → seat(): workers take vacant places;
    - turn() → seat(): workers get another role, and keep their processes and weights;
    - dismiss(): workers leave.

    Each of them may raise ProcessEnded, when a worker was lost meanwhile. Then part() comes with its place, too.
    """

    def _in_places(self, workers: list[WorkerConfig]) -> list[WorkerConfig]:
        there = places(self._config)
        vacant = (0,) * (there - len(workers))
        epochs = (*(worker.epoch for worker in workers), *vacant) if vacant else ()
        return [replace(worker, num_pes=there, epochs=epochs) for worker in workers]

    @property
    def _places(self) -> int:
        return self._workers[0].num_pes

    @property
    def roles(self) -> dict[int, Role]:
        """Of the workers, by their PEs."""
        return {worker.pe: worker.role for worker in self._workers}

    def takes(self, shape: Shape) -> bool:
        """Whether its workers can be changed to that shape while it serves."""
        kept = self._config.record.folder is not None  # a record is of workers that stay
        return self.formed and not kept and len(shape.roles) <= self._places

    def place_of(self, ended: ProcessEnded) -> int | None:
        """The PE of the worker that has ended; None where it is none of the island's."""
        members = zip(self._workers, self._members, strict=True)
        return next((worker.pe for worker, member in members if member.name == ended.name), None)

    def lost_worker(self, lost: ProcessEnded) -> int | None:
        """As place_of(); None as well where nobody is left to go on."""
        return self.place_of(lost) if self.formed and len(self._members) > 1 else None

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
        for number, (worker, member) in enumerate(zip(self._workers, self._members, strict=True)):
            if worker.pe in pes:
                self._workers[number] = worker = replace(worker, epoch=epoch, epochs=epochs)
                self._loads.pop(member, None)
                (started,) = self._group.replace_anywhere([member], [self._spec(worker)], threads=self._threads)
                self._members[number] = started
                self._liveness.add([started])

    def add(self, roles: Sequence[Role], epoch: int) -> list[int]:
        """Starts workers of these roles in vacant places, with an epoch of their own; returns their PEs. StartFailed:
        there is no room for them, and nothing has changed."""
        assert self._group is not None, "launch() comes first"
        vacant = [pe for pe in range(self._places) if pe not in self.roles]
        pes = vacant[: len(roles)]
        assert len(pes) == len(roles), "see takes()"
        shape = _shape_of([*self.roles.values(), *roles])
        epochs = self._epochs(dict.fromkeys(pes, epoch))
        workers = [self._changed(pe, role, epoch, epochs, shape) for pe, role in zip(pes, roles, strict=True)]
        started = self._group.grow([self._spec(worker) for worker in workers], threads=self._threads)
        self._liveness.add(started)
        self._hold([*zip(self._workers, self._members, strict=True), *zip(workers, started, strict=True)])
        return pes

    def turn(self, roles: Mapping[int, Role], epoch: int) -> None:
        """These workers leave their peers, and are of another role next, in an epoch of their own."""
        shape, epochs = _shape_of({**self.roles, **roles}.values()), self._epochs(dict.fromkeys(roles, epoch))
        for number, worker in enumerate(self._workers):
            if worker.pe in roles:
                self._workers[number] = self._changed(worker.pe, roles[worker.pe], epoch, epochs, shape)
        self._let_go(roles)
        turned = [(member, worker) for worker, member in zip(self._workers, self._members, strict=True)
                  if worker.pe in roles]  # fmt: skip
        self._ask([member for member, _ in turned], "leave")
        for member, worker in turned:
            member.name = self._spec(worker).name
        self._results([member.call("rejoin", member.name, worker) for member, worker in turned])

    def seat(self, pes: Collection[int], epoch: int) -> None:
        """After restart(), add() or turn(): these workers load what they have not yet, and join the others."""
        new = {worker.pe: member for worker, member in zip(self._workers, self._members, strict=True)
               if worker.pe in pes}  # fmt: skip
        loading = [member for member in new.values() if member not in self._loads]
        self._loads |= {member: member.call("load") for member in loading}
        self._results([self._loads[member] for member in loading])
        if loading:
            self._agree(loading, self.num_pages)
        handles = dict(zip(new, self._open([*new.values()]), strict=True))
        others = {pe: member for pe, member in zip(self.roles, self._members, strict=True) if pe not in pes}
        offers = {pe: dict(zip(others, self._ask([*others.values()], "offer", pe, epoch), strict=True)) for pe in new}
        joins = [
            member.call("join", [handles.get(peer) or offers[pe].get(peer, b"") for peer in range(self._places)])
            for pe, member in new.items()
        ]
        self._results(joins)
        for pe in new:
            self._ask([*others.values()], "admit", pe, epoch, handles[pe])
        served = dict(zip(new, self._listen([*new.values()]), strict=True))
        known = {address.pe: address for address in self._addresses}
        for worker in self._workers:
            if worker.pe in served:
                known[worker.pe] = self._known(worker, served[worker.pe])
        self._addresses = tuple(known[pe] for pe in self.roles)

    def dismiss(self, pes: Collection[int]) -> None:
        """These workers leave: the others end all that they did with them, and the processes end. Their places are
        vacant, even where ProcessEnded is raised."""
        gone = self._at(pes)
        self._liveness.forget(gone)
        try:
            self._let_go(pes)
        finally:
            self._stop_gently(gone, LEAVE_SECONDS)
            self.drop(pes)

    def drop(self, pes: Collection[int]) -> None:
        """Kills these workers, which the others know no more or must not wait for. Idempotent."""
        assert self._group is not None, "launch() comes first"
        gone = self._at(pes)
        self._liveness.forget(gone)
        self._group.shrink(gone)
        for member in gone:
            self._loads.pop(member, None)
        pairs = zip(self._workers, self._members, strict=True)
        self._hold([(worker, member) for worker, member in pairs if worker.pe not in pes])
        self._addresses = tuple(address for address in self._addresses if address.pe not in pes)

    def share_cores(self) -> None:
        """Workers on CPUs count their threads anew, as many workers as there are now. Does not wait for it."""
        config, epochs = self._of_shape(self.shape), self._epochs({})
        for worker, member in zip(self._workers, self._members, strict=True):
            member.call("share_cores", *_shares(config, worker.role, self._network), epochs)

    def look(self) -> None:
        """Returns a moment later. ProcessEnded when a worker is lost."""
        self._liveness.wait(())

    def _join(self) -> None:
        vacant = self._places - len(self._workers)
        self._all("join", [*self._open(self._members), *[b""] * vacant])

    def _at(self, pes: Collection[int]) -> list[ActorProcess]:
        return [member for worker, member in zip(self._workers, self._members, strict=True) if worker.pe in pes]

    def _hold(self, pairs: Sequence[tuple[WorkerConfig, ActorProcess]]) -> None:
        """These are the workers, with their processes."""
        ordered = sorted(pairs, key=lambda pair: pair[0].pe)
        self._workers = [worker for worker, _ in ordered]
        self._members = [member for _, member in ordered]

    def _let_go(self, pes: Collection[int]) -> None:
        """All others part with all of these workers, also where ProcessEnded is raised: another one is lost. A worker
        that misses a peer for long ends."""
        others, lost = [member for member in self._members if member not in self._at(pes)], None
        for pe in pes:
            try:
                self._ask(others, "part", pe)
            except ProcessEnded as error:
                lost = error
        if lost is not None:
            raise lost

    def _epochs(self, changed: Mapping[int, int]) -> tuple[int, ...]:
        """Of each place, 0 where it is vacant."""
        known = {**{worker.pe: worker.epoch for worker in self._workers}, **changed}
        return tuple(known.get(pe, 0) for pe in range(self._places))

    def _changed(self, pe: int, role: Role, epoch: int, epochs: tuple[int, ...], shape: Shape) -> WorkerConfig:
        """A worker as it is configured where the island has that shape."""
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


def _shares(config: ClusterConfig, role: Role, network: Network) -> tuple[int, int | None]:
    """See WorkerConfig: workers_on_host and decode_workers, of a worker of that role."""
    decode_workers = config.island.num_decode if role == Role.DECODE else None
    return workers_on_host(config, network.num_hosts), decode_workers


def _shape_of(roles: Collection[Role]) -> Shape:
    return Shape(sum(role == Role.PREFILL for role in roles), sum(role == Role.DECODE for role in roles))
