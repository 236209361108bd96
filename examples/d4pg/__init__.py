"""D4PG: a distributed distributional deterministic policy gradient agent, learning on replicas."""
