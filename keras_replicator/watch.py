"""Who of a job is alive: every worker asks every other one, again and again.

    watch = Watch(peers={1: "/job:worker/replica:0/task:1"}, worker=0, timeout=60, ask=…, abort=…)
    watch.start()
    ...
    watch.culprits()        # after a collective has failed: (1,)

TensorFlow's own errors name whoever a broken connection led to, which may be a worker that was
itself waiting for the lost one, and has ended because of it. What counts here is who fell silent
*first*. A worker that notices a loss therefore stays for a while (`farewell`), so that the others
hear it longer than they heard the lost one.
"""

import atexit
import threading
import time

# Seconds between two questions to a peer.
INTERVAL = 0.5


class Watch:
    """Asks the other workers in a thread, and ends collectives that wait for a silent one.

    Args:
        peers: Dict of the names of the other tasks, by worker number.
        worker: Number of this worker.
        timeout: Seconds within which a loss is to be noticed and said.
        ask: `ask(task, seconds)` returns True (it answers), False (nobody is there) or None
            (no answer in time).
        abort: `abort(message)` makes all collectives of this process fail, pending ones too.
        clock: Function that returns seconds.
    """

    def __init__(self, *, peers, worker, timeout, ask, abort, clock=time.monotonic):
        self.peers = dict(peers)
        self.worker = worker
        # A peer that is silent for so long is lost, although nothing else tells of it.
        self.limit = 0.35 * timeout
        # How long a peer may take to answer one question.
        self.patience = min(3.0, timeout / 10)
        # How long a worker that has noticed a loss stays to be heard.
        self.stay = min(4.0, timeout / 8)
        # Losses that lie closer together are one event: a cut network, a machine that went down.
        self.together = self.stay / 2
        self._ask = ask
        self._abort = abort
        self._clock = clock
        now = clock()
        self._heard = dict.fromkeys(peers, now)
        self._gone = {}  # worker -> since when nobody is there
        self._aborted = False
        self._stopping = threading.Event()
        self._threads = []

    def start(self):
        """Begins to ask; ends with the process, or by `stop`."""
        now = self._clock()
        self._heard = dict.fromkeys(self.peers, now)
        for peer in self.peers:
            thread = threading.Thread(
                target=self._ask_on,
                args=(peer,),
                name=f"keras_replicator-watch-{peer}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        atexit.register(self.stop)

    def stop(self):
        """Stops asking."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(self.patience)

    def _ask_on(self, peer):
        while not self._stopping.is_set():
            self.ask(peer)
            self._stopping.wait(max(INTERVAL, len(self.peers) / 50))

    def ask(self, peer):
        """Asks one peer once, and ends waiting collectives when it has been silent too long."""
        answer = self._ask(self.peers[peer], self.patience)
        now = self._clock()
        if answer:
            self._heard[peer] = now
            self._gone.pop(peer, None)
        elif answer is False:
            self._gone.setdefault(peer, now)
        if now - self._heard[peer] > self.limit and not self._aborted:
            self._aborted = True
            self._abort(f"worker {peer} has been silent for {now - self._heard[peer]:.0f} seconds")

    def silent(self):
        """Returns `{worker: seconds since its last answer}` of those that do not answer now."""
        now = self._clock()
        late = INTERVAL + self.patience
        return {
            peer: now - heard
            for peer, heard in self._heard.items()
            if peer in self._gone or now - heard > late
        }

    @property
    def lost(self):
        """Whether a peer is not there any more, or has been silent for too long."""
        return self._aborted or bool(self._gone)

    def culprits(self):
        """Returns the workers that fell silent first, in order; empty when all of them answer.

        Waits until each of them was asked again.
        """
        deadline = self._clock() + 2 * INTERVAL + self.patience
        while not (silent := self.silent()) and self._clock() < deadline:
            if self._stopping.wait(INTERVAL / 5):
                break
        if not silent:
            return ()
        self._stopping.wait(INTERVAL)  # what was lost at the same time is seen by now
        silent = self.silent() or silent
        if any(peer in self._gone for peer in silent):
            # Beside a peer that is gone, one that is only slow to answer is not lost.
            silent = {
                peer: seconds
                for peer, seconds in silent.items()
                if peer in self._gone or seconds > self.limit / 2
            }
        longest = max(silent.values())
        return tuple(
            sorted(peer for peer, seconds in silent.items() if longest - seconds < self.together)
        )

    def farewell(self):
        """Stays to be heard by the others, before this worker ends because of a loss."""
        self._stopping.wait(self.stay)
