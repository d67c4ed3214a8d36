"""The data plane: activations from stage to stage, and nothing else."""
