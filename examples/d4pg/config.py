"""Every number of the agent, and presets.

The defaults are those of DeepMind's own open agent; the paper is Barth-Maron et al. 2018
(arXiv 1804.08617).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and numbers of one agent on one task.

    Args:
        task: "reach", or "control:DOMAIN:TASK" for one of dm-control.
        updates: learner updates of a run.
        pixels: whether the agent sees images instead of the state.
        action_repeat: environment steps that take the same action; their rewards are added up.
        policy_sizes: units of the policy's layers.
        critic_sizes: units of the critic's layers.
        atoms: atoms of the critic's distribution.
        v_min: value of the first atom.
        v_max: value of the last atom; the discounted sum of the largest rewards.
        discount: factor by which a reward loses value per step of the agent.
        n_step: rewards that a transition adds up.
        batch_size: rows of a global batch, over all replicas.
        policy_learning_rate: of Adam.
        critic_learning_rate: of Adam.
        decay_from: share of the run after which both learning rates fall linearly, to 0 at its end;
            1 keeps them.
        clip_norm: largest global norm of each of the two averaged gradients.
        target_period: updates between copies to the target networks.
        capacity: transitions that the replay holds; the oldest go first.
        minimum: transitions in the replay before learning begins.
        samples_per_insert: how often a transition is sampled, on average.
        prioritised: whether transitions are drawn by priority.
        priority_exponent: 0 draws uniformly, 1 in proportion to the priority.
        importance_exponent: how much importance weights make up for it; 1 entirely.
        noise: standard deviation of the exploration noise, where actions are in -1 to 1.
        actors: processes that act.
        fetch_every: steps of an actor between two fetches of the policy's weights.
        insert_every: transitions that an actor hands over at once.
        publish_every: updates after which the learner shows actors new weights.
        evaluate_every: updates between evaluations.
        evaluation_episodes: episodes without noise of one evaluation.
        checkpoint_every: updates between checkpoints.
    """

    task: str
    updates: int
    pixels: bool = False
    action_repeat: int = 1
    policy_sizes: tuple = (256, 256, 256)
    critic_sizes: tuple = (512, 512, 256)
    atoms: int = 51
    v_min: float = -150.0
    v_max: float = 150.0
    discount: float = 0.99
    n_step: int = 5
    batch_size: int = 256
    policy_learning_rate: float = 1e-4
    critic_learning_rate: float = 1e-4
    decay_from: float = 1.0
    clip_norm: float = 40.0
    target_period: int = 100
    capacity: int = 1_000_000
    minimum: int = 1_000
    samples_per_insert: float = 32.0
    prioritised: bool = False
    priority_exponent: float = 0.6
    importance_exponent: float = 1.0
    noise: float = 0.3
    actors: int = 2
    fetch_every: int = 1_000
    insert_every: int = 20
    publish_every: int = 10
    evaluate_every: int = 2_000
    evaluation_episodes: int = 10
    checkpoint_every: int = 5_000


PRESETS = {
    # The sizes and numbers of DeepMind's open agent.
    "published": Config(task="control:cartpole:swingup", updates=1_000_000, actors=4),
    # Those that the paper gives where it differs: smaller layers, prioritised replay, 32 actors.
    # Importance weights (R p)^-1 are the paper's; the exponent of priorities is that of Ape-X.
    "paper": Config(
        task="control:cartpole:swingup",
        updates=1_000_000,
        policy_sizes=(300, 200),
        critic_sizes=(400, 300),
        prioritised=True,
        actors=32,
    ),
    # From images of 64 x 64, three in a row; the replay of 10^5 takes 7 GB.
    "pixels": Config(
        task="control:cartpole:swingup",
        updates=1_000_000,
        pixels=True,
        action_repeat=2,
        v_min=0.0,
        v_max=200.0,
        capacity=100_000,
        actors=8,
    ),
    # Minutes on two CPU cores: small layers, actions that last four steps, and learning rates that
    # are high in the beginning and fall, so that the policy comes to rest.
    # 4 steps with a reward of at most 1 give a value of at most 4 / (1 - 0.99) = 400.
    "cpu": Config(
        task="control:cartpole:swingup",
        updates=50_000,
        action_repeat=4,
        policy_sizes=(64, 64),
        critic_sizes=(128, 128),
        v_min=0.0,
        v_max=400.0,
        policy_learning_rate=5e-4,
        critic_learning_rate=1e-3,
        decay_from=0.4,
        batch_size=128,
        samples_per_insert=128.0,
        fetch_every=50,
        checkpoint_every=5_000,
    ),
    # Some seconds, to see that everything runs: a point that has to be moved to a target.
    "smoke": Config(
        task="reach",
        updates=400,
        policy_sizes=(16, 16),
        critic_sizes=(32, 32),
        v_min=0.0,
        v_max=20.0,
        discount=0.9,
        policy_learning_rate=2e-3,
        critic_learning_rate=5e-3,
        batch_size=32,
        target_period=20,
        capacity=10_000,
        minimum=200,
        samples_per_insert=16.0,
        prioritised=True,
        fetch_every=20,
        evaluate_every=200,
        checkpoint_every=100,
    ),
}
