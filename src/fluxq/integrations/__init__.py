"""Loading of fluxq checkpoints where users already work."""
