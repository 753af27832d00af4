"""One owner of the models, and the race: two lanes on one machine, in fair turns, for one visitor at a time.

Lanes share the machine without threads: the lane with the least engine time goes next, so both show the same moment
of their own clocks. A run holds the models by a lease. A consumer that went away (a closed tab leaves its generator
suspended) loses the lease to the next visitor; an error or a stop ends it at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

from . import comparison, methods
from .compared import Comparison
from .errors import BadRequest, ModelUnavailable, SpecdemoError
from .events import Event, Failed, Prefilled, Started, Verified
from .failures import failure_message
from .limits import OWN, Limits
from .models.loading import Pair
from .models.memory import free_memory, ran_out_of_memory
from .request import RaceRequest, Status, check_size
from .text import encode_prompt
from .worker import Hung, Worker

STANDARD, SPECULATIVE, SSD = "standard", "speculative", "ssd"
HUNG = "A race hung and was given up. The models are being loaded anew: try again in a minute."
GHOST_SECONDS = 3.0  # a consumer that asks for nothing this long, while another waits, is taken to be gone

Progress = Callable[[str, float], None]
Load = Callable[[Progress], Pair]
ShouldStop = Callable[[], bool]
T = TypeVar("T")


class _Lease:
    """One run's hold on the models. `idle_since` is set while the run is suspended, waiting for its consumer."""

    def __init__(self, visitor: str) -> None:
        self.visitor = visitor
        self.stop = threading.Event()
        self.lost = False
        self.idle_since: float | None = None
        self.run: Generator[object, None, None] | None = None

    def close(self) -> None:
        """End the run where it is suspended, so that it gives back what it holds."""
        run, self.run = self.run, None
        if run is not None:
            with suppress(Exception):
                run.close()


class _Cancelled(Exception):
    """Loading was given up by the user."""


