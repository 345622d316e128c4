"""One training step and its trajectory, eager and in an arm, and what their differences say."""
