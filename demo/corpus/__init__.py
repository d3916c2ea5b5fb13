"""Generates the text the demo models learn from. Pure: everything follows from the `random.Random` passed in."""
