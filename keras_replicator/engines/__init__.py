"""How steps run on a plan."""
