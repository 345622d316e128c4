"""Why, where, and where to cut: what the experiments of ``parity explain`` find in a child. Judges nothing."""
