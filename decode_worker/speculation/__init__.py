"""Drafting tokens ahead, so that one engine step gives several."""