class Arena:
    """Loads a pair, then serves races one at a time. `load` makes the pair; it is called by `start_loading`. `switch`
    puts another pair in its place."""

    def __init__(self, load: Load, limits: Limits = OWN) -> None:
        self.limits = limits
        self._load = load
        self._pair: Pair | None = None
        self._changed = threading.Condition()
        self._lease: _Lease | None = None
        self._loading = Status("loading", "Starting", 0.0)
        self._cancel = threading.Event()
        self._switches = 0  # asked for and not ended
        self._ran_out = False
        self._worker = Worker(limits.hung_seconds)
        self._hung = False  # a run was given up, and no pair has been loaded since
        self._one_load = threading.Lock()

    # -- models ------------------------------------------------------------------------------------------------

    def start_loading(self) -> threading.Thread:
        """Load in the background. The page is usable meanwhile; races wait for it."""
        thread = threading.Thread(target=self.load, name="load models", daemon=True)
        thread.start()
        return thread

    def load(self) -> None:
        """Load and warm up. A failure becomes the status, and the message of every race asked for."""
        self._set_loading(self._attempt(self._load))

    def start_switching(self, load: Load) -> threading.Thread:
        """`switch` in the background; `status` tells how far it is."""
        with self._changed:
            self._switches += 1

        def switch() -> None:
            try:
                self.switch(load)
            finally:
                with self._changed:
                    self._switches -= 1

        thread = threading.Thread(target=switch, name="switch models", daemon=True)
        thread.start()
        return thread

    def switch(self, load: Load) -> None:
        """Put the pair that `load` makes in place of the one that is there. The run in progress is stopped, and the old
        pair is released before the new one is loaded: both together may not fit. Where the new one cannot be had, or
        `cancel_loading` is called, the old one is loaded again, and the status says why."""
        with self._changed:
            if self._lease is not None:
                self._lease.stop.set()
        lease = self._acquire(visitor="")
        try:
            before, had_one = self._load, self._pair is not None
            self._release_pair()
            status = self._attempt(load)
            if status.state == "ready":
                self._load = load
            elif had_one:
                again = self._attempt(before)
                if again.state == "ready":
                    status = replace(again, message=f"{status.message} The pair before is back: {again.message}.")
                else:
                    status = replace(again, message=f"{status.message} {again.message}")
            self._set_loading(status)
        finally:
            self._release(lease)

    def cancel_loading(self) -> None:
        """Give up the loading in progress, at its next report of progress; without one, nothing happens."""
        if self.status.state == "loading":
            self._cancel.set()

    def _attempt(self, load: Load) -> Status:
        """Load and warm up; the status to tell of it. Of a pair that failed nothing is kept."""
        with self._one_load:
            return self._load_with(load)

    def _load_with(self, load: Load) -> Status:
        try:
            self._progress("Starting", 0.0)
            pair = load(self._progress)
            self._progress("Warming up", 1.0)
            self.warm_up(pair)
        except SpecdemoError as error:
            message = str(error)
        except _Cancelled:
            message = "Loading was cancelled."
        except Exception as error:
            message = f"The models could not be loaded ({type(error).__name__}: {error})."
        else:
            self._pair, self._ran_out, self._hung = pair, False, False
            return Status("ready", f"{pair.target.name} is ready")
        finally:
            self._cancel.clear()
        free_memory()
        return Status("failed", message)

    def _release_pair(self) -> None:
        self._pair = None
        free_memory()

    def _progress(self, text: str, share: float) -> None:
        if self._cancel.is_set():
            raise _Cancelled
        self._set_loading(Status("loading", text, share))

    def _set_loading(self, status: Status) -> None:
        with self._changed:
            self._loading = status
            self._changed.notify_all()

    @property
    def pair(self) -> Pair | None:
        return self._pair

    @property
    def ran_out(self) -> bool:
        """Whether memory ran out in a race of the pair that is there; `pair.smaller` is then what may help."""
        return self._ran_out

    @property
    def status(self) -> Status:
        with self._changed:
            if self._switches and self._loading.state != "loading":
                return Status("loading", "Starting", 0.0)  # once the race in progress has stopped
            if self._loading.state == "ready" and self._lease is not None:
                return Status("busy", "A race is running")
            return self._loading

    @property
    def health(self) -> Literal["loading", "ready", "busy", "broken"]:
        """For whoever watches over the process. Broken: no race can run, and none will without help."""
        state = self.status.state
        return "broken" if state == "failed" or self._hung else state

    # -- races -------------------------------------------------------------------------------------------------

    def check(self, request: RaceRequest) -> None:
        """Whether a race may be asked for, as far as it can be told without the models. Raises BadRequest."""
        check_size(request, self.limits)
        if request.method == STANDARD:
            raise BadRequest("The standard lane always runs: choose a speculative method to race against it.")
        if request.method not in methods.METHODS:
            known = ", ".join(name for name in methods.METHODS if name != STANDARD)
            raise BadRequest(f"There is no method {request.method!r}: choose one of {known}.")

    def race(self, request: RaceRequest, visitor: str = "") -> Iterator[Event]:
        """All lanes' events as they happen, ending after each lane's Finished or Failed.

        Waits for the models and for the run before. Raises SpecdemoError before the first event for a request that
        cannot be served. Closing the generator, `stop`, and the limits end the run and release the models.
        """
        self.check(request)
        yield from self._hold(visitor, partial(self.lanes, request))

    def compare(self, request: RaceRequest, visitor: str = "") -> Iterator[Comparison]:
        """Every method that can run, one after the other on the request's prompt; its own method is left aside. Waits,
        refuses and ends like `race`."""
        self.check(request)
        yield from self._hold(visitor, partial(self.rows, request))

    def lanes(self, request: RaceRequest, pair: Pair, should_stop: ShouldStop) -> Generator[Event, None, None]:
        """A race's events, for a caller who holds the models. Raises BadRequest before the first."""
        ids = encode_prompt(pair.tokenizer, request.prompt, request.raw)
        return in_turns(
            {
                lane: methods.run(pair, name, ids, request.settings, lane=lane, should_stop=should_stop)
                for lane, name in lanes_of(pair, request.method).items()
            },
            smaller=f"load {pair.smaller.plan.described}" if pair.smaller else "use a smaller model",
            ran_out=self._note_that_memory_ran_out,
        )

    def rows(self, request: RaceRequest, pair: Pair, should_stop: ShouldStop) -> Generator[Comparison, None, None]:
        """A comparison's rows, likewise."""
        ids = encode_prompt(pair.tokenizer, request.prompt, request.raw)
        return comparison.compare(pair, ids, request.settings, should_stop)

    def warm_up(self, pair: Pair) -> None:
        """Run everything once, so that no race pays for what happens once."""
        methods.warm_up(pair, encode_prompt(pair.tokenizer, "Hello", raw=True))

    def _note_that_memory_ran_out(self) -> None:
        self._ran_out = True

    def _hold(
        self, visitor: str, start: Callable[[Pair, ShouldStop], Generator[T, None, None]]
    ) -> Generator[T, None, None]:
        """What a run yields, while it holds the models. `start` makes the run, once it is its turn."""
        self._ready_pair()
        lease = self._acquire(visitor)
        try:
            pair = self._ready_pair()  # another one, if it was switched meanwhile
            deadline = time.monotonic() + self.limits.seconds
            run = self._worker.steps(start(pair, lambda: lease.stop.is_set() or time.monotonic() > deadline))
            lease.run = run
            for item in run:
                lease.idle_since = time.monotonic()
                yield item
                with self._changed:
                    if lease.lost:
                        return
                    lease.idle_since = None
        except Hung:
            self._load_anew()
            raise ModelUnavailable(HUNG) from None
        finally:
            self._release(lease)

    def _load_anew(self) -> None:
        """What a hung run was using is in nobody knows what state, and its thread is lost."""
        self._hung, self._pair = True, None
        self._set_loading(Status("loading", HUNG, 0.0))
        self.start_loading()

    def stop(self, visitor: str = "") -> bool:
        """End the visitor's run within one round, with finish reason "cancelled". Whether there was one."""
        with self._changed:
            lease = self._lease
            if lease is None or lease.visitor != visitor:
                return False
            lease.stop.set()
            return True

    def _ready_pair(self) -> Pair:
        with self._changed:
            self._changed.wait_for(lambda: self._loading.state != "loading")
            if self._pair is None:
                raise ModelUnavailable(self._loading.message)
            return self._pair

    def _acquire(self, visitor: str) -> _Lease:
        with self._changed:
            while (holder := self._lease) is not None:
                idle = holder.idle_since
                if idle is not None and time.monotonic() - idle > GHOST_SECONDS:
                    holder.lost = True
                    holder.close()
                    break
                self._changed.wait(timeout=0.1)
            self._lease = _Lease(visitor)
            return self._lease

    def _release(self, lease: _Lease) -> None:
        with self._changed:
            if not lease.lost:
                lease.close()
            if self._lease is lease:
                self._lease = None
            self._changed.notify_all()


