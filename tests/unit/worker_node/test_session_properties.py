"""The session under random orders of events: a small world that answers, loses, delays and repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.wire.messages import SlotRefusal
from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.session import EXIT_FENCED
from worker_node.domain.weights import Version


class World:
    """Coordinator, network and engine around one session; hypothesis decides what happens next."""

    def __init__(self, driver: Any, choose: st.DataObject, make: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
        self.d = driver
        self.choose = choose
        self.make_lease, self.make_completion = make
        self.open: list[do.Instruction] = []  # ordered and not yet answered
        self.asked: dict[int, int] = {}  # id of an open manifest order -> the session it was ordered in
        self.opened = False  # the coordinator has opened the session of the join under way; its reply is still on the way
        self.fetching: Version | None = None
        self.swapping: Version | None = None
        self.engine: Version | None = None
        self.spans: dict[tuple[str, int], list[int]] = {}  # running slots and their version spans
        self.finished: dict[tuple[str, int], bool] = {}  # given to the session -> settled or lost with a reason
        self.ended: set[str] = set()  # leases that ended by an order, a refusal, or with their session
        self.tainted: set[Version] = set()
        self.confirmed: set[Version] = set()
        self.newest = 0
        self.epoch = 0
        self.leases = 0
        self.stopped = False

    def pick(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.choose.draw(strategy)

    def tell(self, event: ev.Event) -> None:
        for instruction in self.d.tell(event):
            self.obey(instruction)
        due = self.d.session.next_deadline()
        assert (due is None) == self.stopped, "a session has a next deadline until it stopped"
        assert due is None or due > self.d.now, "and it lies ahead"

    def obey(self, instruction: do.Instruction) -> None:
        assert not self.stopped, "nothing is ordered after Stop"
        match instruction:
            case do.SendJoin():
                assert not any(isinstance(other, do.SendJoin) for other in self.open), "never two joins"
            case do.FetchManifest(version):
                assert self.fetching is None, "never two fetches"
                self.fetching = version
                self.asked[id(instruction)] = self.epoch
            case do.StopFetch(version):
                assert self.fetching == version, "only what runs is stopped"
                self.open = [other for other in self.open if other != do.FetchPieces(version)]
                self.fetching = None
                return
            case do.FetchPieces(version):
                assert self.fetching in (None, version), "never two fetches"
                self.fetching = version
            case do.SwapWeights(version):
                assert self.swapping is None, "never two swaps"
                self.swapping = version
            case do.AskLease(version=version):
                assert version in self.confirmed, "work is asked for with confirmed versions only"
            case do.SendBeat(held=held):
                assert set(held) <= self.confirmed, "only confirmed versions are advertised"
            case do.SubmitCompletions():
                assert {Version("job", n, d) for n, d in instruction.digests} <= self.confirmed
            case do.StartGeneration(requests):
                for request in requests:
                    assert request.key not in self.spans, "a slot runs once at a time"
                    self.spans[request.key] = []
                return
            case do.AbortGeneration(lease_id, slots):
                for slot in slots:
                    self.spans.pop((lease_id, slot), None)
                return
            case do.Stop():
                assert instruction.exit_code != EXIT_FENCED, "a worker does not fence itself"
                self.stopped = True
                return
            case do.DropVersions(versions):
                assert self.swapping not in versions, "the engine may be reading it"
                return
        self.open.append(instruction)

    def step(self) -> None:
        actions = [self.wake, self.generate, self.answer, self.answer, self.answer, self.trouble]
        self.pick(st.sampled_from(actions))()

    def wake(self) -> None:
        due = self.d.session.next_deadline()
        if due < self.d.now + 60.0 and self.pick(st.booleans()):  # every call reports within its own deadline
            self.d.now = max(self.d.now, due)
        else:
            self.d.now += self.pick(st.floats(0.001, 5.0))
        self.tell(ev.Woke())

    def generate(self) -> None:
        """A decode step: every running slot gets a token, some finish."""
        if self.engine is None:
            return
        for key in list(self.spans):
            self.spans[key].append(self.engine.number)
            if len(self.spans[key]) >= 3 or self.pick(st.booleans()):
                numbers = tuple(self.spans.pop(key))
                self.finished[key] = False
                self.tell(ev.CompletionFinished(key[0], key[1], self.make_completion(numbers)))
                if self.stopped:
                    return

    def trouble(self) -> None:
        if self.pick(st.integers(0, 9)) == 0:
            self.tell(self.pick(st.sampled_from([ev.DrainRequested("stop"), ev.EngineFailed("dead"), ev.Left()])))
            self.ended |= {key[0] for key in self.finished} if self.stopped else set()

    def answer(self) -> None:
        """Answer, or fail, one open instruction."""
        if not self.open:
            return
        instruction = self.open.pop(self.pick(st.integers(0, len(self.open) - 1)))
        fails = self.pick(st.integers(0, 3)) == 0
        match instruction:
            case do.SendJoin():
                self.join(instruction, fails)
            case do.SendBeat():
                self.tell(self.failure(ev.Call.BEAT, instruction.epoch) if fails else self.orders())
            case do.AskLease():
                self.tell(self.failure(ev.Call.LEASE, instruction.epoch) if fails else self.grants(instruction))
            case do.FetchManifest(version):
                asked = self.asked.pop(id(instruction))
                if fails and asked == self.epoch:
                    self.fetching = None
                self.tell(self.failure(ev.Call.MANIFEST, asked) if fails else ev.ManifestArrived(version))
            case do.Weigh(version):
                self.tell(ev.Weighed(version, left=self.pick(st.integers(0, 2)), jump=self.pick(st.integers(0, 2))))
            case do.FetchPieces(version):
                self.fetching = None
                self.tell(ev.FetchFailed(version, "lost") if fails else ev.FetchFinished(version, 1, 0, 1.0))
            case do.SwapWeights():
                self.swap(instruction, fails)
            case do.SendConfirm(version=version):
                self.confirm(instruction, version, fails)
            case do.SubmitCompletions():
                self.settle(instruction, fails)
            case do.SendLeave():
                self.tell(self.failure(ev.Call.LEAVE, instruction.epoch) if fails else ev.Left())

    def join(self, instruction: do.SendJoin, fails: bool) -> None:
        """The coordinator opens the session first; its reply comes later, and meanwhile old calls are told that they are old."""
        if fails and not self.opened:
            self.tell(self.failure(ev.Call.JOIN, 0))
        elif not self.opened:
            self.opened = True
            self.epoch += 1
            self.confirmed = set()
            self.open.append(instruction)
        else:
            self.opened = False
            self.forget_manifests()
            self.tell(ev.Joined("w", self.epoch, 10.0))

    def forget_manifests(self) -> None:
        """A manifest of the old session may still come, but nobody waits for it."""
        if any(isinstance(other, do.FetchManifest) for other in self.open):
            self.fetching = None

    def failure(self, call: ev.Call, epoch: int, lease_id: str = "") -> ev.CallFailed:
        outcome = ev.Outcome.TRY_AGAIN
        if epoch not in (0, self.epoch):
            outcome = ev.Outcome.FENCED
        if call is ev.Call.BEAT and self.pick(st.integers(0, 4)) == 0 and epoch == self.epoch:
            outcome = ev.Outcome.REJOIN
            self.ended |= {f"L{n}" for n in range(self.leases)}
        return ev.CallFailed(call, outcome, "lost", "lost", epoch=epoch, lease_id=lease_id)

    def orders(self) -> ev.BeatAnswered:
        self.newest += self.pick(st.integers(0, 1))
        cancelled = ()
        if self.leases and self.pick(st.integers(0, 4)) == 0:
            victim = f"L{self.pick(st.integers(0, self.leases - 1))}"
            self.ended.add(victim)
            cancelled = (ev.CancelledLease(victim, "cancelled"),)
        return ev.BeatAnswered("active", "", 10.0, (Version("job", self.newest, f"{self.newest:064x}"),), cancelled)

    def grants(self, ask: do.AskLease) -> ev.LeaseAnswered:
        leases = []
        for _ in range(self.pick(st.integers(0, 2))):
            one = self.make_lease(
                f"L{self.leases}",
                slots=(0, 1, 2),
                on_update=self.pick(st.sampled_from(["keep", "abort"])),
                version=ask.version.number,
            )
            self.leases += 1
            leases.append(ev.GrantedLease(one, self.d.now + 1e9))
        return ev.LeaseAnswered(ask.epoch, tuple(leases), "", 0.0)

    def swap(self, swap: do.SwapWeights, fails: bool) -> None:
        self.swapping = None
        if fails:
            self.tell(ev.SwapFailed(swap.version, "no"))
            return
        self.engine = swap.version
        if swap.abort_running:
            for key in list(self.spans):
                del self.spans[key]
                self.tell(ev.CompletionAborted(*key))
        self.tell(ev.SwapFinished(swap.version, (-1.0,), 0.1))

    def confirm(self, confirm: do.SendConfirm, version: Version, fails: bool) -> None:
        if fails:
            self.tell(self.failure(ev.Call.CONFIRM, confirm.epoch))
        elif confirm.epoch != self.epoch:
            self.tell(ev.ConfirmAnswered(version, accepted=True, reason="of a session that is over", epoch=confirm.epoch))
        elif self.pick(st.integers(0, 4)) == 0:
            self.tainted.add(version)
            for key in [key for key, settled in self.finished.items() if not settled]:
                self.finished.pop(key)  # may hold tokens of the refused weights: it is made again
            self.tell(ev.ConfirmAnswered(version, accepted=False, reason="wrong"))
        else:
            self.confirmed.add(version)
            self.tell(ev.ConfirmAnswered(version, accepted=True, reason=""))

    def settle(self, submission: do.SubmitCompletions, fails: bool) -> None:
        slots = [slot for slot, _ in submission.completions]
        if fails:
            self.tell(self.failure(ev.Call.SUBMIT, submission.epoch, submission.lease_id))
            return
        cut = self.pick(st.integers(0, len(slots)))
        refused = tuple(SlotRefusal(slot=s, code="no", reason="no", blame="worker", paid=False) for s in slots[cut:])
        for slot in slots:
            self.finished[submission.lease_id, slot] = True
        self.tell(ev.SubmitAnswered(submission.lease_id, tuple(slots[:cut]), refused))


@given(st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_no_completion_of_a_live_lease_is_lost(
    drive: Callable[..., Any], make_lease: Callable[..., Any], make_completion: Callable[..., Any], data: st.DataObject
) -> None:
    """Whatever the order of events: one fetch, one swap, confirmed versions only, always a deadline, and in the end every
    completion was answered for or its lease ended."""
    world = World(drive(slots=6, tries_a_version=50, silence_s=1e6, swap_s=1e6), data, (make_lease, make_completion))
    world.tell(ev.Woke())
    for _ in range(data.draw(st.integers(5, 60))):
        if world.stopped:
            return
        world.step()
    if world.stopped:
        return
    quiet(world)
    lost = [key for key, settled in world.finished.items() if not settled and key[0] not in world.ended]
    if not world.stopped:
        assert lost == []


def quiet(world: World) -> None:
    """From now on everything is answered well; the session must come to rest, nothing unsent, with the newest version loaded."""
    newest = Version("job", world.newest, f"{world.newest:064x}")
    for _ in range(400):
        report = world.d.session.report()
        if world.stopped or (not report.unsent and not world.open and report.loaded == str(newest)):
            return
        if world.open:
            answer_well(world, world.open.pop(0))
        else:
            world.d.now = max(world.d.now, world.d.session.next_deadline())
            world.tell(ev.Woke())
    raise AssertionError(f"the session does not come to rest: {world.d.session.report()}")


def answer_well(world: World, instruction: do.Instruction) -> None:
    match instruction:
        case do.SendJoin():
            world.join(instruction, fails=False)
        case do.SendBeat():
            world.tell(ev.BeatAnswered("active", "", 10.0, (Version("job", world.newest, f"{world.newest:064x}"),)))
        case do.AskLease():
            world.tell(ev.LeaseAnswered(instruction.epoch, (), "none", 5.0))
        case do.FetchManifest(version):
            world.tell(ev.ManifestArrived(version))
        case do.FetchPieces(version):
            world.fetching = None
            world.tell(ev.FetchFinished(version, 1, 0, 1.0))
        case do.SwapWeights():
            world.swap(instruction, fails=False)
        case do.SendConfirm(version=version):
            if instruction.epoch == world.epoch:
                world.confirmed.add(version)
                world.tell(ev.ConfirmAnswered(version, accepted=True, reason=""))
        case do.SubmitCompletions():
            for slot, _ in instruction.completions:
                world.finished[instruction.lease_id, slot] = True
            world.tell(ev.SubmitAnswered(instruction.lease_id, tuple(slot for slot, _ in instruction.completions)))
        case do.SendLeave():
            world.tell(ev.Left())
