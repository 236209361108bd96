"""What an agent acts in: a `dm_env` environment, as arrays, with actions in -1 to 1."""

import collections
import dataclasses

import dm_env
import numpy as np
from dm_env import specs

IMAGE_SIZE = 64  # pixels, both ways
STACKED_IMAGES = 3  # one image shows no speed


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shapes of one environment.

    Attributes:
        observation_shape: `(n,)` of float32, or `(height, width, channels)` of uint8.
        action_size: number of actions.
    """

    observation_shape: tuple
    action_size: int


def make_environment(config, seed=None):
    """Returns the `Environment` of a `Config`.

    Raises:
        ValueError: when there is no task of that name.
    """
    kind, *names = config.task.split(":")
    if kind == "reach" and not names:
        environment = Reach(seed, config.pixels)
    elif kind == "control" and len(names) == 2:
        environment = _load_control(*names, seed, config.pixels)
    else:
        raise ValueError(
            "`task` must be 'reach' or 'control:DOMAIN:TASK', such as 'control:cartpole:swingup'. "
            f"Received: task={config.task!r}"
        )
    return Environment(environment, config.action_repeat, config.pixels)


def _load_control(domain, task, seed, pixels):
    try:
        from dm_control import suite
        from dm_control.suite.wrappers import pixels as images
    except ImportError as error:
        raise ImportError(
            "Tasks of dm-control need it installed: pip install 'keras_replicator[control]'."
        ) from error
    environment = suite.load(domain, task, task_kwargs={"random": seed})
    if pixels:
        size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE, "camera_id": 0}
        environment = images.Wrapper(environment, render_kwargs=size)
    return environment


class Environment:
    """A `dm_env.Environment` as an agent sees it.

    States are one float32 vector, images are stacked along their channels. Actions in -1 to 1
    become those of the action spec, and each is taken `action_repeat` times.

    Args:
        environment: a `dm_env.Environment` with a bounded action spec.
        action_repeat: steps that take the same action; their rewards are added up.
        pixels: whether observations are images, under the key "pixels".
    """

    def __init__(self, environment, action_repeat=1, pixels=False):
        self._environment = environment
        self._action_repeat = action_repeat
        self._images = collections.deque(maxlen=STACKED_IMAGES) if pixels else None
        action = environment.action_spec()
        self._low = np.broadcast_to(action.minimum, action.shape)
        self._high = np.broadcast_to(action.maximum, action.shape)
        self._dtype = action.dtype
        shapes = environment.observation_spec()
        if pixels:
            height, width, channels = shapes["pixels"].shape
            observation_shape = (height, width, channels * STACKED_IMAGES)
        else:
            observation_shape = (sum(int(np.prod(part.shape)) for part in shapes.values()),)
        self.spec = Spec(observation_shape, int(np.prod(action.shape)))

    def reset(self):
        """Begins an episode and returns the first observation."""
        if self._images is not None:
            self._images.clear()
        return self._seen(self._environment.reset().observation)

    def step(self, action):
        """Acts.

        Args:
            action: `[action_size]` in -1 to 1.

        Returns:
            `(observation, reward, discount, last)`.
        """
        share = (np.clip(action, -1.0, 1.0).reshape(self._low.shape) + 1.0) / 2.0
        scaled = (self._low + share * (self._high - self._low)).astype(self._dtype)
        reward, discount = 0.0, 1.0
        for _ in range(self._action_repeat):
            step = self._environment.step(scaled)
            reward += discount * (step.reward or 0.0)
            discount *= step.discount
            if step.last():
                break
        return self._seen(step.observation), reward, discount, step.last()

    def render(self, size=160):
        """Returns an image `[height, width, 3]` of uint8."""
        physics = getattr(self._environment, "physics", None)
        if physics is None:
            return self._environment.render(size)
        return physics.render(height=size, width=size, camera_id=0)

    def _seen(self, observation):
        if self._images is None:
            parts = [np.ravel(part) for part in observation.values()]
            return np.concatenate(parts).astype(np.float32)
        self._images.append(observation["pixels"])
        first = [self._images[0]] * (STACKED_IMAGES - len(self._images))
        return np.concatenate([*first, *self._images], axis=-1)


class Reach(dm_env.Environment):
    """A point on a line that has to be moved to a target: 20 steps, rewards of 0 to 1.

    It shows itself as numbers or as an image, so that an agent can be tried without a simulator.

    Args:
        seed: seed of where point and target are in the beginning.
        pixels: whether observations are images.
    """

    _LENGTH = 20
    _SPEED = 0.25

    def __init__(self, seed=None, pixels=False):
        self._random = np.random.default_rng(seed)
        self._pixels = pixels
        self._point = self._target = 0.0
        self._steps = 0

    def reset(self):
        self._point, self._target = self._random.uniform(-1.0, 1.0, 2)
        self._steps = 0
        return dm_env.restart(self._observation())

    def step(self, action):
        self._point = float(np.clip(self._point + self._SPEED * action[0], -1.0, 1.0))
        self._steps += 1
        reward = 1.0 - min(abs(self._point - self._target), 1.0)
        if self._steps == self._LENGTH:
            return dm_env.truncation(reward, self._observation())
        return dm_env.transition(reward, self._observation())

    def observation_spec(self):
        if self._pixels:
            return {"pixels": specs.BoundedArray((16, 16, 3), np.uint8, 0, 255, "pixels")}
        return {
            name: specs.BoundedArray((1,), np.float64, -1.0, 1.0, name)
            for name in ("point", "target")
        }

    def action_spec(self):
        return specs.BoundedArray((1,), np.float64, -1.0, 1.0, "velocity")

    def render(self, size):
        """Returns an image: the target above, the point below."""
        image = np.zeros((size, size, 3), np.uint8)
        half, width = size // 2, max(size // 8, 1)
        for channel, rows, place in (
            (0, slice(0, half), self._target),
            (1, slice(half, size), self._point),
        ):
            begin = int((place + 1.0) / 2.0 * (size - width))
            image[rows, begin : begin + width, channel] = 255
        return image

    def _observation(self):
        if self._pixels:
            return {"pixels": self.render(16)}
        return {"point": np.array([self._point]), "target": np.array([self._target])}