def lanes_of(pair: Pair, method: str) -> dict[str, str]:
    """The lanes of a race and the method of each. Where SSD runs, what it has to beat runs beside it: speculative
    decoding with the same draft model and all cores. Raises BadRequest for an unknown method."""
    if methods.resolve(pair, method)[0].name == SSD:
        return {STANDARD: STANDARD, SPECULATIVE: SPECULATIVE, SSD: SSD}
    return {STANDARD: STANDARD, SPECULATIVE: method}


def in_turns(
    lanes: Mapping[str, Iterator[Event]],
    smaller: str = "use a smaller model",
    ran_out: Callable[[], None] = lambda: None,
) -> Generator[Event, None, None]:
    """Merge lanes: the one with the least engine time goes next, for one round. A lane that fails ends with a Failed
    event, and the others go on. smaller: what a lane is told to do that ran out of memory; `ran_out` is called then."""
    clocks = dict.fromkeys(lanes, 0.0)
    try:
        while clocks:
            lane = min(clocks, key=clocks.__getitem__)
            failed = None
            try:
                for event in lanes[lane]:
                    clocks[lane] = event.t
                    yield event
                    if isinstance(event, Started | Prefilled | Verified):
                        break
                else:
                    del clocks[lane]
            except Exception as error:
                failed = Failed(lane, clocks.pop(lane), failure_message(error, smaller))
                short = ran_out_of_memory(error)
            if failed is not None:
                if short:  # only now: while an error is being handled, it holds on to what its frames had made
                    free_memory()
                    ran_out()
                yield failed
    finally:
        for running in lanes.values():
            if isinstance(running, Generator):
                with suppress(Exception):
                    running.close()
