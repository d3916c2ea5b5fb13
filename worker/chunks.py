"""How many prompt tokens go beside answers in one step: so many that the answers hardly stutter. Pure."""

STRETCH = 1.7  # times what a step of answers alone takes
FEWEST, FIRST = 16, 32  # tokens
MOST_GROWTH = 1.5  # from step to step
KEPT = 0.8  # of the average, when a step is added to it


class ChunkSizer:
    """Learns from measured steps. A step with more than a few prompt tokens takes time about in proportion to them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._quiet_s = 0.0  # average of steps without prompt tokens; 0: none was measured
        self._size = float(min(FIRST, most))

    @property
    def size(self) -> int:
        """Prompt tokens beside answers in the next step."""
        return int(self._size)

    def note_step(self, num_answers: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many answers' tokens and prompt tokens took so long."""
        if not num_answers or seconds <= 0:
            return
        if not num_prompt_tokens:
            self._quiet_s = KEPT * self._quiet_s + (1 - KEPT) * seconds if self._quiet_s else seconds
        elif self._quiet_s:
            longest_s = STRETCH * self._quiet_s
            if seconds > longest_s or num_prompt_tokens >= self.size:
                fitting = min(num_prompt_tokens * longest_s / seconds, self._size * MOST_GROWTH, self._most)
                self._size = max(fitting, min(FEWEST, self._most))
