"""Where actors and learner meet: the replay, the policy's weights, and who has to wait.

It lives in the learner's process, so that an actor that dies takes nothing with it. Actors call it
through `multiprocessing.managers`, whose server has one thread for each of them:

    address, key = serve(exchange)                  # in the learner's process
    exchange = connect(address, key)                # in an actor's
    exchange.insert(number, transitions, returns, version)
"""

import dataclasses
import secrets
import threading
from multiprocessing import managers

from d4pg.limiter import make_limiter
from d4pg.replay import make_replay


@dataclasses.dataclass
class Counters:
    """How far a run has come.

    Attributes:
        updates: learner updates.
        samples: sampled transitions.
        inserts: inserted transitions, as many as the actors have made steps.
        episodes: finished episodes of all actors.
        seconds: time that the run took, before it was resumed, too.
    """

    updates: int = 0
    samples: int = 0
    inserts: int = 0
    episodes: int = 0
    seconds: float = 0.0


class Exchange:
    """Holds what actors and learner share; every method may be called by any thread.

    Args:
        config: a `Config`.
        seed: seed of what is drawn from the replay.

    Attributes:
        config: the `Config`.
        counters: the `Counters`.
        last_seen: dict of actor number to the number of its calls of `insert`.
    """

    def __init__(self, config, seed=None):
        self.config = config
        self.counters = Counters()
        self.last_seen = {}
        self._replay = make_replay(config, seed)
        self._limiter = make_limiter(config)
        self._changed = threading.Condition()
        self._weights, self._version = None, -1
        self._returns, self._lags = [], []

    # --------------------------------------------------------------------- what actors call

    def get_config(self):
        """Returns the `Config`."""
        return self.config

    def fetch_weights(self, version=-1):
        """Returns `(version, weights)`; weights are None where the actor has this version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version >= 0)
            return self._version, None if version == self._version else self._weights

    def insert(self, actor, transitions, returns=(), version=0):
        """Inserts transitions; waits as long as the learner is behind.

        Args:
            actor: number of the actor.
            transitions: dict of arrays `[n, ...]`.
            returns: sums of rewards of the episodes that the actor has finished since the last
                call.
            version: of the weights that it acts with.
        """
        counters = self.counters
        with self._changed:
            self._changed.wait_for(
                lambda: self._limiter.may_insert(counters.inserts, counters.samples)
            )
            self._replay.insert(transitions)
            counters.inserts += len(transitions["reward"])
            counters.episodes += len(returns)
            self.last_seen[actor] = self.last_seen.get(actor, 0) + 1
            self._returns.extend((actor, value) for value in returns)
            self._lags.append(counters.updates - version)
            self._changed.notify_all()

    # ------------------------------------------------------------------ what the learner calls

    def sample(self, count, timeout=None):
        """Returns a `Batch`, or None when actors are behind for more than `timeout` seconds."""
        counters = self.counters
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._limiter.may_sample(counters.inserts, counters.samples, count),
                timeout,
            ):
                return None
            batch = self._replay.sample(count)
            counters.samples += count
            self._changed.notify_all()
            return batch

    def updated(self, batch, priorities):
        """Counts one update, and sets the priorities `[n]` of its rows."""
        with self._changed:
            self.counters.updates += 1
            self._replay.update_priorities(batch.keys, priorities)

    def publish(self, weights):
        """Shows actors the policy's weights; their version is the number of updates."""
        with self._changed:
            self._weights, self._version = weights, self.counters.updates
            self._changed.notify_all()

    def samples_per_insert(self):
        """Returns the ratio so far, counted from when learning began; 0 before."""
        with self._changed:
            inserts = self.counters.inserts - self.config.minimum
            return self.counters.samples / inserts if inserts > 0 else 0.0

    def take_news(self):
        """Returns `([(actor, return)], [updates behind])` since the last call."""
        with self._changed:
            news = self._returns, self._lags
            self._returns, self._lags = [], []
            return news

    # ------------------------------------------------------------------------------ checkpoints

    def save(self, path):
        """Writes the replay to a file, and returns the counters that belong to it as a dict."""
        with self._changed:
            self._replay.save(path)
            return dataclasses.asdict(self.counters)

    def load(self, path, counters):
        """Takes what `save` wrote and returned."""
        with self._changed:
            self._replay.load(path)
            for name, value in counters.items():
                setattr(self.counters, name, value)


_CALLS = ("get_config", "fetch_weights", "insert")


class _Manager(managers.BaseManager):
    pass


_Manager.register("exchange", exposed=_CALLS)


def serve(exchange, host="127.0.0.1"):
    """Lets actors of other processes call an exchange, as long as this process lives.

    Args:
        exchange: an `Exchange`.
        host: name or address of this machine under which they reach it.

    Returns:
        `(address, key)` for `connect`.
    """

    class Server(managers.BaseManager):
        pass

    Server.register("exchange", callable=lambda: exchange, exposed=_CALLS)
    key = secrets.token_bytes(16)
    server = Server((host, 0), key).get_server()
    threading.Thread(target=server.serve_forever, name="exchange", daemon=True).start()
    return server.address, key


def connect(address, key):
    """Returns a proxy of the exchange that another process serves.

    Args:
        address: `(host, port)`.
        key: bytes.
    """
    manager = _Manager(address, key)
    manager.connect()
    return manager.exchange()
